"""The planning problem: candidates a policy may use, the cluster they must tile, typical batches to prepare for."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.wording import bytes_in_words, needed_and_available
from lengthwise.data.size_buckets import SizeBuckets
from lengthwise.plan.solve.shop import Certificate, Machines, Objective, ShopSchedule, certify, schedule
from lengthwise.plan.space.candidate import Candidate, Family

Made = TypeVar("Made")
PRICED_STEPS = "priced steps"
"""The name under which searches for proposals share typical steps, until a policy is prepared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningProblem:
    """One model on one cluster under one cost model."""

    candidates: tuple[Candidate, ...]
    """The search space. A certified bound holds for all plans that use these schemes."""
    num_devices: int
    devices_per_node: int
    memory_bytes: int
    """Memory of one device; for messages only, the cost model knows the limit."""
    max_length: int
    """Longest sequence of the run, in tokens."""
    host_memory_bytes: int = 0
    """A device's share of the host's memory that plans may fill; for messages only, too."""
    samples: tuple[np.ndarray, ...] = ()
    """Lengths of typical global batches, which proposals and tuning look at."""
    batch_size: int | None = None
    """Sequences per micro-batch of `padded`; None: the fastest that fits."""
    one_shape: bool = False
    """Whether `padded` gives every micro-batch of a step the same shape."""
    lattice: SizeBuckets | None = None
    """Sizes that every micro-batch is filled up to; None: any size."""
    smoothing: float = 0.05
    """How much slower than the fastest a mix of methods may be that packs of like sizes share (ParaDySe's gamma)."""
    objective: Objective = Objective.FLOW_SHOP
    overhead_per_sequence: bool = False
    """Charge the overhead once per sequence, as Hydraulis' Eq. (1) reads, instead of once per micro-batch."""
    local_sequences: bool = False
    """Whether plans of `auto` may have sequences whole on one rank of a stage."""
    is_waited_for: bool = False
    """Whether training waits while a step is planned, so that `auto` searches no longer than it may gain."""
    searches: dict[str, Future[Any]] = field(init=False, default_factory=dict, repr=False)
    """Searches for proposals that other processes have begun, by the name of what strategies are made of."""
    _made: dict[str, object] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.candidates:
            raise InfeasibleError(
                f"no scheme fits a device of {bytes_in_words(self.memory_bytes)}", limit=self.memory_bytes, unit="bytes"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be prepared again."""
        return {**self.__dict__, "searches": {}, "_made": {}}

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """Return what ``make`` makes, kept under ``name``: policies share parts, and preparing takes seconds."""
        if name not in self._made:
            self._made[name] = make()
        return cast(Made, self._made[name])

    def forget(self, name: str) -> None:
        """Drop what is kept under ``name``, where nobody is to ask for it again."""
        self._made.pop(name, None)

    @property
    def cost(self) -> CostModel:
        """The cost model that prices every candidate."""
        return self.candidates[0].cost

    @cached_property
    def leanest(self) -> Candidate:
        """The candidate that fits the longest sequence."""
        return max(self.candidates, key=lambda candidate: candidate.max_tokens)

    @cached_property
    def families(self) -> dict[Family, tuple[Candidate, ...]]:
        """Candidates by family, which may stand in for one another, each from the most to the fewest tokens."""
        families: dict[Family, list[Candidate]] = {}
        for candidate in self.candidates:
            families.setdefault(candidate.family, []).append(candidate)
        return {family: tuple(sorted(members, key=lambda k: -k.max_tokens)) for family, members in families.items()}

    def bounding_stages(self, candidate: Candidate, *, in_any_order: bool = False) -> float:
        """The stages of a flow shop that ends no later than a pipeline of ``candidate`` with the same packs, the
        longest first or in any order.
        """
        if self.objective is not Objective.FLOW_SHOP:
            return candidate.num_stages
        return candidate.least_stages_in_any_order if in_any_order else candidate.least_stages

    def flow_stages(self, candidate: Candidate) -> float:
        """The stages of a flow shop that takes about as long as a pipeline of ``candidate``."""
        return candidate.flow_stages if self.objective is Objective.FLOW_SHOP else candidate.num_stages

    def check_fits(self, lengths: np.ndarray, ids: np.ndarray | None = None) -> None:
        """Raise ``InfeasibleError`` if some sequence fits under no scheme: number, limit and way out."""
        longest = int(np.argmax(lengths))
        if lengths[longest] > self.leanest.max_tokens:
            self.refuse(longest if ids is None else int(ids[longest]), int(lengths[longest]))

    def refuse(self, sequence: int, length: int) -> None:
        """Raise ``InfeasibleError`` for a sequence that is longer than ``leanest`` holds."""
        candidate = self.leanest
        raise InfeasibleError(
            f"sequence {sequence} ({length:,} tokens) {self.needs(candidate, length)} "
            f"Set {Setting.MAX_LENGTH}={candidate.max_tokens} or less with {Setting.OVER_LENGTH}=split"
            f"{'' if self.is_limited_by_settings(candidate, length) else self._leaner()}.",
            what=f"sequence {sequence}", value=length, limit=candidate.max_tokens, unit="tokens",
        )  # fmt: skip

    def needs(self, candidate: Candidate, num_tokens: int) -> str:
        """Why a micro-batch of ``num_tokens`` cannot run as ``candidate``."""
        if self.lattice is not None and num_tokens > self.lattice.sizes[-1]:
            largest = self.lattice.sizes[-1]
            return (
                f"exceeds the largest size that {Setting.SHAPES} gives micro-batches ({largest:,} tokens). "
                f"Leave {Setting.SHAPES} out if a device holds more."
            )
        if self.is_limited_by_settings(candidate, num_tokens):
            return (
                f"exceeds {Setting.MAX_TOKENS} ({candidate.token_limit:,} tokens per micro-batch). "
                f"Raise {Setting.MAX_TOKENS} if a device holds more."
            )
        if candidate.is_limited_by_host:
            needed, available = needed_and_available(candidate.host_bytes(num_tokens), self.host_memory_bytes)
            return (
                f"puts {needed} per device into host memory under the leanest scheme, {candidate.scheme.name}; a "
                f"device's share of the host has {available}. Raise {Setting.HOST_MEMORY_GIB} if there is more."
            )
        needed, available = needed_and_available(int(candidate.peak_bytes(np.asarray(num_tokens))), self.memory_bytes)
        return f"needs {needed} per device under the leanest scheme, {candidate.scheme.name}; a device has {available}."

    def is_limited_by_settings(self, candidate: Candidate, num_tokens: int) -> bool:
        """Whether settings, not memory, keep a micro-batch of ``candidate`` from having ``num_tokens``."""
        exceeds_sizes = self.lattice is not None and num_tokens > self.lattice.sizes[-1]
        return exceeds_sizes or (bool(candidate.token_limit) and candidate.max_tokens == candidate.token_limit)

    def _metp_holds_more(self) -> bool:
        """Whether all devices together hold a longer sequence by METP."""
        scheme = self.leanest.scheme
        metp = uniform_scheme(
            scheme.num_layers, degree=self.num_devices, method=Method.METP, recomputed=scheme.num_recomputed
        )
        with suppress(InputError):  # no costs for it
            return self.num_devices > 1 and replace(self.leanest, scheme=metp).max_tokens > self.leanest.max_tokens
        return False

    def _leaner(self) -> str:
        scheme = self.leanest.scheme
        ways = [] if all(scheme.recompute) else [f"{Setting.RECOMPUTE}=all"]
        if scheme.degree < self.num_devices:
            ways.append(f"a higher {Setting.MAX_DEGREE} (the pool reaches {scheme.degree})")
        if self._metp_holds_more():
            ways.append(f"{Setting.METHODS} with metp")
        return "".join(f", or {way}" for way in ways)


@dataclass(frozen=True, eq=False)
class PricedBatch:
    """A global batch with the times of its sequences under every candidate asked for, computed once each."""

    problem: PlanningProblem
    batch: GlobalBatch
    _times_s: dict[Candidate, np.ndarray] = field(default_factory=dict)
    _certificates: dict[Any, Certificate] = field(default_factory=dict)
    _schedules: dict[Any, ShopSchedule] = field(default_factory=dict)
    floors_s: dict[Candidate, float] = field(default_factory=dict)
    """Seconds that the batch takes at least on equal pipelines of a candidate, as far as that was asked for."""
    drafted_by_policy: dict[str, Any] = field(default_factory=dict)
    """Draft plans by policy, of those that have planned the batch: some policies are moves of others."""

    @cached_property
    def lengths(self) -> np.ndarray:
        """[num_sequences] length of each sequence, in tokens."""
        return np.asarray(self.batch.lengths, dtype=np.int64)

    def times_s(self, candidate: Candidate) -> np.ndarray:
        """[num_sequences] seconds per stage that each sequence adds to a micro-batch run as ``candidate``.

        With the overhead charged per sequence, it is in here.
        """
        if candidate not in self._times_s:
            extra = candidate.overhead_s if self.problem.overhead_per_sequence else 0.0
            self._times_s[candidate] = self._work_s(candidate) + extra
        return self._times_s[candidate]

    def _work_s(self, candidate: Candidate) -> np.ndarray:
        """Seconds of each sequence; of a unit those of ordinary sequences, but none less than of a shorter unit.

        Solvers take longer jobs for more work.
        """
        if self.batch.attention_lengths is None:
            return candidate.times_s(self.lengths)
        attention_lengths = np.asarray(self.batch.attention_lengths, dtype=np.int64)
        lengths, places = np.unique(self.lengths, return_inverse=True)
        most_s = np.zeros(len(lengths))
        np.maximum.at(most_s, places, candidate.times_s(attention_lengths) * (self.lengths / attention_lengths))
        each_s: np.ndarray = np.maximum.accumulate(most_s)[places]
        return each_s

    @cached_property
    def bounding_lengths(self) -> np.ndarray:
        """Lengths of sequences that are no more work than the batch's: units in whole pieces of ordinary sequences."""
        if self.batch.attention_lengths is None:
            return self.lengths
        attention_lengths = np.asarray(self.batch.attention_lengths, dtype=np.int64)
        return np.repeat(attention_lengths, self.lengths // attention_lengths)

    def part(self, positions: np.ndarray) -> "PricedBatch":
        """The sequences at ``positions`` as a batch of their own, with the times known so far."""
        indices = positions.tolist()
        attention_lengths = self.batch.attention_lengths
        part = GlobalBatch(
            step=self.batch.step,
            ids=tuple([self.batch.ids[i] for i in indices]),
            lengths=tuple([self.batch.lengths[i] for i in indices]),
            objective=self.batch.objective,
            targets=None if self.batch.targets is None else tuple([self.batch.targets[i] for i in indices]),
            attention_lengths=None if attention_lengths is None else tuple([attention_lengths[i] for i in indices]),
        )
        return PricedBatch(
            self.problem, part, {candidate: times_s[positions] for candidate, times_s in self._times_s.items()}
        )

    def certificate(self, work: np.ndarray, machines: Sequence[Machines]) -> Certificate:
        """What bounds every schedule on these machines, proven once: strategies may differ in what no sequence needs.

        Args:
            work: [K types, num_sequences] seconds of each sequence.
            machines: K types of machine.
        """
        key = (*machines, work.tobytes())
        if key not in self._certificates:
            self._certificates[key] = certify(work, self.lengths, machines, objective=self.problem.objective)
        return self._certificates[key]

    def scheduled(self, work: np.ndarray, machines: Sequence[Machines]) -> ShopSchedule:
        """The schedule on these machines, found once as :meth:`certificate`, which guides it, is proven once."""
        key = (*machines, work.tobytes())
        if key not in self._schedules:
            self._schedules[key] = schedule(
                work, self.lengths, machines, objective=self.problem.objective,
                certificate=self.certificate(work, machines),
            )  # fmt: skip
        return self._schedules[key]

    def overhead_s(self, candidate: Candidate) -> float:
        """Seconds per stage of a micro-batch before its first sequence."""
        return 0.0 if self.problem.overhead_per_sequence else candidate.overhead_s
