"""Specifications that are made in Python refuse what no device, cluster or model has, by the field's name."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from lengthwise.core.device_spec import DEVICES, DeviceSpec
from lengthwise.core.errors import InputError
from lengthwise.core.specs import MODELS, ClusterSpec, ModelSpec, cluster_preset

GPU, MODEL, CLUSTER = DEVICES["H100-80GB"], MODELS["llama-tiny"], cluster_preset("2x8xH100-80GB")
NUMBERS = [
    *((GPU, field.name) for field in fields(DeviceSpec) if field.type not in (str, "str")),
    *((CLUSTER, name) for name in ("num_nodes", "devices_per_node", "last_node_devices")),
    *((MODEL, field.name) for field in fields(ModelSpec) if field.type in (int, float)),
]


@pytest.mark.parametrize(("spec", "field"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_number_of_a_specification_is_held_against_bounds(spec, field):
    for value in (-1, -math.inf, math.nan, "many", True):
        with pytest.raises(InputError, match=rf"\b{field} must be a"):
            replace(spec, **{field: value})
    if field not in ("link_bytes_per_s", "network_bytes_per_s", "matmul_share", "attention_share"):  # cost nothing then
        with pytest.raises(InputError, match=rf"\b{field} must be a"):
            replace(spec, **{field: math.inf})


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (
            GPU,
            {"network_bytes_per_s": 0},
            "device H100-80GB: network_bytes_per_s must be a number from 1 upwards, not 0",
        ),
        (GPU, {"link_bytes_per_s": 1e-300}, "link_bytes_per_s must be a number from 1 upwards"),
        (GPU, {"flops_per_s": 0.0}, r"flops_per_s must be a number from 1 to 1e\+21, not 0\.0"),
        (GPU, {"float32_flops_per_s": 0.5}, r"float32_flops_per_s must be a number from 1 to 1e\+21, or 0, not 0\.5"),
        (GPU, {"memory_bytes": 8.5e10}, "memory_bytes must be a whole number from 1 to"),
        (GPU, {"price_per_hour": 0}, r"price_per_hour must be a number above 0 and at most 1e\+09, or None, not 0"),
        (GPU, {"name": None}, "device: name must be text, not None"),
        (CLUSTER, {"num_nodes": 2.5}, "cluster: num_nodes must be a whole number from 1 to 65,536, not 2.5"),
        (CLUSTER, {"num_nodes": 1 << 14}, "at most 65,536 devices; got 131,072"),
        (CLUSTER, {"device": "H100-80GB"}, "cluster: device must be a DeviceSpec, not 'H100-80GB'"),
        (MODEL, {"hidden_size": 64.0}, "model llama-tiny: hidden_size must be a whole number from 1 to"),
        (MODEL, {"window": 8, "num_window_layers": 5}, "num_window_layers must be at most its 4 layers, not 5"),
        (MODEL, {"stored_ffn_size": 8}, "stored_ffn_size must be at least ffn_size, 384, or 0 for as much, not 8"),
        (MODEL, {"mask_token_id": -1}, "mask_token_id must be a whole number from 0"),
    ],
)
def test_messages_name_the_field_and_its_bounds(spec, changes, message):
    with pytest.raises(InputError, match=message):
        replace(spec, **changes)


def test_numbers_of_numpy_become_those_of_python():
    device = replace(GPU, memory_bytes=np.int64(GPU.memory_bytes), flops_per_s=np.float32(1e12), link_call_s=0)
    assert (type(device.memory_bytes), type(device.flops_per_s)) == (int, float)
    assert replace(MODEL, num_layers=np.int64(4)).digest == MODEL.digest
    assert ClusterSpec(num_nodes=np.int8(1), devices_per_node=2, device=GPU).name == "1x2xH100-80GB"


def test_infinitely_fast_links_are_no_mistake():
    assert replace(GPU, network_bytes_per_s=math.inf, link_bytes_per_s=math.inf).link_bytes_per_s == math.inf
