from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.device_spec import DEVICES
from lengthwise.core.errors import InputError
from lengthwise.core.specs import MODELS, ClusterSpec, ModelSpec, cluster_preset, model_preset
from lengthwise.core.wording import GIB, bytes_in_words, needed_and_available


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55),
        ("qwen2.5-0.5b", 0.494), ("gpt-12288", 174.6), ("bert-1024", 0.3352),
    ],
)  # fmt: skip
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
    uneven = cluster_preset("12x8+4xA800-80GB")
    assert (uneven.num_devices, uneven.last_node_devices, uneven.name) == (100, 4, "12x8+4xA800-80GB")
    assert cluster_preset("8+4xA800-80GB").name == "1x8+4xA800-80GB"
    for num_devices, shape in ((100, "12x8+4"), (64, "8x8"), (5, "1x5"), (9, "1x8+1")):
        made = ClusterSpec.of_devices(num_devices, uneven.device, devices_per_node=8)
        assert (made.shape, made.num_devices) == (shape, num_devices)
    assert cluster_preset("cpu", memory_gib=1).device.memory_bytes == 2**30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_preset("lama-7b"), "did you mean llama-7b"),
        (lambda: cluster_preset("8xA100-80G"), "did you mean A100-80GB"),
        (lambda: cluster_preset("8xB200"), r"did you mean B200-180GB\?"),
        (lambda: cluster_preset("8xA100"), r"did you mean A100-40GB or A100-80GB\?"),
        (lambda: cluster_preset("0xcpu"), "not NODESxDEVICESxDEVICE"),
        (lambda: cluster_preset("1x2x3xcpu"), "not NODESxDEVICESxDEVICE"),
        (lambda: cluster_preset("1x2x3+1xcpu"), "not NODESxDEVICESxDEVICE"),
        (lambda: cluster_preset("2x4+4xcpu"), "its last node must have from 1 to 3 devices"),
        (lambda: cluster_preset("2x4+0xcpu"), "its last node must have from 1 to 3 devices"),
        (lambda: cluster_preset(f"2x4+{10**30}xcpu"), "its last node must have from 1 to 3 devices"),
        (lambda: ClusterSpec.of_devices(0, DEVICES["cpu"], devices_per_node=8), "at least one device"),
        (lambda: ClusterSpec(num_nodes=1, devices_per_node=2, device=DEVICES["cpu"], last_node_devices=2), "fewer"),
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


def attention_flops(spec, length):
    per_token = 6.0 * (spec.num_layers * spec.layer_matmul_params + spec.hidden_size * spec.vocab_size)
    return spec.train_flops(np.array([length]))[0] - per_token * length


def test_attention_along_two_axes_in_turn_reaches_the_mean_of_a_frame_and_the_number_of_frames():
    spec = model_preset("transformer-2d-1.2b")
    assert spec.reach(np.array([8 * 256.0])) == (256 + 8) / 2
    assert spec.reach(np.array([100.0])) == (100 + 100 / 256) / 2  # less than a frame
    for length in (4096, 4 * 4096):
        of_all = attention_flops(replace(spec, family="bert"), length)
        assert attention_flops(spec, length) == pytest.approx(of_all / length * (256 + length / 256) / 2)


@pytest.mark.parametrize(("name", "billions"), [("transformer-1d-5b", 5.0), ("transformer-2d-1.2b", 1.2)])
def test_presets_of_dcp_have_its_numbers_of_parameters(name, billions):
    assert model_preset(name).num_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_where_there_are_as_many_frames_as_tokens_in_one_attention_reaches_the_square_root_of_the_tokens():
    spec = replace(model_preset("transformer-2d-1.2b"), frame_size=0)
    assert spec.reach(np.array([4096.0])) == 64 == replace(spec, frame_size=64).reach(np.array([4096.0]))
    assert attention_flops(spec, 4 * 4096) == pytest.approx(8 * attention_flops(spec, 4096))


def test_digest_counts_fields_of_some_families_only_where_they_are_set():
    spec = MODELS["llama-tiny"]
    assert len({replace(spec, **more).digest for more in ({}, {"max_positions": 8}, {"frame_size": 8})}) == 3
    assert replace(spec, mask_token_id=8).digest == spec.digest
    assert spec.digest == "18fa868677322ff2"  # of profiles made before there were such fields


def test_a_model_that_sees_what_comes_later_predicts_masked_tokens():
    masked = {name for name, spec in MODELS.items() if spec.objective == "masked"}
    assert masked == {"bert-1024", "bert-tiny", "transformer-2d-1.2b", "transformer-2d-tiny"}


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("exponent", range(0, 50))
def test_a_size_that_is_not_nothing_never_reads_like_it(exponent, digits):
    for num_bytes in (2**exponent, 2**exponent * 3 // 2, max(1, 2**exponent // 10), 2**exponent / 10):
        number, unit = bytes_in_words(max(1, num_bytes), digits=digits).split()
        size = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}[unit]
        assert float(number.replace(",", "")) * size == pytest.approx(max(1, num_bytes), rel=0.5)
    assert bytes_in_words(0) == "0 bytes"


def test_what_is_needed_is_rounded_up():
    assert needed_and_available(80 * GIB + 1, 80 * GIB) == ("80.1 GiB", "80.0 GiB")
    assert needed_and_available(0.06 * GIB, 0.04 * GIB) == ("61.5 MiB", "41.0 MiB")
    assert needed_and_available(1001, 1000) == ("0.978 KiB", "0.977 KiB")
    assert needed_and_available(51, 50) == ("51 bytes", "50 bytes")
    assert needed_and_available(2 * GIB, 0) == ("2.0 GiB", "0.0 GiB")


@pytest.mark.parametrize("gib", [73.36, 73.34, 51.6 - 1e-9, 0.52])
def test_what_there_is_reads_as_everywhere_else(gib):
    """Not as 73.4 GiB here and 73.3 GiB there, nor as 51.5 GiB where 51.6 was asked for."""
    assert needed_and_available(100 * GIB, gib * GIB)[1] == bytes_in_words(gib * GIB)


def test_what_fits_does_not_read_like_more_than_there_is():
    assert needed_and_available(35.97 * GIB, 35.99 * GIB) == ("35.97 GiB", "35.99 GiB")
    assert needed_and_available(35.9 * GIB, 35.9 * GIB + 9) == ("38,547,331,482 bytes", "38,547,331,490 bytes")
    assert needed_and_available(20 * GIB, 40 * GIB) == ("20.0 GiB", "40.0 GiB")


@pytest.mark.parametrize("host_memory_gib", [-1.0, float("nan"), float("inf")])
def test_host_memory_that_is_no_amount_is_refused(host_memory_gib):
    with pytest.raises(InputError, match="host memory of a device must be 0 to 1,048,576 GiB"):
        cluster_preset("1x2xH100-80GB", host_memory_gib=host_memory_gib)
