"""Profile two layers of a prepared model and everything else once, from which its whole cost follows. DCP, section 3.5.

Where layers are of several kinds, one of each is measured, and costs are those of the mean layer.

All ranks measure at the same time, in groups of one degree after the other, and go through the same packs: what decides
what comes next is known to all of them, and what one alone knows, its memory and its clock, is told to all first. Every
pack is first computed by each rank for itself, as if the others answered. So a rank that runs out of memory leaves
nobody waiting, and all give up longer packs of that degree together.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.head_split import shared_by
from lengthwise.core.layer_profile import AS_PREPARED, LayerRow, LayerTable, LayerVariant, LinkRow
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.devices import local_size
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.fingerprint import identity_of, other_bytes
from lengthwise.runtime.profile.layer_kinds import MeasuredLayers, measured_layers
from lengthwise.runtime.profile.layer_memory import CountedBytes, measure_bytes
from lengthwise.runtime.profile.measure_links import host_speed
from lengthwise.runtime.profile.measured_packs import FEWEST, ladder, many_short, packs_of_corpus
from lengthwise.runtime.profile.trial import TimingResult, Trial, group_of_degree, measure_time
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

DRAWS = 20
"""How often random numbers are drawn by which a model drops layers, until one of those that are measured is left."""
GROWTH = 4.0
"""Largest growth of time that is expected when a sequence is twice as long."""
SHARE_OF_FREE = 0.9
"""Share of the free memory that a trial may be expected to need."""
LINK_REPEATS = 5
UPDATE_REPEATS = 5

Progress = Callable[[float], None]
"""A callback that gets the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ProfilingEffort:
    """Limits of the time and memory that profiling may take."""

    repeats: int = 5
    """Repeats of every pack, while there is time."""
    budget_s: float = 20.0
    """Seconds of all packs. The first three of every degree are measured in any case."""
    memory_bytes: int | None = None
    """Bytes that a micro-batch may take on a rank; None: what is free."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.budget_s < 0:
            raise InputError(f"a profile needs a repeat and time; got repeats={self.repeats}, budget_s={self.budget_s}")


@dataclass(kw_only=True)
class _Case:
    """The measurements of one pack, the same on every rank."""

    lengths: tuple[int, ...]
    counted: CountedBytes
    num_layers: int
    """Layers that are computed."""
    trial: Trial | None
    """The trial on this rank; None where it is in no group."""
    wall_s: float = 0.0
    times: list[np.ndarray] = field(default_factory=list)
    """[ranks in groups, 4] forward, backward, constant, gradients of weights; one array per repeat."""

    @property
    def held_bytes(self) -> int:
        """Peak bytes while these layers are computed."""
        counted = self.counted
        beside = max(counted.constant, counted.loss_backward, counted.backward) + counted.alive
        return self.num_layers * (counted.saved + counted.inputs) + beside

    def row(self, degree: int, method: Method, variant: LayerVariant) -> LayerRow:
        """The table row of this pack: medians over repeats and ranks."""
        low, (forward, backward, constant, weights), high = np.quantile(
            np.concatenate(self.times), (0.25, 0.5, 0.75), axis=0
        )
        spread = (high - low) / 2
        return LayerRow(
            lengths=self.lengths, degree=degree, method=str(method),
            forward_s=float(forward), backward_s=float(backward),
            constant_s=float(constant), forward_spread_s=float(spread[0]), backward_spread_s=float(spread[1]),
            constant_spread_s=float(spread[2]), weights_s=float(weights), repeats=len(self.times),
            tile_tokens=variant.tile_tokens, keep_attention=variant.keep_attention, head_groups=variant.head_groups,
            split_backward=variant.split_backward, **self.counted.fields,
        )  # fmt: skip


def measure(
    run: PreparedModel,
    *,
    longest: int,
    degrees: Sequence[int] | None = None,
    methods: Sequence[Method] = (Method.ULYSSES,),
    effort: ProfilingEffort = ProfilingEffort(),
    update_s: float | None = None,
    variant: LayerVariant = AS_PREPARED,
    on_progress: Progress = lambda done: None,
) -> LayerTable:
    """Measure packs of up to ``longest`` tokens at every degree; every rank calls this and gets the same table.

    Args:
        run: a prepared model, before its first step; as it was when this returns.
        longest: tokens of the longest sequence.
        degrees: how many ranks share a pack; None: all numbers that divide those of the run.
        methods: how they share it.
        effort: limits.
        update_s: seconds of an update where they are known; None: measured, before the first one.
        variant: how layers compute.
        on_progress: called on every rank.

    Raises:
        InputError: not even the shortest pack fits, or a degree is none.
    """
    world, wrapped_model = run.world, run.wrapped_model
    if degrees is None:
        degrees = [degree for degree in range(1, world.size + 1) if world.size % degree == 0]
    if not degrees or not all(1 <= degree <= world.size for degree in degrees):
        raise InputError(f"degrees are numbers from 1 to the {world.size} ranks of the run, not {list(degrees)}")
    measured = _layers_to_measure(wrapped_model)
    layers, rows, profiler = wrapped_model.layers, [], _Profiler(run, longest, effort, on_progress, measured)
    profiler.variant = variant
    before, layers.computed = layers.computed, frozenset(measured.numbers)
    try:
        shared = [(degree, method) for degree in degrees for method in shared_by(degree, methods)]
        with measured.pinned(run.gather):
            for number, (degree, method) in enumerate(shared):
                rows += profiler.measure(degree, method, part=(number, len(shared)))
    finally:
        layers.computed = before
        run.discard()
    structure = wrapped_model.structure
    table = LayerTable(
        identity=identity_of(run),
        num_layers=structure.num_layers,
        num_params=sum(parameter.numel() for parameter in structure.parameters.values()),
        other_bytes=other_bytes(run),
        longest=longest,
        update_s=measure_update(run) if update_s is None else update_s,
        rows=tuple(rows),
        links=tuple(_link(run, degree) for degree in degrees if degree > 1),
        too_large=tuple(profiler.too_large),
        host=host_speed(world),
    )
    on_progress(1.0)
    return table


def _layers_to_measure(wrapped_model: WrappedModel) -> MeasuredLayers:
    """One layer of each kind; all that are called, where the model does not call each once and so needs them all."""
    layers, structure = wrapped_model.layers, wrapped_model.structure
    measured = measured_layers(structure.layers)
    is_in_order = wrapped_model.by_sequence is not None or not layers.order_problem
    if is_in_order and layers.called.issuperset(measured.numbers):
        return measured
    return measured_layers(structure.layers, called=layers.called)


class _Profiler:
    """Measures packs of one degree after the other, with decisions that are the same on all ranks."""

    def __init__(
        self,
        run: PreparedModel,
        longest: int,
        effort: ProfilingEffort,
        on_progress: Progress,
        layers: MeasuredLayers,
    ) -> None:
        self._run, self._longest, self._effort, self._on_progress = run, longest, effort, on_progress
        self._layers = layers
        self._start_s, self._spent_s = time.perf_counter(), 0.0
        self._memory = self._agree(-_free_bytes(run.world), -(effort.memory_bytes or np.inf)).max(axis=0).max() * -1
        self._random = np.random.default_rng(0)
        self.too_large: list[tuple[int, int]] = []
        self.variant = AS_PREPARED

    def measure(self, degree: int, method: Method, *, part: tuple[int, int]) -> list[LayerRow]:
        """Measure the rows of one degree and method, the ``part[0]``-th of ``part[1]``."""
        self._degree, self._method, self._group = degree, method, group_of_degree(self._run.world, degree)
        until_s = self._spent_s + max(0.0, self._effort.budget_s - self._spent_s) / (part[1] - part[0])
        slot_tokens, lengths_of_corpus = self._run.collator.slot_tokens, self._run.collator.compared_lengths
        packs = (
            packs_of_corpus(lengths_of_corpus, self._longest, slot_tokens=slot_tokens)
            if lengths_of_corpus
            else ladder(self._longest, degree=degree, slot_tokens=slot_tokens)
        )
        packs = [lengths for lengths in packs if sum(lengths) > self.variant.tile_tokens * degree * slot_tokens]
        cases: list[_Case] = []
        for number, lengths in enumerate(packs):
            if self._is_too_much(cases, lengths, until_s):
                break
            case = self._begin(lengths, warm_up=not cases)
            if case is None:
                break
            cases.append(case)
            self._on_progress((part[0] + 0.5 * (number + 1) / (len(packs) + 1)) / part[1])
        if not cases:
            return []
        lengths = () if lengths_of_corpus else many_short([case.lengths for case in cases], slot_tokens=slot_tokens)
        short = self._begin(lengths, warm_up=False) if lengths else None
        cases += [short] if short is not None else []
        for repeat in range(1, self._effort.repeats):
            for number in self._random.permutation(len(cases)).tolist():
                if self._spent_s + cases[number].wall_s <= until_s and not self._time(cases[number]):
                    self._note_too_large(cases[number].lengths)
            self._on_progress((part[0] + 0.5 + 0.5 * repeat / self._effort.repeats) / part[1])
        return [case.row(degree, method, self.variant) for case in cases]

    def _is_too_much(self, cases: list[_Case], lengths: tuple[int, ...], until_s: float) -> bool:
        """Whether a longer pack is expected to need more memory than there is, or more time than is left."""
        if not cases:
            return False
        longer = sum(lengths) / sum(cases[-1].lengths)
        needed = cases[-1].held_bytes * longer
        more = 0 if len(cases) < 2 else sum(cases[-1].lengths) - sum(cases[-2].lengths)
        if more:  # a line through the last two
            per_token = (cases[-1].held_bytes - cases[-2].held_bytes) / more
            needed = cases[-1].held_bytes + max(0.0, per_token) * (sum(lengths) - sum(cases[-1].lengths))
        if needed > self._memory:
            self.too_large.append((self._degree, sum(lengths)))
            return True
        expected_s = 2 * cases[-1].wall_s * max(longer, GROWTH * longer / 2)  # once for bytes, once for seconds
        return len(cases) >= FEWEST and self._spent_s + expected_s > until_s

    def _begin(self, lengths: tuple[int, ...], *, warm_up: bool) -> _Case | None:
        """Measure the memory and the first time of a pack; None if some rank ran out of memory."""
        failed, numbers, trial = 0.0, CountedBytes.none(), None
        try:
            if self._group is not None:
                num_recomputed = self._run.wrapped_model.structure.num_layers * self.variant.keep_attention
                trial = Trial(
                    lengths=lengths, group=self._group, method=self._method, recompute=(True,) * num_recomputed,
                    **vars(self.variant),
                )  # fmt: skip
                numbers, trial = self._counted(trial)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = 1.0
        largest = self._agree(failed, *numbers).max(axis=0)
        if largest[0]:
            self._note_too_large(lengths)
            return None
        counted = CountedBytes(*map(int, largest[1:]))
        case = _Case(lengths=lengths, counted=counted, num_layers=len(self._layers.numbers), trial=trial)
        if not self._time(case) or (warm_up and not self._time(case)):
            self._note_too_large(lengths)
            return None
        if warm_up:
            del case.times[0]
        return case

    def _counted(self, trial: Trial) -> tuple[CountedBytes, Trial]:
        """The bytes of a trial, with other random numbers where a model drops all of its layers by them."""
        numbers, counted = measure_bytes(self._run, trial, self._layers)
        for draw in range(1, DRAWS if self._run.wrapped_model.by_sequence is not None else 0):
            if numbers.saved > 1:
                break
            numbers, counted = measure_bytes(self._run, replace(trial, draw=draw), self._layers)
        return numbers, counted

    def _note_too_large(self, lengths: tuple[int, ...]) -> None:
        """Record a pack that was too large for some rank, and free its memory on all of them."""
        gc.collect()
        if self._run.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.too_large.append((self._degree, sum(lengths)))

    def _time(self, case: _Case) -> bool:
        """Time a pack once; return whether it fitted all ranks."""
        before_s = self._spent_s
        timing = measure_time(self._run, case.trial)
        has_failed = case.trial is not None and timing is None
        reports = self._agree(float(has_failed), *((np.nan,) * 4 if timing is None else _seconds(timing, self._layers)))
        if reports[:, 0].any():
            return False
        case.times.append(reports[~np.isnan(reports[:, 1]), 1:])
        case.wall_s = self._spent_s - before_s
        return True

    def _agree(self, *values: float) -> np.ndarray:
        """Gather ``values`` of all ranks, [ranks, n]; the seconds spent become those of the slowest rank."""
        row = [time.perf_counter() - self._start_s, *values]
        rows = gather_rows(torch.tensor(row, dtype=torch.float64, device=self._run.world.device)).cpu().numpy()
        self._spent_s = float(rows[:, 0].max())
        return rows[:, 1:]


def _seconds(timing: TimingResult, layers: MeasuredLayers) -> tuple[float, float, float, float]:
    """Forward and backward seconds of the mean layer, those outside of layers, and those of a layer's gradients of
    weights that were left for later.
    """
    forwards_s, layer_s = timing.forward_s, layers.mean(timing.forward_s)
    measured = [backward_s for backward_s in timing.backward_s if backward_s is not None]
    missing_s = measured[-1] if measured else max(timing.time_s - sum(forwards_s), layer_s) / len(forwards_s)
    backwards_s = [missing_s if backward_s is None else backward_s for backward_s in timing.backward_s]
    constant_s = max(0.0, timing.time_s - sum(forwards_s) - sum(backwards_s) - sum(timing.weights_s))
    return layer_s, layers.mean(backwards_s), constant_s, layers.mean(timing.weights_s)


def _free_bytes(world: DistContext) -> float:
    """Bytes of memory that this rank may use for a trial."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return SHARE_OF_FREE * (free + cached)
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return SHARE_OF_FREE * 1024 * int(fields["MemAvailable"].split()[0]) / local_size()
    except (OSError, KeyError):
        return np.inf


