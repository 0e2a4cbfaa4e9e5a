"""Bytes of one device of a pipeline stage by kind, at the moments of a step that may be its peak.

T tokens of the pack, p devices of the stage, D hidden size, F feed-forward size, V vocabulary or a device's rows of it,
w bytes of the compute dtype, m of the master dtype. The moments are those of a dry run (``lengthwise dryrun``):

* a layer's backward: nothing of the layers before is freed yet. The backward of a feed-forward makes two gradients of
  T F / p where it is gated, else one, beyond what it has freed, beside that of the layer's output. When that of
  attention runs, what the feed-forward had saved is free; it has buffers of communication and, for each number of the
  queries, two at master precision, six in the compute dtype (some are copied into the order of the ring), and one of
  float32 that the kernel sums in;
* where weights are gathered by layer, the reduction of a feed-forward's gradients, whose tokens are freed by then;
* the backward of the stage's first layer, when little is saved any more and the pushes of all other gradients, from
  every pipeline, may still be under way;
* the loss, chunk by chunk: logits in both dtypes, then the [C, D] sides of the two products;
* the backward of the loss, which scales its gradients into the compute dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement
from lengthwise.core.sliced_passes import largest_share
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.layer_bytes import LayerBytes
from lengthwise.cost.analytic.volume import LayerVolume
from lengthwise.cost.memory_model import loss_bytes_per_token
from lengthwise.cost.separable import Line

LOGITS_AT_ONCE = 2**27
"""Numbers of one chunk of logits in the loss on a GPU."""
CPU_LOGITS_AT_ONCE = 2**21
MIN_CHUNK_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes at the peak of a micro-batch."""

    weights: float
    gradients: float
    optimizer: float
    """Master weights, their summed gradients and the optimizer's moments."""
    activations: float
    """Saved by forwards for their backwards."""
    temporary: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


class MemoryMoment(NamedTuple):
    """What a stage holds at one moment beside the model state."""

    activations: Line
    temporary: Line
    of_saved: float = 0.0
    """How often activations have what the layers of a micro-batch save, beyond what is in them already."""
    of_keys: float = 0.0
    """The same of the keys and values of slices."""

    def with_saved(self, saved: float, keys: float) -> "MemoryMoment":
        """The moment with these bytes per token in it."""
        per_token = self.of_saved * saved + self.of_keys * keys + self.activations.per_token
        return MemoryMoment(Line(self.activations.fixed, max(0.0, per_token)), self.temporary)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a stage as functions of the tokens of its micro-batches."""

    weights: float
    gradients: float
    optimizer: float
    moments: tuple[MemoryMoment, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Bytes of all kinds, at each moment."""
        state = self.weights + self.gradients + self.optimizer
        return tuple(
            Line(
                state + moment.activations.fixed + moment.temporary.fixed,
                moment.activations.per_token + moment.temporary.per_token,
                moment.temporary.chunk,
                moment.temporary.chunk_tokens,
            )
            for moment in self.moments
        )

    def at(self, num_tokens: int) -> MemoryParts:
        """The parts at the peak of micro-batches of ``num_tokens``."""
        moments = [
            MemoryParts(
                weights=self.weights, gradients=self.gradients, optimizer=self.optimizer,
                activations=moment.activations.at(num_tokens), temporary=moment.temporary.at(num_tokens),
            )
            for moment in self.moments
        ]  # fmt: skip
        return max(moments, key=lambda parts: parts.total)


@lru_cache(maxsize=4096)
def backward_bytes(layer: LayerBytes, model: ModelSpec, *, degree: int, widths: tuple[int, int]) -> float:
    """Bytes per token of the pack that a layer's backward takes beyond what its forward has saved."""
    volume, method, (width, master) = layer.volume, layer.method, widths
    gradients = ((2 if model.gated_ffn else 1) * model.ffn_size + model.hidden_size) * width / degree
    if method is Method.MEGATRON_TS:  # by then the output's gradient of a rank's own tokens is used
        return volume.live_bytes + gradients - model.hidden_size * width / degree
    queries = model.num_heads * model.head_size * (2 * master + 6 * width + 4) / degree
    freed = ((3 if model.gated_ffn else 2) * model.ffn_size + model.hidden_size) * width / degree
    if method is Method.METP:  # a shard of the weights at a time, of whose feed-forward nothing was saved
        passed = (width + master) * model.hidden_size / degree  # the output's gradient, and the sum of the input's
        inputs = (3 if model.gated_ffn else 1) * model.hidden_size * width / degree
        attention = volume.live_bytes + (queries - 2 * model.hidden_size * width) / degree  # both of its norm are freed
        return passed + max(inputs, (gradients + freed) / degree, attention)
    if layer.group_bytes or method in (Method.ULYSSES, Method.ULYSSES_Z):
        return max(gradients, _attention_bytes(layer, model, degree=degree, widths=widths) - freed)
    return max(gradients, volume.live_bytes + queries - freed if volume.live_bytes else 0.0)


