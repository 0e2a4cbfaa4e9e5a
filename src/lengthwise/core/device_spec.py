"""Speeds, memory and price of one device, and presets from vendors' data sheets."""

import math
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.spec_fields import Bounds, check_fields
from lengthwise.core.wording import GIB

MEMORY_MARGIN = 0.06
"""Share of a GPU's memory that plans leave free for fragmentation and workspaces, unless asked otherwise."""
ROUND_NUMBER = 1.09
"""How far the memory in a device's name may exceed what it has: 80 GB are 79.1 GiB, 48 GB with ECC 44.4 GiB."""
CONTEXT_BYTES = GIB
"""Bytes that a GPU's context and libraries take, where nothing measures them."""
CALL_S = 3e-5
"""Seconds before the first byte of a collective call or hop on GPUs."""
CPU_CALL_S = 3e-4
"""``CALL_S`` for processes that talk through Gloo: 0.2 to 0.5 ms on two ranks."""
PCIE_4, PCIE_5 = 32e9, 64e9
"""Bytes per second and direction of sixteen lanes."""
ACTIVATION_PASSES = 15.1
"""``activation_passes`` of GPUs: reads and writes by norms, activations, rotary embeddings and sums with the residual,
and what products wait for at their edges. Fitted to A100s and H100s together."""
MOST_HOST_GIB = 1 << 20
"""Of a device; more is taken for a slip."""
HOST_MEMORY_FREE = 0.1
"""Share of the host's memory that plans leave to the operating system, data loaders and checkpoints, unless asked
otherwise."""
GBIT = 1e9 / 8
"""Bytes per second of a network of 1 Gbit/s."""
GBYTE = 1e9
"""Bytes per second of a link of 1 Gbyte/s."""
_MOST_BYTES = MOST_HOST_GIB * GIB
_MOST_RATE = 1e21
"""Floating-point operations or bytes per second: a billion times those of a device."""
_RATE, _RATE_OR_ZERO = Bounds(minimum=1, maximum=_MOST_RATE), Bounds(minimum=1, maximum=_MOST_RATE, also=0)
_LINK, _SHARE = Bounds(minimum=1, maximum=math.inf), Bounds(minimum=1e-6, maximum=math.inf)
_BOUNDS = {
    "memory_bytes": Bounds(minimum=1, maximum=_MOST_BYTES, is_whole=True),
    "flops_per_s": _RATE,
    "memory_bytes_per_s": _RATE,
    "link_bytes_per_s": _LINK,
    "network_bytes_per_s": _LINK,
    "float32_flops_per_s": _RATE_OR_ZERO,
    "link_call_s": Bounds(maximum=1e9),
    "network_call_s": Bounds(maximum=1e9),
    "devices_per_node": Bounds(minimum=1, maximum=1 << 16, is_whole=True),
    "price_per_hour": Bounds(is_above=True, maximum=1e9, also=None),
    "matmul_share": _SHARE,
    "activation_passes": Bounds(maximum=1000),
    "attention_share": _SHARE,
    "overlap_slowdown": Bounds(maximum=1),
    "speed_error": Bounds(maximum=10, also=None),
    "margin_bytes": Bounds(maximum=_MOST_BYTES, is_whole=True),
    "host_bytes_per_s": _RATE_OR_ZERO,
    "host_memory_bytes": Bounds(maximum=math.inf, is_whole=True),
    "host_memory_bytes_per_s": _RATE_OR_ZERO,
}
"""Numbers that plans can be made with. What is infinitely fast, a link or a kind of work, costs nothing."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one CPU process.

    Raises:
        InputError: a field has a number that no device has, such as a rate of 0; the message names it.
    """

    name: str
    memory_bytes: int
    """Memory that plans may fill; in presets, all that CUDA reports."""
    flops_per_s: float
    """Peak dense rate in the compute dtype (bfloat16 on GPUs, float32 on CPU)."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Per device and direction, to the other devices of its node."""
    network_bytes_per_s: float
    """Per device and direction, to other nodes."""
    float32_flops_per_s: float = 0.0
    """Peak dense rate in float32; 0: that of ``flops_per_s``."""
    link_call_s: float = CALL_S
    """Seconds before the first byte of a collective call within a node."""
    network_call_s: float = CALL_S
    """Seconds before the first byte of a collective call between nodes."""
    devices_per_node: int = 8
    """Devices that share a fast link, where a cluster does not say."""
    price_per_hour: float | None = None
    """Price of one device for an hour, in any currency; None: not known."""
    matmul_share: float = 0.7
    """Share of the peak rate that products with weights reach."""
    activation_passes: float = ACTIVATION_PASSES
    """Times that what a layer keeps for its backward crosses the device's memory in a forward and a backward, which
    products do not hide; 0: their share counts it."""
    attention_share: float = 0.55
    """Share of the peak rate that attention reaches, forward and backward."""
    overlap_slowdown: float = 1.0
    """Seconds by which a second of pull or push beneath a pass makes the pass longer, to 1: nothing is won."""
    speed_error: float | None = None
    """Relative error that predictions for nine of ten public measurements of the device stay within; None: too few are
    known."""
    margin_bytes: int = 0
    """Memory beside ``memory_bytes`` that plans leave free."""
    host_bytes_per_s: float = 0.0
    """To and from the host's memory, per direction, where all devices of the node copy at once; 0: nothing can be put
    there, as of a CPU, whose memory is the host's."""
    host_memory_bytes: int = 0
    """The device's share of the host's memory, of which plans may fill all."""
    host_memory_bytes_per_s: float = 0.0
    """The device's share of what the host's processors read and write of it."""

    def __post_init__(self) -> None:
        check_fields("device", self, _BOUNDS)

    def with_margin(self, margin: float | None = None, *, context_bytes: int | None = None) -> "DeviceSpec":
        """The device without what plans leave free: context, libraries and a share of ``margin`` of its memory.

        ``margin`` None: ``MEMORY_MARGIN`` of a GPU, nothing of a CPU. ``context_bytes``: as measured, if it was.
        """
        if self.name == "cpu":
            free = int(self.memory_bytes * (margin or 0.0))
        else:
            context = min(CONTEXT_BYTES, self.memory_bytes // 2) if context_bytes is None else context_bytes
            free = context + int(self.memory_bytes * (MEMORY_MARGIN if margin is None else margin))
        free = max(0, min(free, self.memory_bytes - 1))
        return replace(self, memory_bytes=self.memory_bytes - free, margin_bytes=free)

    def without_margin(self) -> "DeviceSpec":
        """The device with all of its memory."""
        return replace(self, memory_bytes=self.memory_bytes + self.margin_bytes, margin_bytes=0)

    def with_host_memory(self, memory_gib: float) -> "DeviceSpec":
        """The device with ``memory_gib`` of the host's memory for plans.

        Raises:
            InputError: that is no amount of memory, or no link to the host is known.
        """
        if not 0 <= memory_gib <= MOST_HOST_GIB:
            raise InputError(
                f"host memory of a device must be 0 to {MOST_HOST_GIB:,} GiB, not {memory_gib} GiB; leave it out for "
                "nine tenths of a device's share"
            )
        if memory_gib and not self.host_bytes_per_s:
            why = "its memory is the host's" if self.name == "cpu" else "describe the link with host_gbyte_per_s"
            raise InputError(
                f"{memory_gib:g} GiB of host memory for a {self.name}, which can put nothing there: {why}; leave it out"
            )
        return replace(self, host_memory_bytes=int(memory_gib * GIB))

    @property
    def error_in_words(self) -> str:
        """How far predictions for this device are from measurements."""
        if self.speed_error is None:
            return f"too few measurements of {self.name} are public to say how far predictions for it are off"
        return (
            f"of public measurements on {self.name}, nine of ten are within {100 * self.speed_error:.0f} % of such "
            "predictions; policies share most of that error"
        )

    @property
    def memory_in_words(self) -> str:
        """What plans may fill, and of how much: 73.4 of 79.1 GiB."""
        if not self.margin_bytes:
            return f"{self.memory_bytes / GIB:g} GiB"
        return f"{self.memory_bytes / GIB:.1f} of {self.without_margin().memory_bytes / GIB:.1f} GiB"

    def with_memory(self, memory_gib: float) -> "DeviceSpec":
        """The device with ``memory_gib`` of its memory for plans, which a CPU may have any of.

        Raises:
            InputError: it has less.
        """
        physical_bytes = self.without_margin().memory_bytes
        if memory_gib * GIB > ROUND_NUMBER * physical_bytes and self.name != "cpu":
            raise InputError(
                f"{memory_gib:g} GiB of memory are more than the {physical_bytes / GIB:g} GiB of a {self.name}; "
                "give at most that, or describe a larger device in a YAML file"
            )
        num_bytes = int(memory_gib * GIB)
        return replace(
            self, memory_bytes=num_bytes if self.name == "cpu" else min(num_bytes, physical_bytes), margin_bytes=0
        )

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Rate of products with weights, without what lies between them."""
        return self.matmul_share * self.peak_flops_per_s(dtype)

    def attention_flops_per_s(self, dtype: str) -> float:
        """Rate of attention."""
        return self.attention_share * self.peak_flops_per_s(dtype)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak dense rate of products in ``dtype``."""
        is_wide = dtype in ("float32", "float64")
        return self.float32_flops_per_s if is_wide and self.float32_flops_per_s else self.flops_per_s


# Fitted to public measurements (docs/concepts/costs.md, accuracy). An H200 is an H100 with other memory. Blackwell has
# the H100's shares but for products, whose share is fitted to one system's nine runs on GB200s: too few to state an
# error. Others have the defaults.
_A100: dict[str, Any] = {
    "matmul_share": 0.83, "attention_share": 0.62, "overlap_slowdown": 0.88, "speed_error": 0.11,
}  # fmt: skip
_H100: dict[str, Any] = {"matmul_share": 0.7, "attention_share": 0.45, "overlap_slowdown": 0.49}
_BLACKWELL: dict[str, Any] = {**_H100, "matmul_share": 0.52}


def _host(memory_gib: int, *, link: float, memory: float) -> dict[str, Any]:
    """The fields of a device's share of its host: memory, and bytes per second of the link to it and of its own."""
    usable_bytes = int((1 - HOST_MEMORY_FREE) * memory_gib * GIB)
    return {"host_bytes_per_s": link, "host_memory_bytes": usable_bytes, "host_memory_bytes_per_s": memory}


# Memory as CUDA reports it, which is less than the name says; where reports differ, the least. Sources: torch's errors
# when it runs out, in issues on GitHub (A100-40GB: TianheWu/CoSeR#10; A100-80GB: lianqi1008/Control-GIC#6 and
# HiDream-ai/VAREdit#6; H100: vllm-project/vllm#27508; L40: QwenLM/Qwen3-VL#2097; RTX 4090: 3DTopia/Phidias-Diffusion#8;
# RTX 5090: Wan-Video/Wan2.1#465), and Hydraulis' tables for the A800. GB200, MI300X and A10G have what their names say.
# Vendor data sheets: dense bfloat16 rate, memory bandwidth, NVLink per direction; one 200 or 400 Gbit/s port per GPU.
# Hosts are assumed to be as in servers of eight GPUs like NVIDIA's DGX, an eighth each, and differ from site to site (a
# device file says otherwise): A100-40GB 1 TiB, A100-80GB 2 TiB of DDR4-3200 in sixteen channels, two GPUs behind
# sixteen lanes of PCIe 4.0; H100, H200 and B200 2 TiB of DDR5-4800 in sixteen channels, sixteen lanes of PCIe 5.0 for
# each GPU.
DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            name="A100-40GB", memory_bytes=int(39.39 * GIB), flops_per_s=312e12, memory_bytes_per_s=1.555e12,
            link_bytes_per_s=300e9, network_bytes_per_s=200 * GBIT, **_A100,
            **_host(128, link=PCIE_4 / 2, memory=51.2e9),
        ),
        DeviceSpec(
            name="A100-80GB", memory_bytes=int(79.14 * GIB), flops_per_s=312e12, memory_bytes_per_s=2.039e12,
            link_bytes_per_s=300e9, network_bytes_per_s=200 * GBIT, **_A100,
            **_host(256, link=PCIE_4 / 2, memory=51.2e9),
        ),
        DeviceSpec(
            name="A800-80GB", memory_bytes=81_252 * GIB // 1024, flops_per_s=312e12, memory_bytes_per_s=2.039e12,
            link_bytes_per_s=200e9, network_bytes_per_s=200 * GBIT, **_A100,
            **_host(256, link=PCIE_4 / 2, memory=51.2e9),
        ),
        DeviceSpec(
            name="H100-80GB", memory_bytes=int(79.10 * GIB), flops_per_s=989e12, memory_bytes_per_s=3.35e12,
            link_bytes_per_s=450e9, network_bytes_per_s=400 * GBIT, **_H100, speed_error=0.09,
            **_host(256, link=PCIE_5, memory=76.8e9),
        ),
        DeviceSpec(
            name="H200-141GB", memory_bytes=int(139.72 * GIB), flops_per_s=989e12, memory_bytes_per_s=4.8e12,
            link_bytes_per_s=450e9, network_bytes_per_s=400 * GBIT, **_H100,
            **_host(256, link=PCIE_5, memory=76.8e9),
        ),
        DeviceSpec(
            name="B200-180GB", memory_bytes=int(178.35 * GIB), flops_per_s=2250e12, memory_bytes_per_s=8e12,
            link_bytes_per_s=900e9, network_bytes_per_s=400 * GBIT, **_BLACKWELL,
            **_host(256, link=PCIE_5, memory=76.8e9),
        ),
        # NVIDIA GB200 NVL72 data sheet, per GPU: 2.5 PFLOPS, 186 GB, 8 TB/s; NVLink 5 joins 72 GPUs, and a port of 400
        # Gbit/s each leaves the rack. Two GPUs share a Grace with 480 GB of LPDDR5X at 512 GB/s, and its NVLink-C2C of
        # 900 GB/s in both directions.
        DeviceSpec(
            name="GB200-186GB", memory_bytes=186 * GIB, flops_per_s=2500e12, memory_bytes_per_s=8e12,
            link_bytes_per_s=900e9, network_bytes_per_s=400 * GBIT, devices_per_node=72, **_BLACKWELL,
            **_host(240, link=225e9, memory=256e9),
        ),
        # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS, 192 GB, 5.3 TB/s; seven Infinity Fabric links of 64 GB/s per
        # direction, one to each other GPU of the node; sixteen lanes of PCIe 5.0 to a host as of an H100.
        DeviceSpec(
            name="MI300X-192GB", memory_bytes=192 * GIB, flops_per_s=1307.4e12, memory_bytes_per_s=5.3e12,
            link_bytes_per_s=448e9, network_bytes_per_s=400 * GBIT,
            **_host(256, link=PCIE_5, memory=76.8e9),
        ),
        # NVIDIA L40S data sheet: 362.05 TFLOPS, 48 GB, 864 GB/s, PCIe 4.0 x16, no NVLink; a port of 400 Gbit/s for two,
        # and 1 TiB of DDR4-3200 for eight, as in NVIDIA's OVX servers.
        DeviceSpec(
            name="L40S-48GB", memory_bytes=int(44.40 * GIB), flops_per_s=362.05e12, memory_bytes_per_s=864e9,
            link_bytes_per_s=PCIE_4, network_bytes_per_s=200 * GBIT,
            **_host(128, link=PCIE_4, memory=51.2e9),
        ),
        # NVIDIA A10G data sheet: 70 TFLOPS, 24 GB, 600 GB/s, PCIe 4.0 x16; g5.48xlarge of AWS has 100 Gbit/s
        # and 768 GiB of DDR4-3200 in eight channels for eight.
        DeviceSpec(
            name="A10G-24GB", memory_bytes=24 * GIB, flops_per_s=70e12, memory_bytes_per_s=600e9,
            link_bytes_per_s=PCIE_4, network_bytes_per_s=12.5 * GBIT,
            **_host(96, link=PCIE_4 / 2, memory=25.6e9),
        ),
        # NVIDIA's Ada architecture paper, bfloat16 with float32 sums: 165.2 TFLOPS, 24 GB, 1,008 GB/s, PCIe 4.0 x16;
        # network and host are those of the machine around it, here 100 Gbit/s and 512 GiB for eight.
        DeviceSpec(
            name="RTX4090-24GB", memory_bytes=int(23.64 * GIB), flops_per_s=165.2e12, memory_bytes_per_s=1.008e12,
            link_bytes_per_s=PCIE_4, network_bytes_per_s=12.5 * GBIT,
            **_host(64, link=PCIE_4, memory=25.6e9),
        ),
        # NVIDIA's RTX Blackwell architecture paper, bfloat16 with float32 sums: 209.5 TFLOPS, 32 GB, 1,792 GB/s, PCIe
        # 5.0 x16; the network as above.
        DeviceSpec(
            name="RTX5090-32GB", memory_bytes=int(31.37 * GIB), flops_per_s=209.5e12, memory_bytes_per_s=1.792e12,
            link_bytes_per_s=PCIE_5, network_bytes_per_s=12.5 * GBIT,
            **_host(64, link=PCIE_5, memory=38.4e9),
        ),
        # One thread of a server CPU in float32, ranks talking through shared memory.
        DeviceSpec(
            name="cpu", memory_bytes=8 * GIB, flops_per_s=90e9, memory_bytes_per_s=10e9,
            link_bytes_per_s=1.5e9, network_bytes_per_s=1e9, link_call_s=CPU_CALL_S, network_call_s=CPU_CALL_S,
            activation_passes=0.0,
        ),
    )
}  # fmt: skip


def device_of_gpu(gpu_name: str) -> DeviceSpec | None:
    """The preset of a GPU by the name that its driver gives, such as ``NVIDIA GeForce RTX 4090``; None: there is none.

    Of presets that the name contains, the longest is meant: a GB200 is no B200.
    """
    words = gpu_name.replace(" ", "")
    named = [spec for spec in DEVICES.values() if spec.name.split("-")[0] in words]
    return max(named, key=lambda spec: len(spec.name.split("-")[0]), default=None)
