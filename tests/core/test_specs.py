import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.specs import GIB, MODELS, ModelSpec, cluster_preset, gib_up, model_preset


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-3-8b", 8.03), ("qwen2.5-0.5b", 0.494)],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    assert model_preset(name).num_params / 1e9 == pytest.approx(billions, rel=0.002)


def test_transformer_1d_has_twelve_squares_per_layer():
    spec = model_preset("transformer-1d-5b")
    assert spec.num_layers * spec.layer_matmul_params == 12 * 42 * 3072**2


def test_flops_are_six_per_weight_and_quadratic_in_length():
    spec = model_preset("llama-7b")
    one, two = spec.train_flops(np.array([1024, 2048]))
    quadratic = (two - 2 * one) / 2 / 1024**2
    assert quadratic == pytest.approx(6 * spec.num_layers * spec.num_heads * spec.head_size)
    linear = one / 1024 - quadratic * 1024
    assert linear == pytest.approx(6 * (spec.num_params - spec.vocab_size * spec.hidden_size), rel=1e-3)


def test_clusters_are_read_as_nodes_devices_and_device():
    cluster = cluster_preset("8x4xA800-80GB")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (8, 4, 32)
    assert cluster_preset("2xcpu").num_devices == 2
    assert cluster_preset("H100-80GB").num_devices == 1
    assert cluster_preset(cluster.name) == cluster
    assert cluster_preset("cpu", memory_gib=1).device.memory_bytes == 2**30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_preset("lama-7b"), "did you mean llama-7b"),
        (lambda: cluster_preset("8xA100-80G"), "did you mean A100-80GB"),
        (lambda: cluster_preset("0xcpu"), "not NODESxDEVICESxDEVICE"),
        (lambda: cluster_preset("1x2x3xcpu"), "not NODESxDEVICESxDEVICE"),
        (lambda: cluster_preset("cpu", memory_gib=0), "must be positive"),
        (lambda: cluster_preset("cpu", memory_gib=float("nan")), "must be positive"),
        (lambda: cluster_preset("cpu", memory_gib=float("inf")), "must be positive and finite"),
    ],
)
def test_unknown_names_suggest_the_nearest(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_heads_must_share_key_value_heads_evenly():
    values = {name: getattr(MODELS["llama-tiny"], name) for name in ModelSpec.__dataclass_fields__}
    with pytest.raises(InputError, match="cannot share 3 key/value heads"):
        ModelSpec(**{**values, "num_kv_heads": 3})


def test_digest_ignores_the_name_alone():
    values = {name: getattr(MODELS["llama-tiny"], name) for name in ModelSpec.__dataclass_fields__}
    assert ModelSpec(**{**values, "name": "other"}).digest == MODELS["llama-tiny"].digest
    assert ModelSpec(**{**values, "vocab_size": 9}).digest != MODELS["llama-tiny"].digest


def test_attention_along_one_of_two_axes_reaches_the_square_root_of_the_tokens():
    spec = model_preset("transformer-2d-1.2b")
    per_token = 6.0 * (spec.num_layers * spec.layer_matmul_params + spec.hidden_size * spec.vocab_size)
    short, long = (spec.train_flops(np.array([n]))[0] - per_token * n for n in (4096, 4 * 4096))
    assert long == pytest.approx(8 * short)


def test_what_is_needed_is_rounded_up():
    assert gib_up(80 * GIB) == "80.0" and gib_up(80 * GIB + 1) == "80.1"
