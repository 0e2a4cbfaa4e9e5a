"""Batches that device groups can balance, formed from a window of the sampler's stream: DCP with its own batches.

The sampler decides what is learned; this is the one exception, and it is stated: which sequences share a step follows
their lengths and the cluster. Every sequence is used once, the oldest one held is in the next batch, and none is passed
over for long. (DCP's code draws groups with shares that are not cumulative, so some are never drawn, and drops what a
bucket cannot fill; neither is reproduced.)

A batch fills the cluster with groups, as many of each bucket as its share of the work held, each at the bucket's best
batch size and degree; then ``accumulate`` says how many micro-batches each group runs so that all end together.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN, BatchStream, GlobalBatch
from lengthwise.core.errors import InputError, Setting
from lengthwise.plan.dcp.accumulation import AccumulationRange, accumulate
from lengthwise.plan.dcp.dcp import usable_candidates
from lengthwise.plan.dcp.length_buckets import make_buckets
from lengthwise.plan.dcp.recompute_levels import BucketSetting, fastest_setting
from lengthwise.plan.space.problem import PlanningProblem


def form_batches(stream: Iterable[GlobalBatch], problem: PlanningProblem, **settings: Any) -> Iterator[GlobalBatch]:
    """The batches of :class:`FormedBatches` from a stream that need not be resumed."""
    return FormedBatches(iter(stream), problem, **settings)  # type: ignore[arg-type]  # it is never asked where it is


class FormedBatches:
    """Batches of the stream's sequences, each sequence once, whose accumulation counts balance.

    Steps count on from the stream's first. The end of a finite stream is formed too, in batches as balanced as what is
    left allows.
    """

    def __init__(
        self,
        stream: BatchStream,
        problem: PlanningProblem,
        *,
        g_min: int = 1,
        g_max: int = 5,
        window: int = 8,
        growth_cap: float = 4.0,
        is_finite: bool = False,
    ) -> None:
        """Hold nothing yet.

        Args:
            stream: the sampler's batches.
            is_finite: whether they end.
            problem: whose candidates the groups run, as ``dcp-intra`` does.
            g_min: where no group accumulates as many micro-batches, the counts of all are multiplied until one does.
            g_max: the slowest group accumulates at most this many.
            window: batches of the sampler held to choose from.
            growth_cap: most sequences of a batch, in batches of the sampler, and fewest of a part of one: a batch of
                few groups accumulates more rather than be small. What g_min asks for is always allowed, and the end of
                the stream may be smaller.

        Raises:
            InputError: the window holds no batch, or the cap allows less than one.
            InfeasibleError: no device group holds a sequence.
        """
        if window < 1 or growth_cap < 1:
            raise InputError(f"forming batches needs a window and a cap of at least 1; got {window} and {growth_cap}")
        self._stream, self._problem = stream, problem
        self._g_min, self._g_max = g_min, g_max
        self._window, self._growth_cap = window, growth_cap
        self._held, self._is_finite = _Held(problem), is_finite
        self._step, self._size = 0, 0

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        waiting = self._held
        while len(waiting) < max(1, self._window * self._size) and (batch := next(self._stream, None)) is not None:
            self._step = self._step if self._size else batch.step
            self._size = len(batch.ids)
            waiting.add(batch)
        if not len(waiting):
            raise StopIteration
        overdue = waiting.num_batches - 2 * self._window
        formed = waiting.form(
            self._step, self._size, g_min=self._g_min, g_max=self._g_max, growth_cap=self._growth_cap, overdue=overdue
        )
        self._step += 1
        return formed

    def num_left(self) -> int | None:
        """How many batches are left, which are others on another cluster; None: they do not end."""
        if not self._is_finite:
            return None
        state, number = self.state_dict(), sum(1 for _ in self)
        self.load_state_dict(state)
        return number

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and which of its sequences wait; in plain values."""
        return {
            "stream": self._stream.state_dict(),
            "step": self._step,
            "size": self._size,
            "held": self._held.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the one that gave ``state`` was; on another cluster, with the same sequences waiting.

        Raises:
            InputError: the state is of a stream that forms no batches, or of another corpus.
        """
        if "held" not in state:
            raise InputError("the state is of a run that forms no batches; resume with the settings it was saved with")
        self._stream.load_state_dict(state["stream"])
        self._step, self._size = state["step"], state["size"]
        self._held = _Held(self._problem)
        self._held.restore(state["held"])


@dataclass(frozen=True)
class _Sequence:
    """A sequence that waits."""

    arrival: int
    """Place in the stream."""
    batch: int
    """Batches of the stream before its own."""
    id: int
    length: int
    targets: int | None = None
    """Tokens that have a loss, where not all of them have."""


class _Held:
    """Sequences that wait, by bucket, the oldest first."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.candidates = usable_candidates(problem)
        self.buckets = make_buckets(problem, sorted({candidate.max_tokens for candidate in self.candidates}))
        self.num_batches, self._objective = 0, NEXT_TOKEN
        self._arrivals = 0
        self._waiting: list[deque[_Sequence]] = [deque() for _ in range(len(self.buckets))]
        self._settings: dict[tuple[int, int], BucketSetting] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, batch: GlobalBatch) -> None:
        """Hold the sequences of one more batch of the stream."""
        self.problem.check_fits(np.array(batch.lengths), np.array(batch.ids))
        for place, bucket in enumerate(self.buckets.of(np.array(batch.lengths)).tolist()):
            if batch.lengths[place] > self.buckets.edges[-1]:
                raise InputError(
                    f"sequence {batch.ids[place]} has {batch.lengths[place]:,} tokens, more than {Setting.MAX_LENGTH} "
                    f"({self.problem.max_length:,}) promises; set {Setting.MAX_LENGTH} to the longest"
                )
            waits = _Sequence(
                arrival=self._arrivals, batch=self.num_batches, id=batch.ids[place], length=batch.lengths[place],
                targets=None if batch.targets is None else batch.targets[place],
            )  # fmt: skip
            self._waiting[bucket].append(waits)
            self._arrivals += 1
        self.num_batches, self._objective = self.num_batches + 1, batch.objective

    def state(self) -> dict[str, Any]:
        """Who waits, in the order of arrival."""
        waiting = sorted(
            (sequence for bucket in self._waiting for sequence in bucket), key=lambda sequence: sequence.arrival
        )
        return {
            "num_batches": self.num_batches,
            "arrivals": self._arrivals,
            "objective": self._objective,
            "waiting": [list(astuple(sequence)) for sequence in waiting],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Hold those that :meth:`state` told."""
        self.num_batches, self._arrivals, self._objective = (
            state[name] for name in ("num_batches", "arrivals", "objective")
        )
        sequences = [_Sequence(*row) for row in state["waiting"]]
        if sequences:
            lengths = np.array([sequence.length for sequence in sequences])
            self.problem.check_fits(lengths, np.array([sequence.id for sequence in sequences]))
            for sequence, bucket in zip(sequences, self.buckets.of(lengths).tolist()):
                self._waiting[bucket].append(sequence)

    def form(self, step: int, size: int, *, g_min: int, g_max: int, growth_cap: float, overdue: int) -> GlobalBatch:
        """One batch: groups by their share of the work, those of the oldest sequences first; then their counts."""
        groups = self._groups(size, overdue)
        buckets = list(groups)
        settings = [self._setting(bucket, size) for bucket in buckets]
        number = np.array([groups[bucket] for bucket in buckets])
        sizes = number * [setting.batch_size for setting in settings]
        once = int(sizes.sum())
        least = max(1, int(size / growth_cap / once))
        counts = accumulate(
            [setting.time_s for setting in settings],
            AccumulationRange(g_min=least, g_max=max(g_max, least)),
            devices=number * [setting.candidate.num_devices for setting in settings],
            sizes=sizes,
            max_size=max(int(growth_cap * size), least * once),
        )
        counts *= -(-g_min // int(counts.max()))  # DCP, appendix C
        taken: list[_Sequence] = []
        for bucket, wanted in zip(buckets, (counts * sizes).tolist()):
            waiting = self._waiting[bucket]
            taken += [waiting.popleft() for _ in range(min(wanted, len(waiting)))]
        taken.sort(key=lambda sequence: sequence.arrival)
        return GlobalBatch(
            step=step,
            ids=tuple(sequence.id for sequence in taken),
            lengths=tuple(sequence.length for sequence in taken),
            objective=self._objective,
            targets=None if taken[0].targets is None else tuple(sequence.targets or 0 for sequence in taken),
        )

    def _groups(self, size: int, overdue: int) -> dict[int, int]:
        """How many groups each bucket gets: first those whose oldest sequence is overdue, then by work (D'Hondt)."""
        present = sorted(
            (bucket for bucket, waiting in enumerate(self._waiting) if waiting),
            key=lambda bucket: self._waiting[bucket][0].arrival,
        )
        groups: dict[int, int] = {}
        left = self.problem.num_devices
        for bucket in present:
            devices = self._setting(bucket, size).candidate.num_devices
            if bucket == present[0] or (self._waiting[bucket][0].batch < overdue and devices <= left):
                groups[bucket] = 1
                left -= devices
        while True:
            open_to = {}
            for bucket in present:
                setting, num_groups = self._setting(bucket, size), groups.get(bucket, 0)
                waiting = len(self._waiting[bucket])
                if setting.candidate.num_devices <= left and num_groups * setting.batch_size < waiting:
                    open_to[bucket] = setting.time_s / setting.batch_size * waiting / (num_groups + 1)
            if not open_to:
                return groups
            bucket = max(open_to, key=lambda bucket: open_to[bucket])
            groups[bucket] = groups.get(bucket, 0) + 1
            left -= self._setting(bucket, size).candidate.num_devices

    def _setting(self, bucket: int, size: int) -> BucketSetting:
        """The bucket's best batch size and degree, where its share of a batch of the sampler limits the batch size."""
        if (bucket, size) not in self._settings:
            per_sequence = self.problem.overhead_per_sequence
            best: BucketSetting | None = None
            for degree in sorted({candidate.num_devices for candidate in self.candidates}):
                setting = fastest_setting(
                    int(self.buckets.edges[bucket]),
                    [candidate for candidate in self.candidates if candidate.num_devices == degree],
                    max_batch_size=max(1, size * degree // self.problem.num_devices),
                    overhead_per_sequence=per_sequence,
                )
                if setting is not None and (best is None or setting.device_s < best.device_s):
                    best = setting
            assert best is not None, "usable kinds hold the longest sequence of the run"
            self._settings[bucket, size] = best
        return self._settings[bucket, size]
