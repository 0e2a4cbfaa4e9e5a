"""Seconds of one pipeline stage as a function of the lengths in a micro-batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.device_spec import DeviceSpec
from lengthwise.core.layer_profile import AttentionSizes
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.layer_bytes import LayerBytes, ffn_forward_flops, layer_bytes
from lengthwise.cost.analytic.volume import LayerPass
from lengthwise.cost.links import (
    call_s,
    calls_s,
    collective_bytes_per_s,
    collectives_s,
    host_copy_bytes_per_s,
    ring_call_s,
    ring_s,
    stage_hop_bytes_per_s,
)
from lengthwise.cost.memory_model import DTYPE_BYTES, kept_bytes_per_layer

LAUNCH_S = 2e-4
"""Seconds per layer and micro-batch that do not depend on its tokens: some forty kernel launches, a third forward."""
CPU_LAUNCH_S = 4e-3
"""``LAUNCH_S`` on one CPU thread; measured with four layers of 128."""
TILE_LAUNCH_S = LAUNCH_S / 2
"""Seconds of the launches of one tile of a feed-forward, forward and backward."""
COPIED_TENSORS, COPY_S = 12, 2e-5
"""Tensors that an offloaded layer copies each way, one where it is recomputed, and the seconds to start a copy."""


Reach = Callable[[np.ndarray], np.ndarray]
"""From a sequence's length to the tokens that each of its tokens attends to."""


def _whole_sequence(length: np.ndarray) -> np.ndarray:
    return length


class HostCopy(NamedTuple):
    """Passes of layers behind which their saved tensors go to the host, or before which these come back."""

    copy_s: float
    """Seconds per token of the copies."""
    token_s: float
    """Seconds per token of the passes, what they spend in communication included."""
    square_s: float
    """Seconds per squared token of their attention."""
    hops_s: float
    """Seconds per token of their rings, which take as long where attention is shorter."""

    def exposed_s(self, reach: np.ndarray) -> np.ndarray:
        """Seconds per token of the copies that the passes do not hide."""
        rate: np.ndarray = np.maximum(self.square_s * reach, self.hops_s)
        rate += self.token_s
        return np.maximum(self.copy_s - rate, 0.0)


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """``per_square_s l^2 + per_token_s l + sum of max(hops l, attention l^2)`` per sequence, ``overhead_s`` once.

    Copies to and from the host add what is beyond the passes that they run beneath, sequence by sequence.

    Where attention reaches fewer tokens than the whole sequence, ``l^2`` is ``l reach(l)``.
    """

    per_square_s: float
    per_token_s: float
    per_token_comm_s: float
    """The part of ``per_token_s`` in exposed communication."""
    rings: tuple[tuple[float, float], ...]
    """Forward and backward: seconds of hops per token, and of the attention that hides them per squared token."""
    overhead_s: float
    reach: Reach = _whole_sequence
    copies: tuple[HostCopy, ...] = ()
    per_token_weights_s: float = 0.0
    """The part of ``per_token_s`` in gradients of weights of layers that are not recomputed."""

    def times_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds that each sequence adds."""
        reach = self.reach(length)
        rate = self.per_square_s * reach
        rate += self.per_token_s
        for hops_s, attention_s in self.rings:
            rate += np.maximum(attention_s * reach, hops_s)
        for copy in self.copies:
            rate += copy.exposed_s(reach)
        rate *= length
        return rate

    def comm_times_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds of each sequence in communication that computation does not hide."""
        rate = np.full_like(length, self.per_token_comm_s)
        for hops_s, attention_s in self.rings:
            rate += np.maximum(hops_s - attention_s * self.reach(length), 0.0)
        for copy in self.copies:
            rate += copy.exposed_s(self.reach(length))
        return rate * length

    def is_dominated_by(self, other: "StageTime") -> bool:
        """Whether ``other`` takes at least as long for every sequence."""
        rings = [(0.0, 0.0)] * (len(self.rings) - len(other.rings)) + list(other.rings)
        return (
            self.per_square_s <= other.per_square_s
            and self.per_token_s <= other.per_token_s
            and self.copies in ((), other.copies)
            and all(a <= b for mine, theirs in zip(self.rings, rings) for a, b in zip(mine, theirs))
        )


class PassSeconds(NamedTuple):
    """Seconds of one pass of a layer on one device."""

    matmul_s: float
    """Per token."""
    attention_s: float
    """Per squared token."""
    hops_s: float
    """Per token, in the ring; 0 where there is none."""
    collectives_s: float
    """Per token, in all else that is sent."""
    weights_s: float
    """In weights that are moved to where they are not held."""
    calls_s: float
    """In calls."""


