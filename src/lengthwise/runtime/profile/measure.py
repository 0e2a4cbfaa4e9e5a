"""Profile a native model on this device: time and activation memory of micro-batches over a ladder of lengths.

All ranks measure at the same time, as they will train: on CPUs they share memory bandwidth, on GPUs power.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.cost import ProfileRow, ProfileTable, SharedRows
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement, WeightShard
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.execution import ActivationPlan, Execution
from lengthwise.runtime.models.targets import TokenMasking, masked_targets, next_token_targets
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.profile.layer_parts import LayerProbe, PartSeconds, mean_seconds, parts_of
from lengthwise.runtime.profile.measure_links import measure_links
from lengthwise.runtime.state.sharded import ShardedState


def profile(
    model: Transformer,
    spec: ModelSpec,
    world: DistContext,
    *,
    packs: list[tuple[int, ...]],
    recompute: bool,
    repeats: int,
    shared: Sequence[tuple[int, Method]] = (),
    on_row: Callable[[], None] = lambda: None,
) -> ProfileTable:
    """Measure every pack ``repeats`` times, in shuffled rounds so that a slow moment of the machine hits all alike.

    ``shared``: degrees, which divide the ranks, and methods by which so many ranks share every pack too. Cost:
    for each of these and for a rank alone, the sum over packs of one forward and ``repeats`` forwards and backwards.
    """
    flags = (recompute,) * spec.num_layers
    state = ShardedState(model, world, OptimizerSettings())
    generator = torch.Generator().manual_seed(0)
    feeds = [_random_feed(lengths, spec, world, generator) for lengths in packs]
    parts: list[SharedRows] = []
    update_s, alone = 0.0, tuple[ProfileRow, ...]()
    for degree, method in ((1, Method.DENSE), *shared):
        placement = WEIGHTS_OF.get(method, WeightPlacement.WHOLE)
        _hold(state, num_shards=degree if placement is WeightPlacement.SHARDED else 1)
        passes = [_loss_of(model, feed, flags, world, degree=degree, method=method) for feed in feeds]
        probes = [_probes_of(model, feed, world, degree=degree, method=method) for feed in feeds]
        rows = _measure_rows(
            passes, probes, packs, model, world, recompute=recompute, repeats=repeats, generator=generator,
            on_row=on_row,
        )  # fmt: skip
        moved_s: float | None = None
        if degree == 1 or placement is WeightPlacement.SHARDED:
            moved_s = _median([_time_s(partial(_update, state), world) for _ in range(max(5, repeats))], world)
        if degree == 1:
            update_s, alone = moved_s or 0.0, rows
        else:
            parts.append(SharedRows(degree=degree, method=str(method), rows=rows, update_s=moved_s))
    state.materialize_all()
    return ProfileTable(
        model_digest=spec.digest,
        model_name=spec.name,
        device=device_name(world.device),
        dtype=str(state.compute_dtype).removeprefix("torch."),
        recompute=recompute,
        num_ranks=world.size,
        update_s=update_s,
        rows=alone,
        shared=tuple(parts),
        links=measure_links(world),
    )


def _hold(state: ShardedState, *, num_shards: int) -> None:
    """Pull the whole model to every rank, or a shard of each layer to each of ``num_shards`` ranks in a row."""
    layers = state.table.num_units - 2
    shards = [
        WeightShard(first=0, end=layers, num_layers=layers, shard=rank % num_shards, num_shards=num_shards)
        for rank in range(state.world.size)
    ]
    state.hold(shards)
    state.pull()
    state.finish_pull()


def _measure_rows(
    passes: "list[Forward]",
    probes: list[list[LayerProbe]],
    packs: list[tuple[int, ...]],
    model: Transformer,
    world: DistContext,
    *,
    recompute: bool,
    repeats: int,
    generator: torch.Generator,
    on_row: Callable[[], None],
) -> tuple[ProfileRow, ...]:
    _backward(passes[0])  # the first call of anything is slow
    kept_bytes = []
    for forward in passes:
        kept_bytes.append(_kept_bytes(model, forward, world, recompute=recompute))
        on_row()
    seconds: list[list[float]] = [[] for _ in packs]
    part_seconds: list[list[PartSeconds]] = [[] for _ in packs]
    for _ in range(repeats):
        for number in torch.randperm(len(packs), generator=generator).tolist():
            seconds[number].append(_time_s(partial(_backward, passes[number]), world))
            part_seconds[number].append(mean_seconds(probes[number]))
            on_row()
    return tuple(
        ProfileRow(
            lengths=lengths,
            time_s=_median(times, world),
            spread_s=_half_interquartile(times),
            kept_bytes=size,
            parts=parts_of(probes_of_pack, part_times, world),
        )
        for lengths, times, size, probes_of_pack, part_times in zip(packs, seconds, kept_bytes, probes, part_seconds)
    )


def device_name(device: torch.device) -> str:
    """The device's product name, or the number of CPU threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"


Feed = tuple[Tensor, tuple[int, ...], Tensor]
"""tokens_T, cu_seqlens, targets_T"""


