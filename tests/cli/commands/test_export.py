"""`lengthwise export`: transformers loads what was trained, with the tokenizer and the settings it came with."""

import json
import shutil

import pytest
import torch

from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from tests.chats import TEMPLATE, write_model
from tests.cli.runs import lengthwise, settings

CHAT = [{"role": "user", "content": "How long is a coast?"}]
SMALL = ("data.max_length=60", "data.tokens_per_step=240", "train.steps=2", "train.checkpoint_every=0")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "chatty"
    write_model(folder)
    (folder / "README.md").write_text("a model card")
    (folder / "optimizer.pt").write_bytes(b"no small file")
    return folder


@pytest.fixture(scope="module")
def corpus(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text("words and words. " * (number + 1))
    build_index(IndexSettings(source=folder, tokenizer=str(hf / "tokenizer.json")), folder.parent / "index", workers=1)
    return folder.parent / "index"


@pytest.fixture(scope="module")
def trained(hf, corpus, tmp_path_factory):
    """A run that started from a folder which is gone by now."""
    folder, source = tmp_path_factory.mktemp("run") / "run", tmp_path_factory.mktemp("moved") / "chatty"
    shutil.copytree(hf, source)
    done = lengthwise("train", *settings(corpus, folder, *SMALL, f"model.hf={source}"))
    assert f"lengthwise report {folder}\nfor transformers: lengthwise export {folder} --out DIR\n" in done.stderr
    shutil.rmtree(source)
    return folder


def test_a_fine_tuned_model_comes_out_with_all_that_it_came_with(hf, trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "out"
    lengthwise("export", trained, "--out", out)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hf, out))
    assert before["dtype"] == "bfloat16" and before["eos_token_id"] == [258, 256]
    assert after == {**before, "dtype": "float32"}
    names = {path.name for path in hf.iterdir()} - {"optimizer.pt"}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (hf / name).read_bytes(), name
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.chat_template) == (258, 259, TEMPLATE)
    assert GenerationConfig.from_pretrained(out).temperature == 0.6
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert inputs["input_ids"][0, 0] == 257
    torch.manual_seed(0)
    assert model.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3
    stock = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    moved = [name for name, weight in model.named_parameters() if not torch.equal(weight, stock.get_parameter(name))]
    assert len(moved) == len(list(stock.named_parameters()))


def test_an_export_without_the_model_s_own_files_is_refused(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(copy / "model")
    told = lengthwise("export", copy, "--out", tmp_path / "out", expected=2).stderr
    assert "(model.hf), is gone, and so is its copy" in told
    assert not (tmp_path / "out").exists()
    shutil.copytree(trained / "model", copy / "model")
    config = json.loads((copy / "model" / "config.json").read_text())
    (copy / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    told = lengthwise("export", copy, "--out", tmp_path / "out", expected=2).stderr
    assert "config.json is of another model than the one that was trained" in told


def test_a_model_trained_on_longer_sequences_says_so(hf, corpus, tmp_path):
    source = shutil.copytree(hf, tmp_path / "short")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    lengthwise("train", *settings(corpus, tmp_path / "run", *SMALL, f"model.hf={source}"))
    lengthwise("export", tmp_path / "run", "--out", tmp_path / "out")
    longest = json.loads((tmp_path / "run" / "corpus.json").read_text())["max_length"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == longest > 16


def test_a_preset_comes_out_with_the_tokenizer_of_its_index(hf, corpus, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lengthwise("train", *settings(corpus, tmp_path / "run", *SMALL, "model.preset=llama-tiny"))
    lengthwise("export", tmp_path / "run", "--out", tmp_path / "out")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<pad>")
    assert (model.config.eos_token_id, model.config.pad_token_id) == (258, 259)
    inputs = tokenizer("words and", return_tensors="pt", return_token_type_ids=False)
    assert inputs["input_ids"].shape == (1, 9)
    assert tokenizer.decode(model.generate(**inputs, max_new_tokens=2)[0]).startswith("words and")