class LayerSpeeds:
    """How fast layers of one model are computed and sent on one cluster; passes are priced once each."""

    def __init__(self, model: ModelSpec, *, cluster: ClusterSpec, dtype: str) -> None:
        self.model, self.cluster, self.dtype = model, cluster, dtype
        self.flops_per_s = layer_flops_per_s(model, cluster.device, dtype), cluster.device.attention_flops_per_s(dtype)
        """Rates of a layer's products with what lies between them, and of attention."""
        self._passes: dict[tuple[int, int, int], tuple[LayerPass, PassSeconds]] = {}

    def of(self, volume: LayerPass, *, degree: int, count: int) -> PassSeconds:
        """The seconds of a pass among ``degree`` devices, of ``count`` layers in turn."""
        key = id(volume), degree, count
        cached = self._passes.get(key)
        if cached is not None and cached[0] is volume:  # an id is used again once its object is gone
            return cached[1]
        matmul_rate, attention_rate = self.flops_per_s
        links: dict[str, Any] = {"degree": degree, "cluster": self.cluster}
        seconds = PassSeconds(
            matmul_s=count * volume.matmul_flops / matmul_rate,
            attention_s=count * volume.attention_flops / attention_rate,
            hops_s=count * ring_s(volume.tokens, **links) if volume.tokens.ring else 0.0,
            collectives_s=count * collectives_s(volume.tokens, **links),
            weights_s=count * (ring_s(volume.weights, **links) + collectives_s(volume.weights, **links)),
            calls_s=count * (calls_s(volume.tokens, **links) + calls_s(volume.weights, **links)),
        )
        self._passes[key] = volume, seconds
        return seconds


@dataclass(kw_only=True)
class _Sum:
    """A stage's seconds while its parts are added up."""

    speeds: LayerSpeeds
    degree: int
    square_s: float = 0.0
    matmul_s: float = 0.0
    comm_s: float = 0.0
    overhead_s: float = 0.0
    rings: dict[str, tuple[float, float]] = field(default_factory=dict)
    copies: list[HostCopy] = field(default_factory=list)
    weights_s: float = 0.0

    def add(self, name: str, volume: LayerPass, *, count: int) -> None:
        """Add a pass of a layer ``count`` times. All rings of a stage and direction carry the same keys and values."""
        seconds = self.speeds.of(volume, degree=self.degree, count=count)
        self.matmul_s += seconds.matmul_s
        if volume.tokens.ring:
            hops_s, hidden_by_s = self.rings.get(name, (0.0, 0.0))
            self.rings[name] = (hops_s + seconds.hops_s, hidden_by_s + seconds.attention_s)
        else:
            self.square_s += seconds.attention_s
        self.comm_s += seconds.collectives_s
        self.overhead_s += seconds.weights_s
        self.overhead_s += seconds.calls_s

    def add_copies(self, volumes: Sequence[LayerPass], num_bytes: float, *, count: int) -> None:
        """Add the copies of ``count`` layers of ``num_bytes`` per token, beneath ``volumes``."""
        matmul_s = attention_s = comm_s = hops_s = 0.0
        for volume in volumes:
            seconds = self.speeds.of(volume, degree=self.degree, count=1)
            matmul_s += seconds.matmul_s
            attention_s += seconds.attention_s
            comm_s += seconds.collectives_s
            hops_s += seconds.hops_s
        copy_s = count * num_bytes / host_copy_bytes_per_s(self.speeds.cluster)
        self.copies.append(HostCopy(copy_s, count * (matmul_s + comm_s), count * attention_s, count * hops_s))

    def add_tiles(self, layer: LayerBytes, *, tile_tokens: int, count: int) -> None:
        """Add the feed-forward's second forward of ``count`` layers that do not run theirs again anyway, and launches.

        Of Megatron's, each tile is gathered and its output reduced, in calls of its own.
        """
        if not layer.is_recomputed:
            self.matmul_s += count * ffn_forward_flops(self.speeds.model) / self.degree / self.speeds.flops_per_s[0]
        tile_s = TILE_LAUNCH_S
        if layer.method is Method.MEGATRON_TS and self.degree > 1:
            tile_s += 5 * ring_call_s(self.degree, self.speeds.cluster)
        self.matmul_s += count * tile_s / (tile_tokens * self.degree)

    def stage_time(self) -> StageTime:
        """The :class:`StageTime` of all parts added so far."""
        return StageTime(
            per_square_s=self.square_s,
            per_token_s=self.matmul_s + self.comm_s,
            per_token_comm_s=self.comm_s,
            rings=tuple(self.rings[name] for name in ("forward", "backward") if name in self.rings),
            overhead_s=self.overhead_s,
            reach=self.speeds.model.reach,
            copies=tuple(self.copies),
            per_token_weights_s=self.weights_s,
        )


def layer_flops_per_s(model: ModelSpec, device: DeviceSpec, dtype: str) -> float:
    """Rate of a layer's products with all that lies between them, which memory bounds.

    Between the 6 W FLOPs of a token's forward and backward, what the layer keeps of it crosses the memory
    ``activation_passes`` times. Both are shared by devices, and done again, in the same proportion.
    """
    matmul_s = 1.0 / device.matmul_flops_per_s(dtype)
    moved_bytes = device.activation_passes * kept_bytes_per_layer(model, DTYPE_BYTES[dtype])
    return 1.0 / (matmul_s + moved_bytes / device.memory_bytes_per_s / (6.0 * model.layer_matmul_params))


