"""Measure the time or the memory of one micro-batch of synthetic sequences on a prepared model.

The model computes what it would in training, of sequences that repeat the corpus' first one to any length. Gradients it
leaves are to be discarded.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import synthetic
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.profile.probes import AllocatorPeaks, LoopbackGroup, SavedTensorCounter, Stopwatch, storages
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.exchange_script import AttentionExchange, ExchangeScript, SlotGather
from lengthwise.runtime.wrap.layer_hooks import LayerWatch
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.zero_collectives import finish_micro_batch

Watch = TypeVar("Watch", bound=LayerWatch)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement: a pack, the ranks that share it and how, and which layers are recomputed."""

    lengths: tuple[int, ...]
    """Lengths of the sequences in tokens."""
    group: Group
    recompute: tuple[bool, ...] = ()
    method: Method = Method.ULYSSES
    tile_tokens: int = 0
    """Slots of feed-forward modules' tiles; 0: as many as the model was prepared with."""
    keep_attention: bool = False
    """Whether recomputed layers keep what attention gave."""
    head_groups: int = 1
    """Groups of heads that attention computes one after the other."""
    split_backward: bool = False
    """Whether the backward leaves the gradients of weights for later."""
    draw: int = 0
    """The number of the step whose random numbers it has."""
    attended: tuple[AttentionExchange | SlotGather, ...] = ()
    """Attention calls of its forward, as :func:`measure_memory` saw them, which others wait for if this rank fails."""


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """Activation memory of one micro-batch on this rank."""

    num_bytes: int
    """Peak bytes: the allocator's peak on a GPU, what the forward saves on a CPU."""
    numbers: tuple[int, ...]
    """The numbers of the layers that were computed: a model may drop some of them at random."""
    layers: tuple[int, ...]
    """Bytes that the forward of each computed layer saved."""
    inputs: tuple[int, ...]
    """Bytes of the arguments of each computed layer."""
    attention: tuple[int, ...]
    """Bytes that kernels of attention gave in the forward of each computed layer, where recomputed layers keep them."""
    attended: tuple[AttentionExchange | SlotGather, ...]
    """Every call of attention in the forward."""
    loss_bytes: int = 0
    """The allocator's peak in the last layer's forward and after it; 0 on a CPU, as those that follow."""
    loss_backward_bytes: int = 0
    """Its peak in the backward before the last layer's."""
    backward_bytes: tuple[int, ...] = ()
    """Its peak in the backward of each computed layer."""
    embedding_backward_bytes: int = 0
    """Its peak in the backward after that of the layers, or in the forward to the end of the first layer."""
    waiting: tuple[int, ...] = ()
    """Bytes that the split backward of each computed layer kept for the gradients of weights; () of whole ones."""


def group_of_degree(world: DistContext, degree: int) -> Group | None:
    """This rank's group of ``degree`` consecutive ranks; None on ranks that are left over. Every rank calls this."""
    starts = range(0, world.size - degree + 1, degree)
    groups = [world.groups.of(tuple(range(start, start + degree))) for start in starts]
    return next((group for group in groups if group is not None), None)