def backward_lines(
    moving: Mapping[LayerBytes, float],
    model: ModelSpec,
    *,
    degree: int,
    widths: tuple[int, int],
    tile_tokens: int,
    gone: float = 0.0,
    is_last: bool = False,
) -> list[Line]:
    """What the backwards of layers take beyond what is on the device between the passes, at each of its moments.

    ``moving``: of every kind of layer, what is on its way from the host meanwhile.
    A feed-forward in tiles takes the gradients of its output and its input, and of one tile what it saved and the
    gradients of that; none of it is there when attention's backward runs, nor are ``gone`` bytes of the head's
    gradients. ``is_last``: nothing comes from the host any more but what the layer in its backward itself had there.
    """
    if is_last:
        moving = {layer: layer.on_host for layer in moving}
    plain = [
        backward_bytes(layer, model, degree=degree, widths=widths) + layer.again + moving[layer]
        for layer in moving
        if not layer.is_tiled
    ]
    lines = [Line(0.0, max(plain))] if plain else []
    for layer in moving:
        if layer.is_tiled:
            again = layer.again + moving[layer]
            tile = _tile_bytes(layer.method, model, degree=degree, width=widths[0])
            outside = 2 * model.hidden_size * widths[0] / degree
            tokens = layer.volume.input_bytes
            is_there = layer.is_recomputed * tokens  # the input, which is also what its norm needs
            freed = 0.0 if layer.is_recomputed else tokens  # of the half; the output's gradient, which recompute holds
            attention = _attention_bytes(layer, model, degree=degree, widths=widths)
            fewer = layer.volume.attention_buffer_bytes - layer.volume.buffer_bytes if layer.is_recomputed else 0.0
            lines += [
                Line(layer.summed, again - is_there + outside, tile, tile_tokens * degree),
                Line(min(0.0, fewer) - gone, again - is_there - freed + attention),
            ]
    return lines


