"""A lower bound on every plan of a search space: any strategy, heterogeneous or switched within the step, any packing.

Say a step takes T at most, U of it for its update, which takes at least u_k under scheme k. So its schemes are among
those with u_k <= U, and T - U is left for their micro-batches. This is asked for every U, the least answer counts.

A pipeline of S_k stages whose longest sequence takes x holds work of at most T - U - B_k x. Under 1F1B B_k is
the S_k - 1 backwards that nobody can fill (``lengthwise.core.one_f_one_b``), and where backwards are split only what of
these cannot wait. So a sequence of work w takes at least N_k w / (T - U - B_k w) of the cluster's N devices under the
scheme of N_k devices, and all sequences together, each under the scheme where that is least, must not take more than N.
Phases of a step only shorten what each has left. Where T - U does not suffice for a sequence alone, the scheme is out.
This is the certificate of ``plan.solve.shop`` with one price per device, whatever tiles them, and Hydraulis' Eq. (4)
with fractional counts where no scheme has several stages.

Every pipeline has the overhead of one micro-batch at least, though, and where it has few or small ones its stages wait:
``micro_batch_room`` says how much work R there is room for. So w takes N_k w / R as well, without a share of
the overhead. Per scheme the rule counts under which all sequences take more.

That lets every sequence pay for its own bubble alone. But the longest, of work m, runs on a pipeline of some scheme h
whose micro-batches come after it. With work W in these the pipeline ends no earlier than at (1 + B_h) m + W, nor than
at S'_h m + 2/3 W, where S'_h m is what the longest takes alone: only their forwards, a third at most, can run while
stages wait for its gradients, as backwards follow those of the longest on the first stage. Others take the room that
its pipeline has until T at N_h of the seconds by which it then ends later. So T is refuted if it is for every h.

Where passes hide a part of the update, u_k is what no pass can hide. What a pass hides is no longer than itself, so no
step takes less than an update that nothing hides, either: that of the scheme where it is least.

Pipelines of several stages are taken to issue their longest micro-batch first, as those of every policy but `auto` do,
and to recompute as many layers in all of their micro-batches. Where whole micro-batches come in any order, B_k is only
what a backward is longer than a forward (``least_stages_in_any_order``), and all that the longest waits for can hide W.
Where slices may come in any order, B_k is nothing, and all but the forwards of W, which come before the longest on the
first stage or behind it, can be hidden.

Work includes a sequence's share of the overhead of the fullest pack its scheme allows. Where micro-batches are cut into
slices, that of the longest has all n that the scheme has, and their overhead; others may have any number c up to n of
which the memory holds them. A pack that holds x tokens has c(x) slices at least, and at most the M(c) tokens that fit
in c. So each of its tokens bears at least r(x) = min c / M(c) slices' overhead, over c from c(x) to n. r grows with x,
so that others in the pack of the longest, y = M(n) - x tokens at most, bear y r(min(x, y)) of its n, and it the rest.
If others bear only 1 / M(n) of a slice for each token, which is no more, the longest bears all but y / M(n); if they
bear none, all of it. T is refuted if it is under any of these rules.

Where plans may recompute any number of layers between those of two candidates, these are in the bound, too: they are
taken to be as fast as the one of them that recomputes fewest, and cost what they cost at the lengths that only they
hold.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lengthwise.plan.bounds.micro_batch_room import MARGIN, MicroBatchRoom
from lengthwise.plan.bounds.step_sequences import SequenceCosts, StepSequences
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.finer_recompute import between, halfway, next_fewer, one_more
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

EXACT_TO = 512
"""Tokens up to which every length has its own entry."""
STEP = 1.005
"""Ratio of neighbouring entries beyond; a sequence counts as the one below."""
UPDATE_DIGITS = 3
"""Leading digits by which update times are told apart."""
BACKWARD_SHARE = 2 / 3
"""Of the work of any micro-batch, what its backward takes at least."""
RECOMPUTE_GROUPS = (3.0, 3.125, 3.5, 4.0, np.inf)
"""Forwards that a micro-batch takes as long as, up to which candidates of several stages are alike."""
LOOKED_AT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64)
"""Slices of packs whose most tokens are looked at; of a number in between, packs hold no more than of the next one."""


class SearchSpaceBound:
    """The lower bound of one search space, tabulated over lengths for schemes alike in devices, stages and update."""

    def __init__(
        self,
        problem: PlanningProblem,
        candidates: Sequence[Candidate],
        *,
        any_recompute: bool = False,
        in_any_order: bool = False,
        slices_in_any_order: bool = False,
    ) -> None:
        """Tabulate what candidates take.

        Args:
            problem: the cluster, and how pipelines are timed.
            candidates: the search space.
            any_recompute: plans also use candidates that recompute any number of layers between those of two.
            in_any_order: pipelines may issue the longest micro-batch at any place, if it is whole.
            slices_in_any_order: the same of slices; else they are taken to begin with the longest micro-batch.
        """
        self._problem, self._in_any_order, self._slices_in_any_order = problem, in_any_order, slices_in_any_order
        self._grid = _grid(min(max(candidate.max_tokens for candidate in candidates), problem.max_length))
        fewer_by_more = next_fewer(candidates) if any_recompute else {}
        groups: dict[_Alike, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(_alike(problem, candidate), []).append(candidate)
        self._updates_s = np.array([group.update_s for group in groups])
        self._wholes_s = np.array([min(_whole_update_s(problem, c) for c in members) for members in groups.values()])
        self._devices = np.array([group.num_devices for group in groups])
        is_late = [in_any_order and group.num_stages > 1 and group.slices == 1 for group in groups]
        is_cut_late = [slices_in_any_order and group.slices > 1 for group in groups]
        forwards = np.array([max(candidate.forwards for candidate in members) for members in groups.values()])
        self._shares = np.where(is_late, 0.0, np.where(is_cut_late, 1 / forwards, BACKWARD_SHARE))
        leanest = {more: one_more(fewer, more) for more, fewer in fewer_by_more.items()}
        every = [[k for c in members for k in (c, leanest.get(c)) if k] for members in groups.values()]
        later = [min(map(self._bounding_stages, ks)) - 1.0 for ks in every]
        self._room = MicroBatchRoom.of(every, later, has_overhead=not problem.overhead_per_sequence)
        shape = len(groups), len(self._grid)
        self._tables = SequenceCosts(*(np.full(shape, np.inf) for _ in SequenceCosts._fields))
        for row, members in enumerate(groups.values()):
            for candidate in members:
                self._add(candidate, row, self._columns(0, candidate.max_tokens), roomiest=candidate)
        rows = {candidate: row for row, members in enumerate(groups.values()) for candidate in members}
        for more, fewer in fewer_by_more.items():
            self._add_between(fewer, more, rows[more])

    def _columns(self, above: int, most: int) -> slice:
        """Entries of lengths above some tokens, up to others."""
        begin, end = np.searchsorted(self._grid, (above, most), side="right").tolist()
        return slice(begin, end)

    def _add(self, candidate: Candidate, row: int, columns: slice, *, roomiest: Candidate) -> None:
        """Lengths of ``columns`` in packs of up to as many tokens as ``roomiest`` holds."""
        for table, values in zip(self._tables, self._costs(candidate, columns, roomiest)):
            np.minimum(table[row, columns], values, out=table[row, columns])

    def _costs(self, candidate: Candidate, columns: slice, roomiest: Candidate) -> SequenceCosts:
        """What sequences of the lengths of some columns take, all [length]."""
        grid, num_slices = self._grid[columns], candidate.scheme.slices
        times_s = (candidate.in_slices(1) if num_slices > 1 else candidate).times_s(grid)
        stages, slice_s = self._bounding_stages(candidate), candidate.overhead_s / num_slices
        most_tokens = roomiest.max_tokens
        if self._problem.overhead_per_sequence:
            work_s = light_s = times_s + slice_s
            longest_s = work_s + (num_slices - 1) * slice_s
        else:
            left = np.maximum(most_tokens - grid, 0)
            work_s = times_s + slice_s * self._slices_of_token(roomiest, grid) * grid
            light_s = times_s + slice_s / most_tokens * grid
            others_s = slice_s * self._slices_of_token(roomiest, np.minimum(grid, left)) * left
            longest_s = times_s + candidate.overhead_s - others_s
        in_slices_s = candidate.times_s(grid) - times_s if num_slices > 1 else 0.0
        longest_s, light_longest_s = longest_s + in_slices_s, light_s + (num_slices - 1) * slice_s + in_slices_s
        alone_s, drained, devices = times_s + candidate.overhead_s, candidate.alone_stages, candidate.num_devices
        bare_longest_s, later_s = alone_s + in_slices_s, (stages - 1.0) * alone_s
        return SequenceCosts(
            alone_s=drained * alone_s,
            bubble_s=(stages - 1.0) * (times_s + slice_s),
            device_s=devices * work_s,
            least_s=longest_s + later_s,
            drained_s=drained * longest_s,
            light_device_s=devices * light_s,
            light_least_s=light_longest_s + later_s,
            light_drained_s=drained * light_longest_s,
            bare_device_s=devices * (work_s if self._problem.overhead_per_sequence else times_s),
            bare_least_s=bare_longest_s + later_s,
            bare_drained_s=drained * bare_longest_s,
            longest_s=bare_longest_s,
        )

    def _slices_of_token(self, candidate: Candidate, lengths: np.ndarray) -> np.ndarray:
        """Slices whose overhead a token bears at least that is in one pack with a sequence of each length."""
        num_slices, limits = candidate.scheme.slices, self._problem.once("most tokens in slices", dict)
        counts = [*(count for count in LOOKED_AT if count < num_slices), num_slices]
        for count in counts:
            if (candidate, count) not in limits:
                limits[candidate, count] = candidate.in_slices(count).max_tokens
        most_tokens = np.maximum.accumulate([max(1, limits[candidate, count]) for count in counts])
        fewest = np.array([1, *(count + 1 for count in counts[:-1])])
        of_token = np.minimum.accumulate((fewest / most_tokens)[::-1])[::-1]
        level = np.minimum(np.searchsorted(most_tokens, lengths), len(counts) - 1)
        bearing: np.ndarray = of_token[level]
        return bearing

    def _bounding_stages(self, candidate: Candidate) -> float:
        if self._slices_in_any_order and candidate.scheme.slices > 1:
            return 1.0
        return self._problem.bounding_stages(candidate, in_any_order=self._in_any_order)

    def _add_between(self, fewer: Candidate, more: Candidate, row: int) -> None:
        """Candidates that recompute more layers than one and fewer than the other.

        They are looked at where nothing in the tables is as fast as if they all recomputed but one layer more than
        ``fewer``: the one in the middle, and then each half.
        """
        leanest = one_more(fewer, more)
        if leanest is None:
            return
        beyond = self._columns(fewer.max_tokens, more.max_tokens)
        costs = self._costs(leanest, beyond, more)
        if all((table[row, beyond] <= values).all() for table, values in zip(self._tables, costs)):
            self._add(leanest, row, self._columns(0, fewer.max_tokens), roomiest=more)
            return
        middle = halfway(fewer, more)
        for candidate in between(fewer, more) if middle is None else (middle,):
            self._add(candidate, row, self._columns(0, candidate.max_tokens), roomiest=candidate)
        if middle is not None:
            self._add_between(fewer, middle, row)
            self._add_between(middle, more, row)

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches take at least, pipelines never filling or draining; the cheapest bound."""
        return self._sequences(priced.bounding_lengths).floor_s

    def __call__(self, priced: PricedBatch) -> float:
        """Seconds that the micro-batches of a step take at least."""
        return self._sequences(priced.bounding_lengths).bound_s()

    def of(self, lengths: np.ndarray) -> float:
        """Bound the seconds of sequences of ``lengths``, the longest like any other: lower, but faster to compute."""
        return self._sequences(lengths).even_bound_s()

    def step_s(self, priced: PricedBatch) -> float:
        """Seconds that the whole step takes at least, its update included."""
        levels, every = [], self._sequences(priced.bounding_lengths)
        for update_s in np.unique(every.updates_s).tolist():
            floor_s, whole_s = every.floor_under_s(update_s), float(self._wholes_s[self._updates_s <= update_s].min())
            levels.append((max(whole_s, update_s + floor_s), update_s, whole_s))
        least_s = np.inf
        for floor_s, update_s, whole_s in sorted(levels):
            if floor_s < least_s:
                bound_s = every.under(update_s).bound_s(least_s - update_s)
                least_s = min(least_s, max(whole_s, update_s + bound_s))
        return least_s

    def _at(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._grid, lengths, side="right") - 1

    def _sequences(self, lengths: np.ndarray) -> StepSequences:
        return self.sequences(lengths).without_dominated()

    def sequences(self, lengths: np.ndarray) -> StepSequences:
        """Sequences of ``lengths`` under all groups of schemes."""
        columns, counts = np.unique(self._at(lengths), return_counts=True)
        return StepSequences(
            num_devices=self._problem.num_devices,
            counts=counts.astype(np.float64),
            devices=self._devices,
            shares=self._shares,
            updates_s=self._updates_s,
            room=self._room,
            costs=SequenceCosts(*(table[:, columns] for table in self._tables)),
        )