def _random_feed(lengths: tuple[int, ...], spec: ModelSpec, world: DistContext, generator: torch.Generator) -> Feed:
    pack = Pack(ids=tuple(range(len(lengths))), lengths=lengths)
    tokens = torch.randint(spec.vocab_size, (pack.num_tokens,), generator=generator)
    if spec.objective == NEXT_TOKEN:
        targets = next_token_targets(tokens, pack)
    else:  # any token may stand for the mask: what it costs is how many are predicted
        tokens, targets = masked_targets(
            tokens, pack, TokenMasking(seed=0, vocab_size=spec.vocab_size, mask_token_id=0)
        )
    return tokens.to(world.device), pack.cu_seqlens, targets.to(world.device)


Forward = Callable[[tuple[bool, ...] | None], Tensor]
"""Computes the loss of a pack; takes flags of recomputed layers in place of the profile's."""


def _loss_of(
    model: Transformer,
    feed: Feed,
    recompute: tuple[bool, ...],
    world: DistContext,
    *,
    degree: int = 1,
    method: Method = Method.DENSE,
) -> Forward:
    """The forward of a pack on this rank alone, or shared by its group of ``degree`` ranks."""
    make = _executions(model, feed, world, degree=degree, method=method)
    return lambda flags: model.run(make(flags or recompute, None)) / len(feed[0])


def _probes_of(model: Transformer, feed: Feed, world: DistContext, *, degree: int, method: Method) -> list[LayerProbe]:
    """Probes of the layers of a model that differ from one another, each with an execution of that layer alone."""
    make = _executions(model, feed, world, degree=degree, method=method)
    layers = range(min(len(model.views(feed[1])), len(model.layers)))
    return [LayerProbe(model, make((), range(layer, layer + 1)), layer, world) for layer in layers]


def _executions(
    model: Transformer, feed: Feed, world: DistContext, *, degree: int, method: Method
) -> Callable[[tuple[bool, ...], range | None], Execution]:
    """Makes executions of a pack, with some layers recomputed, of all layers or some."""
    tokens_T, cu_seqlens, targets_T = feed
    if degree == 1:
        return lambda flags, layers: model.on_one_device(
            tokens_T, cu_seqlens, targets_T, activations=ActivationPlan(recompute=flags)
        )
    groups = [tuple(range(first, first + degree)) for first in range(0, world.size, degree)]
    world.groups.prepare([(ranks, "") for ranks in groups])
    group = world.groups.of(groups[world.rank // degree])
    assert group is not None, "every rank is in one group of the degree, which divides their number"
    shared = partial(
        StageExecution, model, group, tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens,
        methods=(method,) * model.spec.num_layers, weights=WEIGHTS_OF[method],
    )  # fmt: skip
    return lambda flags, layers: shared(activations=ActivationPlan(recompute=flags), layers=layers)


def _backward(forward: Forward) -> None:
    forward(None).backward()


def _update(state: ShardedState) -> None:
    state.clear_gradient()
    state.finish_push()
    norm, _ = state.global_norm(torch.zeros((), device=state.world.device))
    state.step(lr=0.0, clip=min(1.0, 1.0 / (norm + 1e-6)))
    state.pull()
    state.finish_pull()


def _time_s(work: Callable[[], None], world: DistContext) -> float:
    """Time ``work`` in seconds, when all ranks begin it together."""
    gather_rows(torch.zeros(1, device=world.device))
    world.synchronize()
    start_s = time.perf_counter()
    work()
    world.synchronize()
    return time.perf_counter() - start_s


def _kept_bytes(model: Transformer, forward: Forward, world: DistContext, *, recompute: bool) -> int:
    """Bytes a micro-batch needs beyond the model state: the allocator's peak on a GPU, saved tensors on a CPU."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
        _backward(forward)
        return torch.cuda.max_memory_allocated(world.device) - before
    num_bytes, num_layers = _saved_bytes(model, forward, None), model.spec.num_layers
    if recompute:  # in the backward, one layer at a time is alive in full
        num_bytes += _saved_bytes(model, forward, (False,) * num_layers) // num_layers
    return num_bytes


def _saved_bytes(model: Transformer, forward: Forward, recompute: tuple[bool, ...] | None) -> int:
    """Bytes of the distinct storages, weights left out, that the forward saves for the backward."""
    weight_addresses = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_addresses:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # an address must not be used twice while we count
        return tensor.detach()  # an output that its own graph holds would never be freed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward(recompute)
    del loss
    alive.clear()
    return sum(sizes.values())


def _median(times: list[float], world: DistContext) -> float:
    """The median over the repeats of all ranks."""
    rows = gather_rows(torch.tensor(times, dtype=torch.float64, device=world.device))
    return float(rows.flatten().cpu().quantile(0.5))


def _half_interquartile(times: list[float]) -> float:
    low, high = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return float(high - low) / 2


def num_measurements(packs: list[tuple[int, ...]], repeats: int, *, num_shared: int = 0) -> int:
    """The number of times that :func:`profile` calls ``on_row``."""
    return len(packs) * (repeats + 1) * (1 + num_shared)
