"""Which runs sample text, and which are refused."""

import json

import pytest

from lengthwise.config.run_config import check
from lengthwise.core.errors import InputError
from lengthwise.core.specs import model_preset
from lengthwise.data.corpus import open_corpus
from lengthwise.session.sample_prompts import text_sampling
from tests.index.build import build, write_jsonl


@pytest.fixture
def corpora(tmp_path):
    """Indexes of text and of ready token ids."""
    made = {"text": build(write_jsonl(tmp_path / "text.jsonl", ["abc" * 9, "d" * 40]), tmp_path / "text").path}
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"text": [1, 2, 3, number]}) + "\n" for number in range(9)))
    return made | {"ids": build(tmp_path / "ids.jsonl", tmp_path / "ids").path}


def sampling_of(index, *, preset="llama-tiny", **train):
    config = check({"data": {"index": str(index)}, "train": train})
    return text_sampling(config, open_corpus(config.data), model_preset(preset))


PROMPTS = {"sample_every": 10, "sample_prompts": ["Once\nupon", "é"]}


def test_prompts_are_tokens_of_the_tokenizer_of_the_index(corpora):
    sampling = sampling_of(corpora["text"], **PROMPTS)
    assert [bytes(tokens).decode() for _, tokens in sampling.prompts] == PROMPTS["sample_prompts"]
    assert sampling.eos_id == 256 and sampling.decode([104, 105]) == "hi"
    assert [step for step in range(1, 26) if sampling.is_due(step, is_last=step == 25)] == [10, 20, 25]
    assert sampling_of(corpora["text"]) is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("text", {**PROMPTS, "preset": "bert-tiny"}, "predicts hidden tokens, so it continues no text"),
        ("text", {**PROMPTS, "sample_prompts": [""]}, "'' has no tokens; a prompt has at least 1"),
        ("ids", PROMPTS, "no tokenizer is known, since the index was made of token ids; name a model.hf"),
    ],
)
def test_what_cannot_be_sampled_is_refused(corpora, name, settings, message):
    with pytest.raises(InputError, match=message):
        sampling_of(corpora[name], **settings)
