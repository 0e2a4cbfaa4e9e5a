"""Folders of Hugging Face models whose config.json nobody can mean, or without weights, refused before ranks start."""

import json

import pytest

from lengthwise.core.errors import InputError
from tests.cli.bad_inputs import Case, few_of_each, no_document

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
NAN, INFINITY = float("nan"), float("inf")
NO_SIZE = (-1, 0, NAN, INFINITY, "64", [], {}, True, 10**12, 1.5, None)
VALUES = {
    "architectures": (None, [], "LlamaForCausalLM", ["GPTX"], 7, [7], ["LlamaForCausalLM"] * 2),
    "hidden_size": NO_SIZE,
    "intermediate_size": NO_SIZE,
    "num_hidden_layers": NO_SIZE,
    "num_attention_heads": (*NO_SIZE, 3),
    "num_key_value_heads": (-1, NAN, "2", [], True, 3, 1.5),
    "vocab_size": NO_SIZE,
    "head_dim": (-2, 7, "16", 1.5, True),
    "rms_norm_eps": (-1, 0, NAN, INFINITY, "1e-5", [], True, 5),
    "rope_theta": (-1, 0, NAN, INFINITY, "1e4", {}, True),
    "hidden_act": ("gelu", 7, [], "<script>"),
    "tie_word_embeddings": ("yes", 1, 0.5, []),
    "rope_scaling": (
        7,
        [],
        {"rope_type": "magic"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": NAN},
        {"rope_type": [1]},
    ),
    "layer_types": (["sliding_attention"], "x", [7]),
    "quantization_config": ({},),
}


def _writing(document):
    def spoil(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(document))

    return spoil


def _in_folder(spoil):
    def spoil_inside(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        spoil(folder)

    return spoil_inside


def _cases() -> list[Case]:
    command = ("train", "data.index=GOOD/index", "model.hf=GOOD/model", "train.steps=1", "run_folder=GOOD/new")
    cases = [
        Case(
            name=f"{key}={str(value)[:20]}", arguments=command, words=("model",), spoil=_writing({**CONFIG, key: value})
        )
        for key, values in VALUES.items()
        for value in values
        if value != [] or key in ("architectures", "hidden_size")
    ]
    cases += [
        Case(name=f"config.json: {name}", arguments=command, words=("config.json", word), spoil=_in_folder(spoil))
        for name, (spoil, word) in no_document("model/config.json").items()
    ]
    priced = ("plan", "data.index=GOOD/index", "cluster.name=1xcpu", "model.hf=GOOD/model", "train.steps=1")
    cases += [  # what training refuses may have a price, but no size that cannot be meant
        Case(
            name=f"priced {key}={value!s}",
            arguments=priced,
            words=("config.json",),
            spoil=_writing({**CONFIG, key: value}),
        )
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
        for value in (0, -1, NAN, "64", {}, 1.5)
    ]
    return [*cases, Case(name="no folder", arguments=command, words=("model",))]


CASES = _cases()


@pytest.mark.parametrize("case", few_of_each(CASES), ids=[f"{k}-{case.name[:40]!a}" for k, case in enumerate(CASES)])
def test_a_model_that_cannot_be_meant_is_refused(case, refuse):
    refuse(case)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", 7, None, "a/b.safetensors"])
def test_an_index_of_weights_names_files_beside_it_alone(tmp_path, name):
    from lengthwise.models.weight_files import weight_files

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="no file beside it"):
        weight_files(tmp_path)