def measure_memory(run: PreparedModel, trial: Trial) -> MemoryResult:
    """Measure the memory of a trial on a loopback group: nothing is sent, so that an OOM leaves no rank waiting.

    Raises:
        OutOfMemoryError: this rank has not enough of it.
    """
    group = LoopbackGroup(rank=trial.group.rank, ranks=trial.group.ranks, handle=trial.group.handle)
    with _micro_batch(run, trial, group) as micro_batch:
        peaks = AllocatorPeaks(run.world.device) if run.world.device.type == "cuda" else None
        inputs = micro_batch.inputs
        existing = [list(run.wrapped_model.structure.constants()), inputs]
        watch = SavedTensorCounter(existing, trial.recompute, peaks, keep_attention=trial.keep_attention)
        with watch_layers(run, watch) as counter, counter:
            loss = _loss(run, micro_batch)
        attended = tuple(micro_batch.shard.attended)
        num_bytes = counter.num_bytes + sum(storages(inputs).values())
        if peaks is not None:
            peaks.end_forward()
        _backward(run, loss, micro_batch)
        waiting = _waiting_bytes(micro_batch.shard.weight_gradients)
    computed = sorted(run.wrapped_model.layers.computed or counter.kept_bytes)
    result = MemoryResult(
        num_bytes=num_bytes,
        numbers=tuple(computed),
        layers=tuple(counter.kept_bytes.get(layer, 0) for layer in computed),
        inputs=tuple(counter.input_bytes(layer) for layer in computed),
        attention=tuple(counter.attention_bytes.get(layer, 0) for layer in computed),
        attended=attended,
        waiting=tuple(waiting.get(layer, 0) for layer in computed) if trial.split_backward else (),
    )
    if peaks is None:
        return result
    layers = tuple(peaks.layers.get(layer, 0) for layer in computed)
    embedding_bytes = max(peaks.take(), peaks.first_bytes)
    return replace(
        result, num_bytes=max(peaks.loss_bytes, peaks.loss_backward_bytes, *layers, embedding_bytes),
        loss_bytes=peaks.loss_bytes, loss_backward_bytes=peaks.loss_backward_bytes,
        backward_bytes=layers if peaks.layers else (), embedding_backward_bytes=embedding_bytes,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    """Compute time of one micro-batch on this rank."""

    time_s: float
    forward_s: tuple[float, ...]
    """Forward seconds of each computed layer."""
    backward_s: tuple[float | None, ...]
    """Backward seconds of each computed layer; None where its input needs no gradient."""
    weights_s: tuple[float, ...]
    """Seconds of each computed layer in gradients of weights that its split backward left for later; 0 of whole ones.
    """


def measure_time(run: PreparedModel, trial: Trial | None) -> TimingResult | None:
    """Time a trial that all ranks begin together; None on ranks without a trial and on those that ran out of memory.

    A rank that runs out of memory here sends the others zeros for what they wait for.
    """
    world = run.world
    gather_rows(torch.zeros(1, device=world.device))
    if trial is None:
        return None
    world.synchronize()
    start_s = time.perf_counter()
    with (
        _micro_batch(run, trial, trial.group) as micro_batch,
        watch_layers(run, Stopwatch(world.synchronize)) as watch,
    ):
        shard, has_failed = micro_batch.shard, False
        try:
            _backward(run, _loss(run, micro_batch), micro_batch)
            weights_s = _finish_backward(shard.weight_gradients, world)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            has_failed = True
        if has_failed:  # and not before: the error holds on to what was computed
            finish_micro_batch(shard, [shard.script or run.wrapped_model.script])
            return None
    world.synchronize()
    time_s = time.perf_counter() - start_s
    computed = sorted(run.wrapped_model.layers.computed or watch.forward_s)
    return TimingResult(
        time_s=time_s,
        forward_s=tuple(watch.forward_s.get(layer, 0.0) for layer in computed),
        backward_s=tuple(watch.backward_s(layer) for layer in computed),
        weights_s=tuple(weights_s.get(layer, 0.0) for layer in computed),
    )


@contextmanager
def watch_layers(run: PreparedModel, watch: Watch) -> Iterator[Watch]:
    """Within, layers are computed under ``watch``."""
    layers = run.wrapped_model.layers
    before, layers.watch = layers.watch, watch
    try:
        yield watch
    finally:
        layers.watch = before


@contextmanager
def _micro_batch(run: PreparedModel, trial: Trial, group: Group) -> Iterator[MicroBatch]:
    pack = Pack(ids=tuple(range(len(trial.lengths))), lengths=trial.lengths)
    slots = tuple(length // run.collator.slot_tokens for length in trial.lengths)
    with synthetic(run, slots):
        shard = PackShard(
            step=trial.draw, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=group,
            device=run.world.device, recompute=trial.recompute,
            tile_tokens=trial.tile_tokens or None, keep_attention=trial.keep_attention, head_groups=trial.head_groups,
            is_causal=run.collator.objective == NEXT_TOKEN,
            methods=(trial.method,) * run.wrapped_model.structure.num_layers,
            script=None if run.wrapped_model.layers.computed is None else ExchangeScript.complete(trial.attended),
            weight_gradients=WeightGradients(is_open=False) if trial.split_backward else None,
        )  # fmt: skip
        with active(shard):
            yield run.make(shard, pack)


def _loss(run: PreparedModel, micro_batch: MicroBatch) -> Tensor:
    output = run.model(**micro_batch.inputs)
    if micro_batch.shard.has_failed:
        raise torch.OutOfMemoryError("the model's forward ran out of memory")
    return run.wrapped_model.loss_of(output, micro_batch)


def _backward(run: PreparedModel, loss: Tensor, micro_batch: MicroBatch) -> None:
    micro_batch.shard.backward_begun = micro_batch.shard.num_exchanges
    run.begin_backward()
    gradients = micro_batch.shard.weight_gradients
    with nullcontext() if gradients is None else gradients.opened():
        loss.backward(torch.full_like(loss, micro_batch.num_targets / max(1, micro_batch.pack.num_tokens)))


def _waiting_bytes(gradients: WeightGradients | None) -> dict[int, int]:
    """Bytes that wait for gradients of weights, by layer."""
    factors: dict[int, list[Tensor]] = {}
    for layer, *pair in [] if gradients is None else gradients.kept():
        factors.setdefault(layer, []).extend(pair)
    return {layer: sum(storages(tensors).values()) for layer, tensors in factors.items()}


def _finish_backward(gradients: WeightGradients | None, world: DistContext) -> dict[int, float]:
    """Compute the gradients of weights that wait; seconds by layer."""
    times_s = dict[int, float]()
    if gradients is None:
        return times_s
    world.synchronize()
    start_s = time.perf_counter()

    def note(layer: int) -> None:
        nonlocal start_s
        world.synchronize()
        end_s = time.perf_counter()
        times_s[layer], start_s = times_s.get(layer, 0.0) + end_s - start_s, end_s

    gradients.compute(note)
    return times_s