def stage_time(speeds: LayerSpeeds, scheme: PipelineConfig, *, stage: int) -> StageTime:
    """Seconds of ``stage``: its layers, what it hands to its neighbours, and the head on the last one.

    Collectives around attention and products are exposed. Hops of a ring hide behind the attention of the block before,
    up to its time, taken sequence by sequence; a pack can only do better. Moving weights to a layer that does not hold
    them whole is charged in full to the micro-batch: it does not shrink with fewer tokens, and what compute hides of it
    would depend on them. Tokens handed to the next stage and gradients to the one before are exposed. What an offloaded
    layer saves is copied beneath its own forward and its own backward.
    """
    model, device, dtype = speeds.model, speeds.cluster.device, speeds.dtype
    total = _Sum(speeds=speeds, degree=scheme.degree)
    launch_s = CPU_LAUNCH_S if device.name == "cpu" else LAUNCH_S
    layers = Counter(layer_bytes(model, scheme, scheme.layers_of_stage(stage), dtype=dtype))
    for layer, count in sorted(layers.items(), key=lambda item: item[0].key):
        volume, again = layer.volume, layer.second_forward
        forwards = 1 if again is None else 2
        if again is None or again is volume.forward:
            total.add("forward", volume.forward, count=count * forwards)
        else:
            total.add("forward", volume.forward, count=count)
            total.add("forward", again, count=count)
        total.add("backward", volume.backward, count=count)
        total.overhead_s += launch_s * (count * forwards + 2 * count) / 3
        if not layer.is_recomputed:  # of a backward's products, half are with the gradients of outputs and inputs
            total.weights_s += count * volume.backward.matmul_flops / 2 / speeds.flops_per_s[0]
        if layer.is_tiled:
            total.add_tiles(layer, tile_tokens=scheme.tile_tokens, count=count)
        if scheme.slices > 1:
            total.matmul_s += count * slice_bytes(model, scheme, dtype) / device.memory_bytes_per_s
        if layer.is_offloaded:
            total.add_copies([volume.forward], layer.saved, count=count)
            backward = [volume.backward] if again is None else [again, volume.backward]
            total.add_copies(backward, layer.saved, count=count)
            num_copied = COPIED_TENSORS if again is None else 3 if scheme.keep_attention else 1
            total.overhead_s += count * 2 * COPY_S * num_copied
    _add_ends(total, scheme=scheme, stage=stage)
    return total.stage_time()


def slice_bytes(model: ModelSpec | AttentionSizes, scheme: PipelineConfig, dtype: str) -> float:
    """Bytes per token of the pack that a layer reads and writes more where micro-batches are cut into slices.

    Every slice adds to the gradients of all keys and values before it, in float32 at least: of n slices half of n, each
    read and written, after the kernel's are written and read. Outputs over earlier keys are merged with those over the
    slice's own, in the forward, and the gradients of queries in the backward.
    """
    width, wide = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    keys = 2 * -(-model.num_kv_heads // scheme.degree) * model.head_size
    queries = -(-model.num_heads // scheme.degree) * model.head_size
    return keys * (scheme.slices + 1) / 2 * 2 * (wide + width) + 2 * queries * 3 * wide


def _add_ends(total: _Sum, *, scheme: PipelineConfig, stage: int) -> None:
    """Add the head, the vocabulary split over the stage where weights are sharded, and the neighbours.

    A split vocabulary costs an all-to-all of T / p D numbers each way after the embedding, where every rank knows all
    token ids, and before the head an all-gather and a reduce-scatter of T D (Shoeybi et al. 2019).
    """
    model, cluster, dtype = total.speeds.model, total.speeds.cluster, total.speeds.dtype
    p, width = scheme.degree, DTYPE_BYTES[dtype]
    is_first, is_last = stage == 0, stage == scheme.num_stages - 1
    if is_last:
        total.matmul_s += 6.0 * model.hidden_size * model.vocab_size / p / cluster.device.matmul_flops_per_s(dtype)
    if scheme.weights is WeightPlacement.SHARDED and p > 1:
        sent = 2 * (is_first / p + is_last) * (p - 1) / p * model.hidden_size * width
        total.comm_s += sent / collective_bytes_per_s(p, cluster)
        total.overhead_s += 2 * is_first * call_s(p, cluster) + 2 * is_last * ring_call_s(p, cluster)
    per_token_s, per_call_s = sent_s(model, scheme, cluster=cluster, width=width)
    total.comm_s += per_token_s
    total.overhead_s += per_call_s


def sent_s(model: ModelSpec, scheme: PipelineConfig, *, cluster: ClusterSpec, width: int) -> tuple[float, float]:
    """Seconds per token, and per micro-batch, of what stages send each other: T / p D numbers each way."""
    if scheme.num_stages == 1:
        return 0.0, 0.0
    sent = 2 * model.hidden_size * width / scheme.degree
    rate = stage_hop_bytes_per_s(scheme.degree, scheme.num_devices, cluster)
    return sent / rate, 2 * call_s(scheme.num_devices, cluster)
