"""Specifications of models, devices and clusters, and presets of each."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

import numpy as np

from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief

GIB = 2**30
GPU_SHARE = 0.92
"""Share of a GPU's memory that plans may fill."""
MAX_DEVICES = 1 << 16
"""Devices of the largest cluster that is planned for."""
MAX_MEMORY_GIB = float(1 << 20)
"""Memory of the largest device that is planned for."""
_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_NO_SIZES = ("name", "mask_token_id")
_OF_SOME_FAMILIES = ("frame_size", "max_positions")
_MOST = {
    "num_layers": 1 << 14, "hidden_size": 1 << 22, "ffn_size": 1 << 24, "num_heads": 1 << 16, "num_kv_heads": 1 << 16,
    "head_size": 1 << 16, "vocab_size": 1 << 32, "frame_size": 1 << 40, "max_positions": 1 << 40,
}  # fmt: skip
"""Bounds of a model's sizes: far above any model, far below what would exhaust memory before it is refused."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a Transformer; all that costs and plans need of it, and all that the model builders read."""

    name: str
    family: str = "llama"
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    gated_ffn: bool = True
    """Gate and up projections (SwiGLU) instead of one."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    causal: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, float | str], ...] = ()
    """Sorted items of Hugging Face's rope parameters beyond theta; empty for plain rotary embeddings."""
    norm_eps: float = 1e-5
    frame_size: int = 0
    """Tokens of one frame of a transformer-2d; 0: as many as there are frames."""
    max_positions: int = 0
    """Rows of the table of learned positions (GPT, BERT), the longest sequence there is; 0: positions are rotary."""
    mask_token_id: int | None = None
    """What stands for a masked token where a model that is not causal is trained; a run resolves it."""

    def __post_init__(self) -> None:
        for field, maximum in _MOST.items():
            value, minimum = getattr(self, field), int(field not in _OF_SOME_FAMILIES)
            if not minimum <= value <= maximum:
                raise InputError(
                    f"model {self.name}: {field} must be from {minimum} to {maximum:,}, not {brief(value)}"
                )
        for field, limit in (("norm_eps", 1.0), ("rope_theta", 1e15)):
            if not 0 < getattr(self, field) <= limit:
                raise InputError(
                    f"model {self.name}: {field} must be above 0 and at most {limit:g}, not "
                    f"{brief(getattr(self, field))}"
                )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly"
            )

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer that multiply every token."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_size)
        return attention + (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_size

    @property
    def head_layers(self) -> float:
        """Layers whose products cost as much as the head's."""
        return self.hidden_size * self.vocab_size / self.layer_matmul_params

    @property
    def objective(self) -> str:
        """What a model is trained to predict, one of ``core.batch.OBJECTIVES``."""
        return NEXT_TOKEN if self.causal else MASKED

    @property
    def has_all_biases(self) -> bool:
        """Whether every projection and norm has a bias (GPT, BERT), not queries, keys and values at most."""
        return self.family in ("bert", "gpt")

    @property
    def layer_whole_params(self) -> int:
        """Parameters of one layer that no method splits: two norms and, where there are any, two output biases."""
        return (6 if self.has_all_biases else 2) * self.hidden_size

    @property
    def input_whole_params(self) -> int:
        """Parameters before the layers that no method splits: positions; in BERT also two token types and a norm."""
        return (self.max_positions + (4 if self.family == "bert" else 0)) * self.hidden_size

    @property
    def output_whole_params(self) -> int:
        """Parameters behind the layers that no method splits: a norm; in BERT before it a square matrix and a bias."""
        norm = (2 if self.has_all_biases else 1) * self.hidden_size
        return norm + (self.hidden_size * (self.hidden_size + 1) if self.family == "bert" else 0)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model: matrices, embeddings, head, norms and biases."""
        biases = (self.qkv_size if self.qkv_bias else 0) + (self.ffn_size if self.has_all_biases else 0)
        layer = self.layer_matmul_params + biases + self.layer_whole_params
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        output_bias = self.vocab_size if self.family == "bert" else 0
        return self.num_layers * layer + embeddings + output_bias + self.input_whole_params + self.output_whole_params

    def train_flops(self, lengths: np.ndarray) -> np.ndarray:
        """Model FLOPs of forward and backward for each sequence, embedding look-up and recompute left out.

        A matrix of P weights costs 6 P per token. Attention costs 12 l^2 per head and unit of head size
        (two products forward, four backward, 2 FLOPs each), half of it where a token sees only what is before it.
        """
        length = np.asarray(lengths, dtype=np.float64)
        matmuls = 6.0 * (self.num_layers * self.layer_matmul_params + self.hidden_size * self.vocab_size)
        attention = 12.0 * self.num_layers * self.num_heads * self.head_size * (0.5 if self.causal else 1.0)
        return matmuls * length + attention * length * self.reach(length)

    def reach(self, length: np.ndarray) -> np.ndarray:
        """Tokens that each token of a sequence attends to, before a causal mask, in the mean over layers.

        Of a Transformer-2D, layers attend within frames and across them in turn.
        """
        if self.family != "transformer-2d":
            return length
        if not self.frame_size:
            return np.sqrt(length)
        return (np.minimum(length, self.frame_size) + length / self.frame_size) / 2

    @property
    def digest(self) -> str:
        """Sixteen hex digits over everything but the name and the mask token.

        Fields of some families alone count only where they are set: to other models they are not there.
        """
        sizes = {k: v for k, v in asdict(self).items() if k not in _NO_SIZES and (v or k not in _OF_SOME_FAMILIES)}
        return hashlib.blake2b(json.dumps(sizes, sort_keys=True).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one CPU process."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Peak dense rate in the compute dtype (bfloat16 on GPUs, float32 on CPU)."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Per device and direction, to the other devices of its node."""
    network_bytes_per_s: float
    """Per device and direction, to other nodes."""

    @property
    def usable_bytes(self) -> int:
        """The part of the memory that plans may fill: on a GPU, the context and fragmentation take the rest."""
        return self.memory_bytes if self.name == "cpu" else int(GPU_SHARE * self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """``num_nodes`` nodes of ``devices_per_node`` equal devices."""

    num_nodes: int
    devices_per_node: int
    device: DeviceSpec

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise InputError(f"a cluster needs at least one device; got {self.num_nodes} x {self.devices_per_node}")

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.num_nodes * self.devices_per_node

    @property
    def name(self) -> str:
        """Nodes x devices x device, as :func:`cluster_preset` reads it."""
        return f"{self.num_nodes}x{self.devices_per_node}x{self.device.name}"


def _llama(name: str, num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, **others: object) -> ModelSpec:
    sizes = {"num_kv_heads": num_heads, "head_size": hidden_size // num_heads, "vocab_size": 32_000, **others}
    return ModelSpec(
        name=name, num_layers=num_layers, hidden_size=hidden_size, ffn_size=ffn_size, num_heads=num_heads,
        **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


MODELS = {
    spec.name: spec
    for spec in (
        # Touvron et al. 2023, table 2; the 32B is the one of Hydraulis (60 layers of 6656) with LLaMA-33B's heads.
        _llama("llama-7b", 32, 4096, 11_008, 32),
        _llama("llama-13b", 40, 5120, 13_824, 40),
        _llama("llama-32b", 60, 6656, 17_920, 52),
        _llama("llama-3-8b", 32, 4096, 14_336, 32, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0),
        # Qwen2.5 technical report, table 1.
        _llama(
            "qwen2.5-0.5b", 24, 896, 4864, 14, num_kv_heads=2, vocab_size=151_936, rope_theta=1e6, qkv_bias=True,
            tied_embeddings=True, norm_eps=1e-6,
        ),
        # DCP, table 1.
        _llama("transformer-1d-5b", 42, 3072, 12_288, 48, gated_ffn=False, family="transformer-1d"),
        _llama(
            "transformer-2d-1.2b", 28, 1152, 4608, 16, gated_ffn=False, family="transformer-2d", vocab_size=1,
            causal=False, frame_size=256,
        ),
        # ParaDySe, experiments: BERT-large's sizes (Devlin et al. 2019), LLaMA-65B's (Touvron et al. 2023) and GPT-3's
        # (Brown et al. 2020).
        _llama(
            "bert-1024", 24, 1024, 4096, 16, gated_ffn=False, family="bert", vocab_size=30_522, causal=False,
            tied_embeddings=True, qkv_bias=True, max_positions=512, norm_eps=1e-12,
        ),
        _llama("llama-66b", 80, 8192, 22_016, 64),
        _llama(
            "gpt-12288", 96, 12_288, 49_152, 96, gated_ffn=False, family="gpt", vocab_size=50_257,
            tied_embeddings=True, qkv_bias=True, max_positions=2048,
        ),
        # Small enough for a CPU.
        _llama("llama-tiny", 4, 128, 384, 4, num_kv_heads=2, vocab_size=8192, tied_embeddings=True),
        _llama("llama-mini", 8, 256, 768, 8, num_kv_heads=4, vocab_size=8192, tied_embeddings=True),
        _llama(
            "gpt-tiny", 4, 128, 512, 4, gated_ffn=False, family="gpt", vocab_size=8192, tied_embeddings=True,
            qkv_bias=True, max_positions=4096,
        ),
        _llama(
            "bert-tiny", 4, 128, 512, 4, gated_ffn=False, family="bert", vocab_size=8192, tied_embeddings=True,
            qkv_bias=True, max_positions=4096, causal=False,
        ),
        _llama("transformer-1d-tiny", 4, 128, 512, 4, gated_ffn=False, family="transformer-1d", vocab_size=8192),
        _llama(
            "transformer-2d-tiny", 4, 128, 512, 4, gated_ffn=False, family="transformer-2d", vocab_size=8192,
            causal=False, frame_size=64,
        ),
    )
}  # fmt: skip

# Vendor data sheets: dense bfloat16 rate, memory bandwidth, NVLink per direction; one 200 or 400 Gbit/s port per GPU.
DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            name="A100-40GB", memory_bytes=40 * GIB, flops_per_s=312e12, memory_bytes_per_s=1.555e12,
            link_bytes_per_s=300e9, network_bytes_per_s=25e9,
        ),
        DeviceSpec(
            name="A100-80GB", memory_bytes=80 * GIB, flops_per_s=312e12, memory_bytes_per_s=2.039e12,
            link_bytes_per_s=300e9, network_bytes_per_s=25e9,
        ),
        DeviceSpec(
            name="A800-80GB", memory_bytes=80 * GIB, flops_per_s=312e12, memory_bytes_per_s=2.039e12,
            link_bytes_per_s=200e9, network_bytes_per_s=25e9,
        ),
        DeviceSpec(
            name="H100-80GB", memory_bytes=80 * GIB, flops_per_s=989e12, memory_bytes_per_s=3.35e12,
            link_bytes_per_s=450e9, network_bytes_per_s=50e9,
        ),
        DeviceSpec(
            name="H200-141GB", memory_bytes=141 * GIB, flops_per_s=989e12, memory_bytes_per_s=4.8e12,
            link_bytes_per_s=450e9, network_bytes_per_s=50e9,
        ),
        DeviceSpec(
            name="B200-180GB", memory_bytes=180 * GIB, flops_per_s=2250e12, memory_bytes_per_s=8e12,
            link_bytes_per_s=900e9, network_bytes_per_s=50e9,
        ),
        # One thread of a server CPU in float32, ranks talking through shared memory.
        DeviceSpec(
            name="cpu", memory_bytes=8 * GIB, flops_per_s=90e9, memory_bytes_per_s=10e9,
            link_bytes_per_s=1.5e9, network_bytes_per_s=1e9,
        ),
    )
}  # fmt: skip


def bytes_in_words(num_bytes: float, *, digits: int = 1) -> str:
    """A size in the unit that suits it, such as 1.5 GiB or 40.0 MiB: what is not nothing never reads like it."""
    unit, word = next(((unit, word) for unit, word in _UNITS if num_bytes >= unit / 10), (1, "bytes"))
    return f"{num_bytes / unit:,.{digits}f} {word}" if unit > 1 else f"{num_bytes:,.0f} bytes"


def needed_and_available(needed_bytes: float, available_bytes: float) -> tuple[str, str]:
    """Both sizes in words, in one unit and with as many digits as it takes to tell them apart.

    What is needed is rounded up, what is there down: a need of more than there is never reads like less.
    """
    smaller = min(needed_bytes, available_bytes)
    unit, word = next(
        ((unit, word) for unit, word in _UNITS if smaller >= unit / 10),
        (1, "bytes"),
    )
    for digits in (1, 2, 3) if unit > 1 else ():
        scale = 10**digits
        needed = f"{math.ceil(needed_bytes / unit * scale) / scale:,.{digits}f}"
        available = f"{math.floor(available_bytes / unit * scale) / scale:,.{digits}f}"
        if needed != available or needed_bytes == available_bytes:
            return f"{needed} {word}", f"{available} {word}"
    return f"{math.ceil(needed_bytes):,} bytes", f"{math.floor(available_bytes):,} bytes"


def whole_number(text: str) -> int | None:
    """The number that up to nine digits spell; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def nearest(name: str, names: Iterable[str]) -> str:
    """A clause that suggests the known name closest to a mistyped one, or lists them all."""
    names = sorted(names)
    close = get_close_matches(name[:200], names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def model_preset(name: str) -> ModelSpec:
    """The preset called ``name``.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if name not in MODELS:
        raise InputError(f"no model preset {brief(name)}; {nearest(name, MODELS)}")
    return MODELS[name]


def cluster_preset(name: str, *, memory_gib: float | None = None) -> ClusterSpec:
    """A cluster from ``NODESxDEVICESxDEVICE``, ``DEVICESxDEVICE`` or ``DEVICE``: ``8x8xA800-80GB``, ``2xcpu``.

    Args:
        name: shape and device.
        memory_gib: overrides the device's memory.

    Raises:
        InputError: the shape or the device is unknown; the message suggests the nearest.
    """
    *shape, device = name.split("x")
    if device not in DEVICES:
        raise InputError(f"cluster {brief(name)}: no device {brief(device)}; {nearest(device, DEVICES)}")
    counts = [whole_number(part) for part in shape]
    if len(shape) > 2 or not all(counts):
        raise InputError(f"cluster {brief(name)} is not NODESxDEVICESxDEVICE, such as 8x8xA800-80GB or 2xcpu")
    num_nodes, devices_per_node = (1, 1, *(count or 0 for count in counts))[-2:]
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise InputError(
            f"cluster {brief(name)} has {num_nodes * devices_per_node:,} devices; plans are for at most {MAX_DEVICES:,}"
        )
    spec = DEVICES[device]
    if memory_gib is not None:
        if not 0 < memory_gib <= MAX_MEMORY_GIB:
            raise InputError(
                f"memory must be positive and finite, at most {MAX_MEMORY_GIB:,.0f} GiB, not {memory_gib} GiB"
            )
        spec = replace(spec, memory_bytes=int(memory_gib * GIB))
    return ClusterSpec(num_nodes=num_nodes, devices_per_node=devices_per_node, device=spec)
