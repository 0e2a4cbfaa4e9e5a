"""A lower bound on every plan of a search space: any strategy, heterogeneous or switched within the step, any packing.

Say a step takes T at most, U of it for its update, which takes at least u_k under scheme k. So its schemes are among
those with u_k <= U, and T - U is left for their micro-batches. This is asked for every U, the least answer counts.

A pipeline of S_k stages whose longest sequence takes x holds work of at most T - U - B_k x. Under 1F1B B_k is
the S_k - 1 backwards that nobody can fill (``lengthwise.core.one_f_one_b``), and where backwards are split only what of
these cannot wait. So a sequence of work w takes at least
N_k w / (T - U - B_k w) of the cluster's N devices under the scheme of N_k devices, and all sequences together, each
under the scheme where that is least, must not take more than N. Phases of a step only shorten what each has left. Where
T - U does not suffice for a sequence alone, the scheme is out. This is the certificate of ``plan.solve.shop`` with one
price per device, whatever tiles them, and Hydraulis' Eq. (4) with fractional counts where no scheme has several stages.

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

Work includes a sequence's share of the overhead of the fullest pack its scheme allows. Where micro-batches are cut into
slices, that of the longest has all n that the scheme has, and their overhead; others may have any number c up to n of
which the memory holds them. A pack that holds x tokens has c(x) slices at least, and at most the M(c) tokens that fit
in c. So each of its tokens bears at least r(x) = min c / M(c) slices' overhead, over c from c(x) to n. r grows with x,
so that others in the pack of the longest, y = M(n) - x tokens at most, bear y r(min(x, y)) of its n, and it the rest.
If others bear only 1 / M(n) of a slice for each token, which is no more, the longest bears all but y / M(n). T is
refuted if it is under either rule.

Where plans may recompute any number of layers between those of two candidates, these are in the bound, too: they are
taken to be no faster than both candidates, and cost what they cost at the lengths that only they hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.finer_recompute import between, halfway, next_fewer
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

EXACT_TO = 512
"""Tokens up to which every length has its own entry."""
STEP = 1.005
"""Ratio of neighbouring entries beyond; a sequence counts as the one below."""
UPDATE_DIGITS = 3
"""Leading digits by which update times are told apart."""
TOLERANCE = 1e-4
"""Relative width at which the search for the largest refuted time ends."""
TABLES = (
    "device_s", "alone_s", "bubble_s", "least_s", "drained_s", "light_device_s", "light_least_s", "light_drained_s",
)  # fmt: skip
"""Of ``_Sequences``, over groups of schemes and lengths."""
LIGHT = "", "light_"
"""How tables begin that tell what the longest and others beside it take: of what each bears of overhead, two rules."""
BACKWARD_SHARE = 2 / 3
"""Of the work of any micro-batch, what its backward takes at least."""
MARGIN = 1e-9
"""Relative margin of sums of floats, on the side that keeps the bound valid."""
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
    ) -> None:
        """Tabulate what candidates take.

        Args:
            problem: the cluster, and how pipelines are timed.
            candidates: the search space.
            any_recompute: plans also use candidates that recompute any number of layers between those of two.
            in_any_order: pipelines may issue the longest micro-batch at any place.
        """
        self._problem, self._in_any_order = problem, in_any_order
        self._grid = _grid(min(max(candidate.max_tokens for candidate in candidates), problem.max_length))
        groups: dict[tuple[int, int, int, float], list[Candidate]] = {}
        for candidate in candidates:
            key = candidate.num_devices, candidate.num_stages, candidate.scheme.slices, _update_s(problem, candidate)
            groups.setdefault(key, []).append(candidate)
        self._updates_s = np.array([update_s for *_, update_s in groups])
        self._wholes_s = np.array([min(_whole_update_s(problem, c) for c in members) for members in groups.values()])
        self._devices = np.array([devices for devices, *_ in groups])
        is_late = [in_any_order and stages > 1 and slices == 1 for _, stages, slices, _ in groups]
        self._shares = np.where(is_late, 0.0, BACKWARD_SHARE)
        shape = len(groups), len(self._grid)
        self._tables = tuple(np.full(shape, np.inf) for _ in TABLES)
        for row, members in enumerate(groups.values()):
            for candidate in members:
                self._add(candidate, row, self._columns(0, candidate.max_tokens), roomiest=candidate)
        if any_recompute:
            rows = {candidate: row for row, members in enumerate(groups.values()) for candidate in members}
            for more, fewer in next_fewer(candidates).items():
                self._add_between(fewer, more, rows[fewer])

    def _columns(self, above: int, most: int) -> slice:
        """Entries of lengths above some tokens, up to others."""
        begin, end = np.searchsorted(self._grid, (above, most), side="right").tolist()
        return slice(begin, end)

    def _add(self, candidate: Candidate, row: int, columns: slice, *, roomiest: Candidate) -> None:
        """Lengths of ``columns`` in packs of up to as many tokens as ``roomiest`` holds."""
        for table, values in zip(self._tables, self._costs(candidate, columns, roomiest)):
            np.minimum(table[row, columns], values, out=table[row, columns])

    def _costs(self, candidate: Candidate, columns: slice, roomiest: Candidate) -> tuple[np.ndarray, ...]:
        """What ``_Sequences`` calls by the names of ``TABLES``, in their order."""
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
        with_light_s = light_s + (num_slices - 1) * slice_s
        alone_s, bubble_s = times_s + candidate.overhead_s, (stages - 1.0) * (times_s + slice_s)
        later_s, drained, devices = (stages - 1.0) * alone_s, candidate.alone_stages, candidate.num_devices
        shared = devices * work_s, drained * alone_s, bubble_s, longest_s + later_s, drained * longest_s
        return *shared, devices * light_s, with_light_s + later_s, drained * with_light_s

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
        return self._problem.bounding_stages(candidate, in_any_order=self._in_any_order)

    def _add_between(self, fewer: Candidate, more: Candidate, row: int) -> None:
        """Candidates that recompute more layers than one and fewer than the other.

        They are looked at where nothing in the tables is as fast as if they recomputed as few layers as ``fewer``: the
        one in the middle, and then each half.
        """
        beyond = self._columns(fewer.max_tokens, more.max_tokens)
        costs = self._costs(fewer, beyond, more)
        if all((table[row, beyond] <= values).all() for table, values in zip(self._tables, costs)):
            self._add(fewer, row, self._columns(0, fewer.max_tokens), roomiest=more)
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
        for update_s in np.unique(self._updates_s).tolist():
            allowed = self._updates_s <= update_s
            sequences, whole_s = every.under(allowed), float(self._wholes_s[allowed].min())
            if sequences.floor_s < np.inf:
                levels.append((max(whole_s, update_s + sequences.floor_s), update_s, whole_s, sequences))
        least_s = np.inf
        for floor_s, update_s, whole_s, sequences in sorted(levels, key=lambda level: level[:2]):
            if floor_s < least_s:
                least_s = min(least_s, max(whole_s, update_s + sequences.bound_s(least_s - update_s)))
        return least_s

    def _at(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._grid, lengths, side="right") - 1

    def _sequences(self, lengths: np.ndarray) -> "_Sequences":
        columns, counts = np.unique(self._at(lengths), return_counts=True)
        return _Sequences(
            num_devices=self._problem.num_devices,
            counts=counts.astype(np.float64),
            devices=self._devices,
            shares=self._shares,
            **{name: table[:, columns] for name, table in zip(TABLES, self._tables)},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sequences:
    """The sequences of a step in C classes of length under G groups of schemes; the longest comes last."""

    num_devices: int
    counts: np.ndarray
    """[C]"""
    devices: np.ndarray
    """[G] of a pipeline."""
    shares: np.ndarray
    """[G] of the work of others on the longest one's pipeline, what none of its waits can hide at least."""
    device_s: np.ndarray
    """[G, C] device-seconds per stage, with a share of the overhead; inf where it does not fit."""
    alone_s: np.ndarray
    """[G, C] seconds of a pipeline with one micro-batch, of this sequence."""
    bubble_s: np.ndarray
    """[G, C] seconds that a pipeline whose longest it is idles at least."""
    least_s: np.ndarray
    """[G, C] seconds of a pipeline whose longest it is, to which the work of others comes."""
    drained_s: np.ndarray
    """[G, C] seconds of such a pipeline to which the backwards of others come, their forwards in its waits."""
    light_device_s: np.ndarray
    """[G, C] ``device_s`` beside the longest, if that bears more of its pack's overhead."""
    light_least_s: np.ndarray
    """[G, C] ``least_s`` if the longest bears more."""
    light_drained_s: np.ndarray
    """[G, C] ``drained_s`` if the longest bears more."""
    _least_by_time: dict[float, np.ndarray] = field(init=False, default_factory=dict, repr=False)

    def under(self, groups: np.ndarray) -> "_Sequences":
        """The sequences under some groups of schemes alone, given as a mask [G]."""
        tables = {name: getattr(self, name)[groups] for name in ("devices", "shares", *TABLES)}
        return _Sequences(num_devices=self.num_devices, counts=self.counts, **tables)

    @cached_property
    def _needed_s(self) -> np.ndarray:
        """[G, C] seconds below which there is no time for a sequence."""
        return self.alone_s * (1 - MARGIN)

    @cached_property
    def floor_s(self) -> float:
        """Seconds as if pipelines never filled or drained, and of the sequence that takes longest alone."""
        even_s = float(self.device_s.min(axis=0) @ self.counts) / self.num_devices
        return max(even_s, float(self.alone_s.min(axis=0).max())) * (1 - MARGIN)

    def even_bound_s(self, limit_s: float = np.inf) -> float:
        """The largest refuted time, each sequence paying for its own bubble; ``limit_s`` if that is refuted."""
        return _largest_refuted_s(lambda time_s: self._even_devices(time_s) > self._most_devices, self.floor_s, limit_s)

    def bound_s(self, limit_s: float = np.inf) -> float:
        """The largest refuted time if no other sequence uses the bubble of the longest; ``limit_s`` if that is."""
        even_s, best_s = self.even_bound_s(limit_s), limit_s
        hosts = np.flatnonzero(np.isfinite(self.alone_s[:, -1])).tolist()
        for host in hosts:
            low_s = max(even_s, float(self.alone_s[host, -1]) * (1 - MARGIN))

            def is_refuted(time_s: float, host: int = host) -> bool:
                return any(self._hosted_devices(time_s, host, light) > self._most_devices for light in LIGHT)

            if low_s < best_s:
                best_s = _largest_refuted_s(is_refuted, low_s, best_s)
        return best_s

    @property
    def _most_devices(self) -> float:
        return self.num_devices * (1 + MARGIN)

    def _least_devices(self, time_s: float) -> np.ndarray:
        """[C] devices that a sequence of each length takes at least; inf where there is no time for it."""
        if time_s not in self._least_by_time:
            with np.errstate(divide="ignore", invalid="ignore"):
                devices = np.where(time_s >= self._needed_s, self.device_s / (time_s - self.bubble_s), np.inf)
            self._least_by_time[time_s] = devices.min(axis=0)
        return self._least_by_time[time_s]

    def _even_devices(self, time_s: float) -> float:
        return float(self._least_devices(time_s) @ self.counts)

    def _hosted_devices(self, time_s: float, host: int, light: str) -> float:
        """Devices that all sequences take at least if the longest runs on a pipeline of group ``host``.

        What shares its pipeline saves most per second of its room: a fractional knapsack. Room is cheaper as long as
        others have forwards for what the longest waits for.
        """
        drained_s, least_s = (float(getattr(self, f"{light}{name}")[host, -1]) for name in ("drained_s", "least_s"))
        num_devices, share = float(self.devices[host]), float(self.shares[host])
        cheap_s = max(0.0, drained_s - least_s) / (1 - share)
        until_s = max(0.0, time_s - drained_s) / share if share else np.inf
        room_s = np.array([min(cheap_s, until_s), max(0.0, time_s - least_s)])
        room_s[1] = room_s[1] if room_s[1] > cheap_s else room_s[0]
        elsewhere = np.minimum(self._least_devices(time_s), 2.0 * self.num_devices)
        others = self.counts - (np.arange(len(self.counts)) == len(self.counts) - 1)
        beside = getattr(self, f"{light}device_s")[host] / time_s
        total = float(elsewhere @ others) + num_devices * max(drained_s, least_s) / time_s
        fitting = np.isfinite(beside) & (others > 0) & (elsewhere > share * beside)
        elsewhere, beside, others = elsewhere[fitting], beside[fitting], others[fitting]
        needed_s = beside * others * time_s / num_devices
        order = np.argsort(-elsewhere / beside, kind="stable")
        ends_s = np.cumsum(needed_s[order])
        parts = np.clip((room_s[:, None] - ends_s) / needed_s[order] + 1, 0.0, 1.0)
        prices = np.array([[share], [1.0]]) * beside[order]
        saved = np.maximum(0.0, elsewhere[order] - prices) * others[order]
        return total - float((saved * np.diff(parts, axis=0, prepend=0.0)).sum())


def _largest_refuted_s(is_refuted: Callable[[float], bool], low_s: float, limit_s: float) -> float:
    """About the largest time that is refuted, or ``low_s`` if that is not; ``limit_s`` if that is, or is lower."""
    if limit_s <= low_s or (limit_s < np.inf and is_refuted(limit_s)):
        return limit_s
    if not is_refuted(low_s):
        return low_s
    high_s = limit_s
    while high_s == np.inf:
        low_s, high_s = (2 * low_s, np.inf) if is_refuted(2 * low_s) else (low_s, 2 * low_s)
    while high_s > low_s * (1 + TOLERANCE):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if is_refuted(middle_s) else (low_s, middle_s)
    return low_s


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