def _median_s(run: PreparedModel, work: Callable[[], object], repeats: int) -> float:
    """The median over repeats of the slowest rank's seconds, when all begin together."""
    times = []
    for _ in range(repeats):
        gather_rows(torch.zeros(1, device=run.world.device))
        run.world.synchronize()
        start_s = time.perf_counter()
        work()
        run.world.synchronize()
        times.append(time.perf_counter() - start_s)
    rows = gather_rows(torch.tensor(times, dtype=torch.float64, device=run.world.device))
    return float(rows.amax(dim=0).median())


def measure_update(run: PreparedModel) -> float:
    """Time an update (push, clip, optimizer, pull) with zero gradients and learning rate: weights stay as they are."""
    state = run.state
    if state.optimizer is not None and state.optimizer.state:
        raise CheckError("an update can be measured before the first one alone; give measure(..., update_s=...)")

    def update() -> None:
        state.clear_gradient()
        state.finish_push()
        state.global_norm(torch.zeros((), device=run.world.device))
        state.step(lr=0.0, clip=1.0)
        run.update_weights()

    run.discard()
    update()
    found_s = _median_s(run, update, UPDATE_REPEATS)
    if state.optimizer is not None:
        state.optimizer.state.clear()
    state.clear_gradient()
    return found_s


def _link(run: PreparedModel, degree: int) -> LinkRow:
    """Measure the latency and bandwidth of an all-to-all, in all groups of a degree at once."""
    group = group_of_degree(run.world, degree)
    much = (1 << 26) if run.world.device.type == "cuda" else (1 << 22)
    times = []
    for num_bytes in (degree, much):
        split = num_bytes // degree
        x = torch.zeros(split * degree, dtype=torch.uint8, device=run.world.device)
        splits = [split] * degree
        exchange = (lambda: None) if group is None else (lambda: group.all_to_all(x, splits, splits))  # noqa: B023
        exchange()
        times.append(_median_s(run, exchange, LINK_REPEATS))
    sent = (much - degree) * (degree - 1) / degree
    return LinkRow(degree=degree, latency_s=times[0], bytes_per_s=sent / max(times[1] - times[0], 1e-9))
