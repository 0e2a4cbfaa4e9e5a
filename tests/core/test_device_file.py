"""Devices from a YAML file."""

from dataclasses import replace

import pytest

from lengthwise.config.run_config import load
from lengthwise.core.device_file import read_device, resolve_device
from lengthwise.core.device_spec import DEVICES, device_of_gpu
from lengthwise.core.errors import InputError
from lengthwise.core.specs import cluster_preset

SMALLEST = """
memory_gib: 96
bfloat16_tflops: 503.8
memory_gbyte_per_s: 1792
link_gbyte_per_s: 64
network_gbit_per_s: 400
"""


@pytest.mark.parametrize(
    ("gpu_name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA B200", "B200-180GB"),
        ("NVIDIA GB200", "GB200-186GB"), ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"), ("NVIDIA A10G", "A10G-24GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"), ("NVIDIA GeForce RTX 3090", None), ("NVIDIA A10", None),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_the_name_of_its_driver(gpu_name, preset):
    device = device_of_gpu(gpu_name)
    assert (device and device.name) == preset


@pytest.fixture
def write(tmp_path):
    def write(text, name="my-gpu.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_file_says_what_a_data_sheet_says(write):
    more = "name: RTX-PRO-6000\nfloat32_tflops: 125\nlink_latency_us: 20\nnetwork_latency_us: 50\n"
    device = read_device(write(SMALLEST + more + "devices_per_node: 4\nprice_per_hour: 2.5\n"))
    assert (device.name, device.memory_bytes, device.devices_per_node) == ("RTX-PRO-6000", 96 * 2**30, 4)
    assert device.peak_flops_per_s("bfloat16") == pytest.approx(503.8e12)
    assert device.peak_flops_per_s("float32") == pytest.approx(125e12)
    assert device.network_bytes_per_s == pytest.approx(50e9) and device.link_bytes_per_s == 64e9
    assert (device.link_call_s, device.network_call_s) == pytest.approx((20e-6, 50e-6))
    assert device.price_per_hour == 2.5


def test_a_file_may_say_which_shares_of_the_peak_rate_are_reached(write):
    text = "matmul_share: 0.5\nactivation_passes: 4\nattention_share: 0.25\n"
    device = read_device(write(SMALLEST + text))
    assert device.matmul_flops_per_s("bfloat16") == pytest.approx(0.5 * 503.8e12)
    assert device.activation_passes == 4
    assert device.attention_flops_per_s("bfloat16") == pytest.approx(0.25 * 503.8e12)


def test_what_a_file_leaves_out_is_as_in_presets(write):
    device, preset = read_device(write(SMALLEST)), DEVICES["H100-80GB"]
    assert device.name == "my-gpu" and device.price_per_hour is None
    assert device.peak_flops_per_s("float32") == device.flops_per_s
    for name in ("devices_per_node", "link_call_s", "network_call_s"):
        assert getattr(device, name) == getattr(preset, name)


def test_a_preset_written_into_a_file_is_the_preset(write):
    text = "name: H100-80GB\nmemory_gib: 79.1\nbfloat16_tflops: 989\nmemory_gbyte_per_s: 3350\nlink_gbyte_per_s: 450\n"
    host = "host_gbyte_per_s: 64\nhost_memory_gib: 230.4\nhost_memory_gbyte_per_s: 76.8\n"
    device = read_device(write(text + "network_gbit_per_s: 400\n" + host))
    measured = ("matmul_share", "attention_share", "overlap_slowdown", "speed_error")
    assert device == replace(DEVICES["H100-80GB"], **{name: getattr(device, name) for name in measured})


def test_memory_may_be_asked_for_by_the_round_number_of_a_name_and_not_above():
    device = DEVICES["H100-80GB"]
    assert device.with_memory(80).memory_bytes == device.memory_bytes > device.with_memory(64).memory_bytes
    with pytest.raises(InputError, match=r"90 GiB of memory are more than the 79\.1 GiB of a H100-80GB"):
        device.with_memory(90)


def test_a_cluster_of_devices_from_a_file(write):
    path = write(SMALLEST, "box.yaml")  # with an x in its name
    cluster = cluster_preset(f"2x4x{path}")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device) == (2, 4, resolve_device(str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gib: 80\n", "lacks bfloat16_tflops, memory_gbyte_per_s, link_gbyte_per_s, network_gbit_per_s"),
        (SMALLEST + "memory_gb: 80\n", "no 'memory_gb'; did you mean memory_gib"),
        (SMALLEST.replace("96", "-1"), "memory_gib must be a number above 0 and at most 1,048,576, not -1"),
        (SMALLEST.replace("96", "much"), "memory_gib must be a number above 0"),
        (SMALLEST.replace("96", ".nan"), "memory_gib must be a number above 0"),
        (SMALLEST + "devices_per_node: 2.5\n", "devices_per_node must be a whole number from 1 and at most 65,536"),
        (SMALLEST + "attention_share: 1.5\n", "attention_share must be a number above 0 and at most 1, not 1.5"),
        (SMALLEST + "matmul_share: 1.0e-300\n", "matmul_share must be a number from 1e-06 upwards, not 1e-300"),
        (SMALLEST + "price_per_hour: true\n", "price_per_hour must be a number above 0"),
        (SMALLEST + "name: cpu\n", "not cpu, but is 'cpu'"),
        (SMALLEST + "name: a b\n", "name must be letters, digits"),
        ("- 1\n", "not settings such as memory_gib: 80"),
        ("a: [\n", "is not a device file: line"),
        ("\x00", "is not a device file: character 1"),
    ],
)
def test_what_is_no_device_is_refused_by_file_and_field(write, text, message):
    path = write(text)
    with pytest.raises(InputError, match=message) as error:
        read_device(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named_with_the_nearest_beside_it(write):
    path = write(SMALLEST)
    with pytest.raises(InputError, match=rf"there is no device file .*my-gpus\.yml; did you mean {path}\?"):
        resolve_device(str(path.with_name("my-gpus.yml")))
    with pytest.raises(InputError, match=r"there is no device file nowhere\.yaml"):
        resolve_device("nowhere.yaml")


def test_a_file_may_describe_the_host(write):
    text = "host_gbyte_per_s: 450\nhost_memory_gib: 432\nhost_memory_gbyte_per_s: 400\n"
    device = read_device(write(SMALLEST + text))
    assert (device.host_bytes_per_s, device.host_memory_bytes) == (450e9, 432 * 2**30)
    assert device.host_memory_bytes_per_s == 400e9
    with pytest.raises(InputError, match="host_memory_gib is missing"):
        read_device(write(SMALLEST + "host_gbyte_per_s: 450\n"))


def test_every_gpu_has_a_share_of_a_host_and_a_cpu_has_none():
    for name, device in DEVICES.items():
        shares = (device.host_bytes_per_s, device.host_memory_bytes, device.host_memory_bytes_per_s)
        assert (min(shares) > 0) == (max(shares) > 0) == (name != "cpu")
    assert cluster_preset("8xH100-80GB", host_memory_gib=512).device.host_memory_bytes == 512 * 2**30
    with pytest.raises(InputError, match="512 GiB of host memory for a cpu"):
        cluster_preset("2xcpu", host_memory_gib=512)
    assert cluster_preset("2xcpu", host_memory_gib=0).device == DEVICES["cpu"]
    assert load(None, ["cluster.host_memory_gib=0"]).cluster.host_memory_gib == 0
    with pytest.raises(InputError, match="host_gbyte_per_s"):
        replace(DEVICES["H100-80GB"], host_bytes_per_s=0.0).with_host_memory(1)
