"""Bytes of one layer between its forward and its backward, on its device and on the host, with recompute, offload and
tiles of the feed-forward.

Offload copies what a forward saves (where the layer is recomputed, its input alone) out behind the forward and back
before the backward, so that of all offloaded layers of a stage two are on the device: the one in use, and one that goes
or comes. Tiles make a feed-forward save its input alone and compute it again, tile by tile, in its backward: what it
saves otherwise, and the gradients of that, are there for one tile.

F feed-forward size or a device's columns of it, D hidden size, p devices of the stage, w bytes of the compute dtype.
Bytes are per token of the whole pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.grouped_heads import grouped_heads, has_groups
from lengthwise.cost.analytic.second_forward import attention_bytes, forward_without_attention
from lengthwise.cost.analytic.volume import LayerPass, LayerVolume, layer_volume
from lengthwise.cost.memory_model import DTYPE_BYTES, norm_bytes

SUM_BYTES = 4
"""Bytes of a sum over tiles."""
UNTILED = frozenset({Method.METP})
"""Methods whose feed-forwards already save their input alone: tiles change nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBytes:
    """One layer's bytes per token of the pack."""

    method: Method
    volume: LayerVolume
    needed: float
    """What the backward needs of the forward, tiles counted."""
    saved: float
    """What the forward leaves for the backward: ``needed``, or where that is recomputed the input, with what attention
    gave if that is kept."""
    again: float
    """What a recomputed layer makes again in its backward; 0 of others."""
    is_recomputed: bool
    is_offloaded: bool
    is_tiled: bool
    summed: float = 0.0
    """Bytes by which float32 sums over tiles of the gradients of a gathered feed-forward exceed its last gradient."""
    summed_all: float = 0.0
    """Bytes by which they exceed all of its gradients in the compute dtype, while they are sent."""
    second_forward: LayerPass | None = None
    """Of a recomputed layer."""
    heads_at_once: float = 1.0
    """The share of its heads that a device attends with at once."""
    group_bytes: float = 0.0
    """Bytes beside a group of heads in its backward."""
    key_gradient_bytes: float = 0.0
    """Bytes of the gradients of a group's keys and values."""

    on_device: float = field(init=False)
    """What is on the device between the passes."""
    on_host: float = field(init=False)
    """What is on the host between the passes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_device", 0.0 if self.is_offloaded else self.saved)
        object.__setattr__(self, "on_host", self.saved if self.is_offloaded else 0.0)

    @property
    def reduce_bytes(self) -> float:
        """Gathered weights and their gradients while those of the feed-forward are sent; 0 where none is gathered."""
        return self.volume.reduce_bytes + self.summed_all

    @property
    def key(self) -> tuple[Method, bool, bool]:
        """What tells it from other layers of its scheme."""
        return self.method, self.is_recomputed, self.is_offloaded


def has_tiles(scheme: PipelineConfig, method: Method) -> bool:
    """Whether feed-forwards of ``method`` compute tiles under ``scheme``."""
    return scheme.tile_tokens > 0 and method not in UNTILED


def ffn_forward_flops(model: ModelSpec) -> float:
    """FLOPs per token of the products of one feed-forward's forward, which tiles run again in the backward."""
    return 2.0 * (3 if model.gated_ffn else 2) * model.hidden_size * model.ffn_size