class _Alike(NamedTuple):
    """What candidates of one group have in common."""

    num_devices: int
    num_stages: int
    slices: int
    is_split: bool
    most_forwards: float
    update_s: float


def _alike(problem: PlanningProblem, candidate: Candidate) -> _Alike:
    """The group of a candidate; those of several stages by how much they recompute."""
    scheme, is_plain = candidate.scheme, candidate.num_stages == 1 or candidate.scheme.slices > 1
    forwards = 0.0 if is_plain else min(limit for limit in RECOMPUTE_GROUPS if candidate.forwards <= limit)
    update_s = _update_s(problem, candidate)
    return _Alike(candidate.num_devices, candidate.num_stages, scheme.slices, scheme.zero_bubble, forwards, update_s)


def _update_s(problem: PlanningProblem, candidate: Candidate) -> float:
    """Seconds of an update under equal pipelines, rounded down; 0, which bounds all, where they do not tile."""
    if problem.num_devices % candidate.num_devices or candidate.update_s <= 0.0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(candidate.update_s)) + 1 - UPDATE_DIGITS)
    return float(min(candidate.update_s, np.floor(candidate.update_s / unit) * unit))


def _whole_update_s(problem: PlanningProblem, candidate: Candidate) -> float:
    """Seconds of an update that hides nothing under equal pipelines; 0, which bounds all, where they do not tile."""
    return 0.0 if problem.num_devices % candidate.num_devices else candidate.whole_update_s * (1 - MARGIN)


def _grid(longest: int) -> np.ndarray:
    exact = np.arange(1, min(longest, EXACT_TO) + 1)
    if longest <= EXACT_TO:
        return exact
    count = int(np.ceil(np.log(longest / EXACT_TO) / np.log(STEP))) + 1
    return np.unique(np.concatenate([exact, np.geomspace(EXACT_TO, longest, count).astype(np.int64)]))
