"""Sizes from a ``config.json``, compared with what transformers builds from it."""

import json
import sys

import pytest

import lengthwise
from lengthwise.core.errors import InputError
from lengthwise.session.priced_model import SAID_BEYOND, count_params, read_compared_spec

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 300,
}  # fmt: skip
LAYOUTLM = {
    **SIZES, "model_type": "layoutlm", "hidden_act": "gelu", "architectures": ["LayoutLMForMaskedLM"],
    "max_2d_position_embeddings": 50, "max_position_embeddings": 32,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"image_size": 8},
    "text_config": {**SIZES, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 4},
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    def folder_of(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return folder_of


def test_a_difference_to_the_model_of_transformers_is_said_with_both_numbers(folder_of):
    from transformers import LayoutLMConfig, LayoutLMForMaskedLM

    model = LayoutLMForMaskedLM(
        LayoutLMConfig(**{key: value for key, value in LAYOUTLM.items() if key != "model_type"})
    )
    spec = read_compared_spec(folder_of(LAYOUTLM))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert spec.unpriced.endswith(f"{spec.num_params:,} parameters are priced, transformers builds {count:,}")
    assert not spec.causal


def test_a_model_of_another_size_is_refused_with_both_numbers(folder_of):
    folder = folder_of({**LAYOUTLM, "max_2d_position_embeddings": 4000})
    with pytest.raises(InputError, match=r"a model of 35,\d+ parameters, and transformers builds one of .*prepare"):
        lengthwise.plan([100, 50], model=folder, cluster="1x2xH100-80GB", steps=1)


def test_of_several_parts_the_text_model_is_compared(folder_of):
    assert read_compared_spec(folder_of(GEMMA3)).unpriced == "everything but the text model"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LAYOUTLM, "model_type": "of_tomorrow"}, "has no of_tomorrow to compare with"),
        ({**LAYOUTLM, "type_vocab_size": "two"}, "builds no LayoutLMForMaskedLM of them: "),
    ],
)
def test_what_transformers_cannot_build_is_said_not_to_be_compared(folder_of, config, words):
    assert words in read_compared_spec(folder_of(config)).unpriced


def test_without_transformers_it_is_said_that_nothing_was_compared(folder_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    count_params.cache_clear()
    spec = read_compared_spec(folder_of(LAYOUTLM))
    count_params.cache_clear()
    assert "what its fields do not say (transformers and torch are not there to compare with)" in spec.unpriced


@pytest.mark.deep
def test_no_family_of_transformers_is_priced_as_another_model_in_silence(tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    num_compared = 0
    for family, name in [*CAUSAL.items(), *MASKED.items()]:
        try:
            config = CONFIG_MAPPING[family]()
        except Exception:  # the defaults of some make no model
            continue
        config.architectures = [name]
        folder = tmp_path / name
        config.save_pretrained(folder)
        try:
            spec = read_compared_spec(folder)
        except InputError:
            continue
        counted = count_params(json.dumps(json.loads((folder / "config.json").read_text())))
        words = "what its fields do not say" if isinstance(counted, str) else "parameters are priced"
        is_close = not isinstance(counted, str) and abs(spec.num_params / counted - 1) <= SAID_BEYOND
        assert is_close or spec.family != "generic" or words in spec.unpriced, family
        num_compared += 1
    assert num_compared > 120
