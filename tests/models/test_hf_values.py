"""What transformers writes into config.json is read, of every family that it has."""

import json

import pytest

from lengthwise.core.errors import InputError
from lengthwise.models.hf_config import UnsupportedModelError, read_config, read_spec
from lengthwise.models.hf_sizes import read_priced_spec
from lengthwise.models.stock_model import read_stock_model

FEWEST_FAMILIES = 100
"""transformers 5 has eight times as many that can be made without arguments."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6, "mrope_interleaved": True},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mscale_all_dim": 0.0, "factor": None},
}


def folder_of(folder, config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_configuration_of_every_family_of_transformers_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    refused, num_read, families = {}, 0, transformers.CONFIG_MAPPING.keys()
    for name in families:
        try:
            config = transformers.CONFIG_MAPPING[name]()
            config.architectures = ["AnyForCausalLM"]
            config.save_pretrained(tmp_path / name)
        except Exception:  # classes of several parts that have no defaults, each with an error of its own
            continue
        try:
            read_stock_model(tmp_path / name)
            num_read += 1
        except InputError as error:
            refused[name] = str(error)
    assert not refused
    assert num_read >= FEWEST_FAMILIES


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": BY_LAYER},
        {"rope_scaling": BY_LAYER},
        {"rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "attention_factor": None}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"intermediate_size": [48, 64], "rope_theta": [1e4, 1e6], "max_position_embeddings": 1200.0},
        {"time_step_limit": [0.0, float("inf")]},
    ],
)
def test_forms_that_transformers_writes_are_read(tmp_path, values):
    config = read_config(folder_of(tmp_path / "model", {**LLAMA, **values}))
    assert config == {**LLAMA, **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_parameters": BY_LAYER | {"full_attention": {"rope_theta": -1.0}}},
            "full_attention.rope_theta must be a",
        ),
        ({"rope_scaling": {"full_attention": {"rope_type": 3}}}, "rope_scaling.full_attention.rope_type must be text"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta must be a number above 0 and at most 1e.15, not True"),
        ({"rope_parameters": {"factor": "8"}}, "rope_parameters.factor must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0 and at most 1e.15, not inf"),
        ({"intermediate_size": [48, -1]}, "intermediate_size must be a whole number from 0 to .* not -1"),
        ({"vocab_size": [64, 64]}, "vocab_size must be a whole number"),
        ({"max_position_embeddings": 1200.5}, "max_position_embeddings must be a whole number"),
    ],
)
def test_values_that_no_model_can_have_are_refused_by_name(tmp_path, values, message):
    with pytest.raises(InputError, match=message):
        read_config(folder_of(tmp_path / "model", {**LLAMA, **values}))


def test_own_layers_have_one_size_and_one_set_of_rotary_parameters(tmp_path):
    with pytest.raises(InputError, match=r"intermediate_size must be a whole number .* not \[48, 64\]"):
        read_spec(folder_of(tmp_path / "sizes", {**LLAMA, "intermediate_size": [48, 64]}))
    with pytest.raises(UnsupportedModelError, match=r"by type of layer \(full_attention, sliding_attention\)"):
        read_spec(folder_of(tmp_path / "rope", {**LLAMA, "rope_parameters": BY_LAYER}))
    with pytest.raises(InputError, match="layers or parts of sizes of their own have no cost model"):
        read_priced_spec(folder_of(tmp_path / "priced", {**LLAMA, "intermediate_size": [48, 64]}))