def _tile_bytes(method: Method, model: ModelSpec, *, degree: int, width: int) -> float:
    """Bytes of a tile's backward for each of its tokens: what its forward made, and the gradients of that."""
    copies, gradients = (3, 2) if model.gated_ffn else (2, 1)
    rows = degree if method is Method.MEGATRON_TS else 1  # whose tiles are gathered
    columns = -(-model.ffn_size // degree) * rows if method is Method.MEGATRON_TS else model.ffn_size
    return ((copies + gradients) * columns + 2 * rows * model.hidden_size) * width / degree


def _attention_bytes(layer: LayerBytes, model: ModelSpec, *, degree: int, widths: tuple[int, int]) -> float:
    """Bytes per token of the pack that attention's backward takes: buffers of communication, gradients, float32 sums.

    Without communication, or all of it before and after: gradients of output, queries, keys and values, and what the
    kernel adds up: sums for queries, and where several read a key/value head, gradients of its copies.
    """
    width, master = widths
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    copies = 2 * queries * width if keys < queries else 0
    if layer.group_bytes:
        # Queries, outputs and their gradients: what the kernel gives and adds up beside them, or both sides of the
        # exchange.
        per_rank = layer.heads_at_once * queries / degree
        at_once = max(per_rank * (4 * width + 4) + layer.key_gradient_bytes, per_rank * 8 * width)
        return model.hidden_size * width / degree + at_once + layer.group_bytes
    has_exchange = layer.method in (Method.ULYSSES, Method.ULYSSES_Z, Method.MEGATRON_TS)
    if layer.volume.live_bytes and not has_exchange:
        return layer.volume.live_bytes + queries * (2 * master + 6 * width + 4) / degree
    gradients = (queries * (2 * width + 4) + copies + (2 * keys + model.hidden_size) * width) / degree
    if degree == 1:
        return gradients
    if layer.method is not Method.MEGATRON_TS:
        return gradients - queries * width / degree  # the output of a rank's own tokens is used by then
    gathered = model.hidden_size * width  # of three: without the output's, once it is used, or when all are made
    return layer.volume.live_bytes + max(gradients - gathered, 0.0)


class StageNumbers(NamedTuple):
    """Numbers of parameters and bytes of the model state on a stage, which no recompute, offload or tiles change."""

    num_held: int
    """Weights of the rank that holds the most."""
    num_arriving: int
    """Gradients that a rank gets while another layer's backward runs."""
    num_pushed: int
    """Gradients that come to it in pushes that may be under way in its first layer's backward."""
    whole_gradients: tuple[float, float, float]
    """Whole gradients beside shares, as :func:`~lengthwise.cost.gradient_reduction.whole_units` counts them."""
    state_bytes: tuple[int, int, int]
    """Weights, gradients, and what the optimizer has."""


class SlicedBytes(NamedTuple):
    """What a stage holds beside the tokens in flight where micro-batches are cut into slices; nothing where not."""

    share: float
    """Of the pack's tokens, what is computed at once at most."""
    keys: tuple[float, ...]
    """Of each layer, bytes per token of the pack of the keys and values of all slices, and of their gradients."""
    made_keys: float
    """Bytes per token of the pack of gradients of earlier keys and values, as the kernel makes them for one slice."""
    losses: float
    """Bytes per token of what losses keep: on the last stage those of all slices wait for the last one's backward."""
    head: float
    """Bytes of the sum of the head's gradients, on the last stage."""


def sliced_bytes(
    layers: Sequence[LayerBytes], model: ModelSpec, scheme: PipelineConfig, stage: int, widths: tuple[int, int]
) -> SlicedBytes:
    """What slices add on a ``stage`` of these layers. A layer that is not recomputed has saved its keys anyway."""
    if scheme.slices == 1:
        return SlicedBytes(1.0, (0.0,) * len(layers), 0.0, 0.0, 0.0)
    (width, master), is_last = widths, stage == scheme.num_stages - 1
    numbers = 2 * -(-model.num_kv_heads // scheme.degree) * model.head_size
    return SlicedBytes(
        share=largest_share(scheme.slices),
        keys=tuple(numbers * (master + width * layer.is_recomputed) for layer in layers),
        made_keys=numbers * width,
        losses=loss_bytes_per_token(model, width) / scheme.degree * is_last,
        head=float(master * model.hidden_size * model.vocab_size * is_last),
    )


def num_messages(scheme: PipelineConfig, stage: int, in_flight: float, share: float) -> float:
    """Hidden states between stages that a rank with whole weights holds beside what its layers saved, in micro-batches.

    The outputs of the micro-batches ``in_flight``, which the next stage has got; and towards the stage before two
    gradients of what is computed at once, a ``share`` of a micro-batch: one is sent while the next is computed.
    """
    if scheme.weights is WeightPlacement.SHARDED:
        return 0.0
    return in_flight * (stage < scheme.num_stages - 1) + 2 * share * (stage > 0)


def tied_gradient_bytes(model: ModelSpec, scheme: PipelineConfig, *, width: int) -> float:
    """Bytes of the head's gradient during the backwards of layers, where it waits for that of the same embedding."""
    if not model.tied_embeddings or scheme.num_stages > 1:
        return 0.0
    shards = scheme.degree if scheme.weights is WeightPlacement.SHARDED else 1
    return model.vocab_size * model.hidden_size * width / shards


def pull_moment(volume: LayerVolume, model: ModelSpec, num_held: int, *, degree: int, width: int) -> MemoryMoment:
    """The first forward, while all weights are still on their way in two hops: across nodes, then within them.

    Each hop has what it sends and what it gets, as many numbers as the rank's ``num_held`` weights, until it is over.
    """
    tokens = model.hidden_size * width / degree
    return MemoryMoment(activations=Line(0.0, volume.input_bytes), temporary=Line(4.0 * width * num_held, tokens))


def reduce_moments(
    model: ModelSpec, saved: float, moving: Mapping[LayerBytes, float], *, share: float, pushed: float
) -> list[MemoryMoment]:
    """The moment when a layer sends the gradients of its gathered feed-forward, whose own tokens are freed by then.

    ``moving``: of every kind of layer, what is on its way from the host; ``share``: bytes of one rank for a number of
    every token; ``pushed``: bytes of pushes under way. None where no weights are gathered.
    """
    freed = ((3 if model.gated_ffn else 2) * model.ffn_size + model.hidden_size) * share
    return [
        MemoryMoment(
            activations=Line(0.0, saved + layer.again + num_bytes - (0.0 if layer.is_tiled else freed)),
            temporary=Line(layer.reduce_bytes + pushed, 2 * model.hidden_size * share),
        )
        for layer, num_bytes in moving.items()
        if layer.reduce_bytes
    ]


def loss_moments(
    model: ModelSpec, saved: float, *, degree: int, is_sharded: bool, widths: tuple[int, int], logits_at_once: int
) -> tuple[MemoryMoment, MemoryMoment]:
    """The loss and its backward on the last stage, whose layers and final norm have ``saved`` bytes per token."""
    width, master = widths
    rows, tokens_together = (model.vocab_size / degree, 1) if is_sharded else (model.vocab_size, degree)
    head = model.hidden_size * rows
    chunk = width * rows + max(master * rows, (width + 2 * master) * model.hidden_size)
    chunk_tokens = max(MIN_CHUNK_TOKENS, logits_at_once / rows) * tokens_together
    forward = MemoryMoment(
        activations=Line(master * head, saved), temporary=Line(0.0, 0.0, chunk / tokens_together, chunk_tokens)
    )
    scaled = Line(width * head, model.hidden_size * width / degree)
    return forward, forward._replace(temporary=scaled)