def tiled_bytes(model: ModelSpec, method: Method, *, degree: int, width: int) -> float:
    """What a feed-forward saves no more under tiles: its activations, and output and statistics of its norm."""
    if method in UNTILED:
        return 0.0
    copies = 3 if model.gated_ffn else 2
    columns = -(-model.ffn_size // degree) if method is Method.MEGATRON_TS else model.ffn_size / degree
    return copies * columns * width + (model.hidden_size * width + norm_bytes(model) / 2) / degree


class _LayerKind(NamedTuple):
    """All of a scheme that matters for one of its layers."""

    method: Method
    degree: int
    is_recomputed: bool
    is_offloaded: bool
    is_tiled: bool
    head_groups: int
    keeps_attention: bool


def layer_bytes(model: ModelSpec, scheme: PipelineConfig, layers: range, *, dtype: str) -> list[LayerBytes]:
    """The bytes of ``layers`` of ``scheme``, in turn; layers alike share one object, also those of other schemes.

    Raises:
        InputError: a method cannot share this model's layers among so many devices.
    """
    part = slice(layers.start, layers.stop)
    flags = scheme.offload[part] or (False,) * len(layers)
    keys = list(zip(scheme.methods[part], scheme.recompute[part], flags))
    made = {key: _layer_bytes(model, _kind_of(scheme, *key), dtype) for key in dict.fromkeys(keys)}
    return [made[key] for key in keys]


def _kind_of(scheme: PipelineConfig, method: Method, is_recomputed: bool, is_offloaded: bool) -> _LayerKind:
    return _LayerKind(
        method, scheme.degree, is_recomputed, is_offloaded, has_tiles(scheme, method),
        scheme.head_groups if has_groups(scheme, method) else 1, is_recomputed and scheme.keep_attention,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _layer_bytes(model: ModelSpec, kind: _LayerKind, dtype: str) -> LayerBytes:
    method, degree, width = kind.method, kind.degree, DTYPE_BYTES[dtype]
    volume = layer_volume(model, method, degree=degree, dtype=dtype)
    groups: dict[str, Any] = {}
    if kind.head_groups > 1:
        grouped = grouped_heads(volume, model, degree=degree, dtype=dtype, groups=kind.head_groups)
        volume, groups = grouped.volume, {
            "heads_at_once": grouped.heads_at_once, "group_bytes": grouped.sum_bytes,
            "key_gradient_bytes": grouped.key_gradient_bytes,
        }  # fmt: skip
    needed = volume.kept_bytes
    if kind.is_tiled:
        needed -= tiled_bytes(model, method, degree=degree, width=width)
    sums: dict[str, Any] = {}
    if kind.is_tiled and volume.reduce_bytes:
        copies = 3 if model.gated_ffn else 2
        numbers = copies * model.hidden_size * model.ffn_columns
        sums = {"summed": numbers * (SUM_BYTES - width / copies), "summed_all": float(numbers * (SUM_BYTES - width))}
    return LayerBytes(
        method=method, volume=volume, needed=needed, is_recomputed=kind.is_recomputed, is_offloaded=kind.is_offloaded,
        is_tiled=kind.is_tiled, **_again(model, kind, volume, needed, width), **sums, **groups,
    )  # fmt: skip


def _again(model: ModelSpec, kind: _LayerKind, volume: LayerVolume, needed: float, width: int) -> dict[str, Any]:
    """What a layer keeps, and what is done again in its backward."""
    if not kind.is_recomputed:
        return {"saved": needed, "again": 0.0}
    if not kind.keeps_attention:
        return {"saved": volume.input_bytes, "again": needed, "second_forward": volume.forward}
    of_attention = attention_bytes(model, kind.method, degree=kind.degree, width=width)
    again = needed - of_attention
    if kind.head_groups > 1:  # whose outputs are there in the split by tokens too, which the backward needs
        again += of_attention * model.head_size * width / (model.head_size * width + 4)
    second = forward_without_attention(volume.forward, kind.method)
    return {"saved": volume.input_bytes + of_attention, "again": again, "second_forward": second}


def moving_bytes(layers: Sequence[LayerBytes]) -> dict[LayerBytes, float]:
    """What is on the device of offloaded ``layers`` during the backward of each: its own, and the largest other's."""
    kinds = dict.fromkeys(layers)
    if not any(layer.is_offloaded for layer in kinds):
        return dict.fromkeys(kinds, 0.0)
    offloaded = sorted((layer.saved for layer in layers if layer.is_offloaded), reverse=True)
    largest, second = [*offloaded, 0.0][:2]
    return {
        layer: (layer.saved + (second if layer.saved == largest else largest)) if layer.is_offloaded else largest
        for layer in kinds
    }


def host_bytes_per_token(model: ModelSpec, scheme: PipelineConfig, *, dtype: str) -> float:
    """Bytes on the host of the stage that puts the most there: stage s of S keeps S - s micro-batches under 1F1B."""
    if not scheme.offload:
        return 0.0
    return max(
        (scheme.num_stages - stage)
        * sum(layer.on_host for layer in layer_bytes(model, scheme, scheme.layers_of_stage(stage), dtype=dtype))
        for stage in range(scheme.num_stages)
    )
