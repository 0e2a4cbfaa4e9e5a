"""Specifications of models and clusters, and presets of both."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass

import numpy as np

from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.device_file import resolve_device
from lengthwise.core.device_spec import DeviceSpec
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.spec_fields import Bounds, check_fields
from lengthwise.core.wording import nearest, whole_number

MAX_DEVICES = 1 << 16
"""Devices of the largest cluster that is planned for."""
MAX_MEMORY_GIB = float(1 << 20)
"""Memory of the largest device that is planned for."""
_CLUSTER = re.compile(r"((?:\d+x)*)(?:(\d+)\+(\d+)x)?(.*)", re.ASCII | re.DOTALL)
_NO_SIZES = ("name", "mask_token_id", "unpriced")
_OF_SOME_FAMILIES = ("frame_size", "max_positions", "stored_ffn_size", "window", "num_window_layers")
_MOST = {
    "num_layers": 1 << 14, "hidden_size": 1 << 22, "ffn_size": 1 << 24, "num_heads": 1 << 16, "num_kv_heads": 1 << 16,
    "head_size": 1 << 16, "vocab_size": 1 << 32, "frame_size": 1 << 40, "max_positions": 1 << 40,
    "stored_ffn_size": 1 << 32, "window": 1 << 40, "num_window_layers": 1 << 14,
}  # fmt: skip
"""Bounds of a model's sizes: far above any model, far below what would exhaust memory before it is refused."""
_OF_MODELS = {
    **{
        field: Bounds(minimum=int(field not in _OF_SOME_FAMILIES), maximum=largest, is_whole=True)
        for field, largest in _MOST.items()
    },
    "norm_eps": Bounds(is_above=True, maximum=1.0),
    "rope_theta": Bounds(is_above=True, maximum=1e15),
    "mask_token_id": Bounds(maximum=1 << 32, is_whole=True, also=None),
}
_OF_CLUSTERS = {
    "num_nodes": Bounds(minimum=1, maximum=MAX_DEVICES, is_whole=True),
    "devices_per_node": Bounds(minimum=1, maximum=MAX_DEVICES, is_whole=True),
    "last_node_devices": Bounds(maximum=MAX_DEVICES, is_whole=True),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a Transformer; all that costs and plans need of it, and all that the model builders read.

    Raises:
        InputError: a field has a number that no model has, or sizes contradict one another; the message names it.
    """

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
    stored_ffn_size: int = 0
    """Feed-forward columns that a layer stores, in a mixture of experts those of all experts; 0: ``ffn_size``, those
    that a token uses."""
    window: int = 0
    """Tokens that each token of a layer with sliding-window attention sees, itself included; 0: all before it."""
    num_window_layers: int = 0
    """Layers with sliding-window attention."""
    unpriced: str = ""
    """What costs leave out or simplify, in words; empty where they know the whole model."""
    mask_token_id: int | None = None
    """What stands for a masked token where a model that is not causal is trained; a run resolves it."""

    def __hash__(self) -> int:
        """The hash of what tells most models apart: layers are looked up by their model, which has many fields."""
        return hash((self.name, self.num_layers, self.hidden_size))

    def __post_init__(self) -> None:
        check_fields("model", self, _OF_MODELS)
        if self.num_window_layers > self.num_layers:
            raise InputError(
                f"model {self.name}: num_window_layers must be at most its {self.num_layers} layers, not "
                f"{self.num_window_layers}"
            )
        if 0 < self.stored_ffn_size < self.ffn_size:
            raise InputError(
                f"model {self.name}: stored_ffn_size must be at least ffn_size, {self.ffn_size:,}, or 0 for as much, "
                f"not {self.stored_ffn_size:,}"
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
    def ffn_columns(self) -> int:
        """Feed-forward columns that a layer stores, those of all experts together."""
        return self.stored_ffn_size or self.ffn_size

    @property
    def idle_ffn_params(self) -> int:
        """Weights of one layer that a token does not use: those of the experts it is not routed to."""
        return (3 if self.gated_ffn else 2) * self.hidden_size * (self.ffn_columns - self.ffn_size)

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
        layer = self.layer_matmul_params + self.idle_ffn_params + biases + self.layer_whole_params
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

        Of a Transformer-2D, layers attend within frames and across them in turn. A window of W tokens leaves a longer
        sequence of l tokens W l - W^2 / 2 pairs, which are l / 2 times 2 W - W^2 / l.
        """
        if self.window and self.num_window_layers:
            within = np.where(length > self.window, 2.0 * self.window - self.window**2 / np.maximum(length, 1), length)
            return length + (within - length) * self.num_window_layers / self.num_layers
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
class ClusterSpec:
    """``num_nodes`` nodes of ``devices_per_node`` equal devices, and a last one of fewer where there is one.

    Raises:
        InputError: a number is out of its range; the message names the field.
    """

    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    last_node_devices: int = 0
    """Devices of one more node, fewer than the others have; 0: all nodes are alike."""

    def __post_init__(self) -> None:
        check_fields("cluster", self, _OF_CLUSTERS, has_name=False)
        if not isinstance(self.device, DeviceSpec):
            raise InputError(f"cluster: device must be a DeviceSpec, not {brief(self.device)}")
        if not 0 <= self.last_node_devices < self.devices_per_node:
            raise InputError(
                f"the last node has fewer devices than the others, of {self.devices_per_node}; got "
                f"{self.last_node_devices}"
            )
        if self.num_devices > MAX_DEVICES:
            raise InputError(f"a cluster has at most {MAX_DEVICES:,} devices; got {self.num_devices:,}")

    @classmethod
    def of_devices(cls, num_devices: int, device: DeviceSpec, *, devices_per_node: int) -> "ClusterSpec":
        """Nodes of ``devices_per_node``, the last of which may have fewer; one smaller node where there are fewer.

        Raises:
            InputError: either number is below 1.
        """
        inside = min(devices_per_node, num_devices)
        if inside < 1:
            raise InputError(f"a cluster needs at least one device; got {num_devices} in nodes of {devices_per_node}")
        num_nodes, rest = divmod(num_devices, inside)
        return cls(num_nodes=num_nodes, devices_per_node=inside, device=device, last_node_devices=rest)

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.num_nodes * self.devices_per_node + self.last_node_devices

    @property
    def shape(self) -> str:
        """Nodes x devices, such as ``8x8``, or ``12x8+4`` with a last node of four."""
        rest = f"+{self.last_node_devices}" if self.last_node_devices else ""
        return f"{self.num_nodes}x{self.devices_per_node}{rest}"

    @property
    def name(self) -> str:
        """Nodes x devices x device, as :func:`cluster_preset` reads it."""
        return f"{self.shape}x{self.device.name}"


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
        # Llama team 2024, table 3.
        _llama("llama-3-8b", 32, 4096, 14_336, 32, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0),
        _llama("llama-3-70b", 80, 8192, 28_672, 64, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0),
        # Qwen2.5 technical report, table 1.
        _llama(
            "qwen2.5-0.5b", 24, 896, 4864, 14, num_kv_heads=2, vocab_size=151_936, rope_theta=1e6, qkv_bias=True,
            tied_embeddings=True, norm_eps=1e-6,
        ),
        # DCP, table 1. The 28 layers of its Transformer-2D are pairs (Open-Sora 1.2: a spatial and a temporal block),
        # each with attention to a caption, whose 4 h^2 weights stand in the feed-forward: 4 h + 2 h columns.
        _llama("transformer-1d-5b", 42, 3072, 12_288, 48, gated_ffn=False, family="transformer-1d"),
        _llama(
            "transformer-2d-1.2b", 56, 1152, 6912, 16, gated_ffn=False, family="transformer-2d", vocab_size=1,
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


def model_preset(name: str) -> ModelSpec:
    """The preset called ``name``.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if name not in MODELS:
        raise InputError(f"no model preset {brief(name)}; {nearest(name, MODELS)}")
    return MODELS[name]


def cluster_preset(name: str, *, memory_gib: float | None = None, host_memory_gib: float | None = None) -> ClusterSpec:
    """A cluster from ``NODESxDEVICESxDEVICE``, ``DEVICESxDEVICE`` or ``DEVICE``: ``8x8xA800-80GB``, ``2xcpu``.

    ``12x8+4xA800-80GB`` has one more node, of four devices.

    A device is a preset or a YAML file, as in ``8x8xmy-device.yaml``.

    Args:
        name: shape and device.
        memory_gib: overrides the device's memory.
        host_memory_gib: overrides the device's share of the host's memory.

    Raises:
        InputError: the shape or the device is unknown; the message suggests the nearest.
    """
    parts = _CLUSTER.fullmatch(name)
    assert parts is not None, "the pattern takes any text"
    shape = [*parts[1].split("x")[:-1], *filter(None, [parts[2]])]
    try:
        spec = resolve_device(parts[4])
    except InputError as error:
        raise InputError(f"cluster {brief(name)}: {error}") from None
    counts = [whole_number(part) for part in shape]
    if len(shape) > 2 or not all(counts):
        raise InputError(
            f"cluster {brief(name)} is not NODESxDEVICESxDEVICE, such as 8x8xA800-80GB, 2xcpu, or 12x8+4xA800-80GB "
            "with a last node of 4"
        )
    num_nodes, devices_per_node = (1, 1, *(count or 0 for count in counts))[-2:]
    last_node_devices = int(parts[3] or "0") if len(parts[3] or "") < 10 else MAX_DEVICES
    if parts[3] and not 0 < last_node_devices < devices_per_node:
        raise InputError(
            f"cluster {brief(name)}: its last node must have from 1 to {devices_per_node - 1} devices, fewer than the "
            "others"
        )
    num_devices = num_nodes * devices_per_node + last_node_devices
    if num_devices > MAX_DEVICES:
        raise InputError(f"cluster {brief(name)} has {num_devices:,} devices; plans are for at most {MAX_DEVICES:,}")
    if memory_gib is not None:
        if not 0 < memory_gib <= MAX_MEMORY_GIB:
            raise InputError(
                f"memory must be positive and finite, at most {MAX_MEMORY_GIB:,.0f} GiB, not {memory_gib} GiB"
            )
        spec = spec.with_memory(memory_gib)
    if host_memory_gib is not None:
        spec = spec.with_host_memory(host_memory_gib)
    return ClusterSpec(
        num_nodes=num_nodes, devices_per_node=devices_per_node, device=spec, last_node_devices=last_node_devices
    )
