"""A method and a recompute flag per layer: the fastest mix that fits, exactly (ParaDySe's problem, Eq. 5 and 6).

All methods of a family share their layouts, so any layer may run any of them (an *option*: a method, recomputed or
not). Layers are alike, so only how many run which matters: minimise sum n_j t_j under sum n_j = L and sum n_j m_j <=
M. With n in fractions two options are mixed at most, neighbours on the lower hull of the points (m_j, t_j). In
integers a few layers of others may fill what rounding leaves: as many as their reduced costs allow, all of which are
tried. ParaDySe's own search exchanges options in a fixed order and keeps what it tried last; it is not reproduced.

Bytes and seconds come from a cost model, which need not be additive over layers: what is found is checked against it,
tightened until it fits, and improved layer by layer while it does.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import permutations

import numpy as np

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.space.candidate import Candidate, Family
from lengthwise.plan.space.problem import PlanningProblem

RUNG_RATIO = 2**0.2
"""Of neighbouring numbers of tokens for which mixes are made."""
MOST_COMBINATIONS = 1_000_000
"""Of layers that run neither of the two neighbours; beyond, those of the least reduced costs are tried."""
TIGHTENINGS = 8
ROUNDING = 1e-9


def best_counts(
    times_s: Sequence[float], num_bytes: Sequence[float], *, num_layers: int, budget_bytes: float
) -> np.ndarray | None:
    """How many layers run each option so that all of them take least time within the budget; None if none fits.

    Args:
        times_s: [J] seconds of a layer under each option.
        num_bytes: [J] bytes that a layer keeps under each option.
        num_layers: layers to distribute.
        budget_bytes: bytes that all layers may keep together.
    """
    times, sizes = np.asarray(times_s, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
    budget = budget_bytes * (1 + ROUNDING)
    useful = _useful(times, sizes)
    counts = np.zeros(len(times), dtype=np.int64)
    if sizes[useful[0]] * num_layers > budget:
        return None
    if sizes[useful[-1]] * num_layers <= budget:
        counts[useful[-1]] = num_layers
        return counts
    lean, fast = _neighbours(times[useful], sizes[useful], budget / num_layers)
    others = np.delete(useful, [lean, fast])
    lean, fast = useful[lean], useful[fast]
    slope = (times[fast] - times[lean]) / (sizes[fast] - sizes[lean])
    reduced = times[others] - times[lean] - slope * (sizes[others] - sizes[lean])
    upgraded = np.floor((budget - num_layers * sizes[lean]) / (sizes[fast] - sizes[lean]))
    relaxed = num_layers * times[lean] + slope * (budget - num_layers * sizes[lean])
    feasible_s = num_layers * times[lean] + upgraded * (times[fast] - times[lean])
    other_counts = _combinations(np.maximum(reduced, 0.0), feasible_s - relaxed, num_layers)
    rest = num_layers - other_counts.sum(axis=1)
    room = budget - other_counts @ sizes[others] - rest * sizes[lean]
    upgraded = np.clip(np.floor(room / (sizes[fast] - sizes[lean])), 0, rest)
    total = other_counts @ times[others] + rest * times[lean] + upgraded * (times[fast] - times[lean])
    fastest = int(np.where(room >= 0, total, np.inf).argmin())
    counts[others], counts[lean], counts[fast] = (
        other_counts[fastest],
        rest[fastest] - upgraded[fastest],
        upgraded[fastest],
    )
    return counts


def _useful(times: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Options that no other beats in both time and bytes: each faster and larger than the one before."""
    useful: list[int] = []
    for option in np.lexsort((times, sizes)).tolist():
        if not useful or times[option] < times[useful[-1]]:
            useful.append(option)
    return np.array(useful)


def _neighbours(times: np.ndarray, sizes: np.ndarray, mean_bytes: float) -> tuple[int, int]:
    """The two options whose mix takes least time at a mean size: neighbours on the lower hull of (bytes, seconds)."""
    hull: list[int] = []
    for option in range(len(times)):
        while len(hull) > 1:
            first, middle = hull[-2:]
            ahead = (times[option] - times[first]) * (sizes[middle] - sizes[first])
            if (times[middle] - times[first]) * (sizes[option] - sizes[first]) < ahead:
                break
            hull.pop()
        hull.append(option)
    corner = int(np.searchsorted(sizes[hull], mean_bytes, side="right"))
    return hull[corner - 1], hull[corner]


def _combinations(reduced: np.ndarray, gap: float, max_layers: int) -> np.ndarray:
    """[combinations, options] layers of each option, ``max_layers`` in all, whose reduced costs stay within the gap."""
    gap = max(gap, 0.0) * (1 + ROUNDING) + ROUNDING * float(reduced.max(initial=0.0))
    combinations, spent = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
    for cost in reduced.tolist():
        limit = int(min(max_layers, gap / cost)) if cost > 0 else max_layers
        counts = np.arange(limit + 1)
        combinations = np.column_stack([np.repeat(combinations, limit + 1, axis=0), np.tile(counts, len(combinations))])
        spent = (spent[:, None] + counts * cost).ravel()
        allowed = np.flatnonzero((spent <= gap) & (combinations.sum(axis=1) <= max_layers))
        if len(allowed) * (max_layers + 1) > MOST_COMBINATIONS:
            allowed = allowed[np.argsort(spent[allowed], kind="stable")[: MOST_COMBINATIONS // (max_layers + 1)]]
        combinations, spent = combinations[allowed], spent[allowed]
    return combinations


def options_of(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Kinds of one family and stage that run all layers alike: one per method, and one more that recomputes them all.

    Those with offload and tiles are not mixed with others.

    In the order in which they follow one another along the layers: methods together, so that they change least often.
    """
    order = {method: place for place, method in enumerate(Method)}
    uniform = [
        candidate
        for candidate in candidates
        if len(set(candidate.scheme.methods)) == 1
        and len(set(candidate.scheme.recompute)) == 1
        and candidate.num_stages == 1
        and candidate.scheme.is_plain
    ]
    return tuple(
        sorted(uniform, key=lambda candidate: (order[candidate.scheme.methods[0]], candidate.scheme.recompute[0]))
    )


class LayerAssigner:
    """Finds mixes of the options of one family."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """For the options among ``candidates``, all of one family, of one stage."""
        self.options = options_of(candidates)
        assert len({candidate.family for candidate in self.options}) == 1, "options of one family can be mixed"
        places = range(len(self.options))
        self._counts = {
            option: tuple(self.num_layers * (place == other) for other in places)
            for place, option in enumerate(self.options)
        }
        self._mixes = {counts: option for option, counts in self._counts.items()}

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.options[0].scheme.num_layers

    @cached_property
    def _budget_bytes(self) -> float:
        """What the cost model lets a device hold, as far as options without a limit of the user's show it."""
        return max(self._bytes(candidate, self._holds(candidate)) for candidate in self.options)

    def assign(self, num_tokens: int) -> Candidate:
        """The fastest mix that holds a pack of one sequence of ``num_tokens``.

        Raises:
            InfeasibleError: not even the leanest option holds it.
        """
        leanest = max(self.options, key=lambda candidate: candidate.max_tokens)
        if num_tokens > leanest.max_tokens:
            raise InfeasibleError(
                f"a pack of {num_tokens:,} tokens fits under no mix of methods; the leanest, {leanest.scheme.name}, "
                f"holds {leanest.max_tokens:,}. Raise {Setting.MAX_DEGREE} or set {Setting.MAX_LENGTH}.",
                what="a pack", value=num_tokens, limit=leanest.max_tokens, unit="tokens",
            )  # fmt: skip
        pack_lengths = np.array([num_tokens])
        times_s = np.array([self._time_s(candidate, pack_lengths) / self.num_layers for candidate in self.options])
        layer_bytes, fixed_bytes = self._parts(num_tokens)
        best_mix, budget_bytes = leanest, self._budget_bytes
        for _ in range(TIGHTENINGS):
            counts = self._counts_within(times_s, layer_bytes, fixed_bytes, budget_bytes=budget_bytes)
            if counts is None:
                break
            mix = self.mix(counts.tolist())
            if self._fits(mix, num_tokens):
                best_mix = mix
                break
            excess = self._bytes(mix, num_tokens) - self._budget_bytes
            budget_bytes -= max(excess, self._budget_bytes * 2.0**-10)
        return self._improve(best_mix, num_tokens, pack_lengths)

    def _parts(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """[J] bytes that a layer of each option keeps, up to a constant, and what is there once if any layer runs it.

        The second is the model state and what the largest layer works in. They are told apart by exchanging all layers
        but one of an option with one of the first option's, which leaves the second as it is.
        """
        peaks = np.array([self._bytes(candidate, num_tokens) for candidate in self.options])
        if self.num_layers < 3:
            return peaks / self.num_layers, np.zeros(len(peaks))
        layer_bytes = np.zeros(len(peaks))
        for option in range(1, len(peaks)):
            few, many = (
                [number * (option == other) + (self.num_layers - number) * (other == 0) for other in range(len(peaks))]
                for number in (1, self.num_layers - 1)
            )
            more_bytes = self._bytes(self.mix(many), num_tokens) - self._bytes(self.mix(few), num_tokens)
            layer_bytes[option] = more_bytes / (self.num_layers - 2)
        layer_bytes -= layer_bytes.min()
        return layer_bytes, peaks - self.num_layers * layer_bytes

    def _counts_within(
        self, times_s: np.ndarray, layer_bytes: np.ndarray, fixed_bytes: np.ndarray, *, budget_bytes: float
    ) -> np.ndarray | None:
        """The best counts, whichever option of those used has the largest fixed part."""
        best, best_s = None, np.inf
        for largest in np.unique(fixed_bytes):
            allowed = np.flatnonzero(fixed_bytes <= largest)
            if self.num_layers * times_s[allowed].min() >= best_s or largest > budget_bytes:
                continue
            counts = best_counts(
                times_s[allowed].tolist(),
                layer_bytes[allowed].tolist(),
                num_layers=self.num_layers,
                budget_bytes=budget_bytes - float(largest),
            )
            if counts is not None and (counts_s := float(times_s[allowed] @ counts)) < best_s:
                best, best_s = np.zeros(len(times_s), dtype=np.int64), counts_s
                best[allowed] = counts
        return best

    def mix(self, counts: Sequence[int]) -> Candidate:
        """So many layers of each option, one after the other."""
        key = tuple(counts)
        if key not in self._mixes:
            first = self.options[0]
            scheme = PipelineConfig(
                degree=first.scheme.degree,
                stage_layers=first.scheme.stage_layers,
                methods=tuple(
                    candidate.scheme.methods[0] for candidate, count in zip(self.options, counts) for _ in range(count)
                ),
                recompute=tuple(
                    candidate.scheme.recompute[0]
                    for candidate, count in zip(self.options, counts)
                    for _ in range(count)
                ),
                weights=first.scheme.weights,
                shard_gradients=first.scheme.shard_gradients,
                zero_bubble=first.scheme.zero_bubble,
            )
            self._mixes[key] = Candidate(
                scheme=scheme,
                cost=first.cost,
                num_cluster_devices=first.num_cluster_devices,
                token_limit=first.token_limit,
                sizes=first.sizes,
            )
            self._counts[self._mixes[key]] = key
        return self._mixes[key]

    def mixes(self) -> tuple[Candidate, ...]:
        """The mixes, options left out, that are the fastest at some number of tokens; from the fewest tokens.

        Numbers of tokens rise by ``RUNG_RATIO``, from the most that every useful option holds.
        """
        useful = RecomputeLadder(self.options)
        low, high = int(useful.limits[0]), useful.max_tokens
        steps = int(np.ceil(np.log(high / low) / np.log(RUNG_RATIO)))
        rungs = np.unique(np.geomspace(low, high, steps + 1).astype(np.int64)).tolist()
        mixes = dict.fromkeys(self.assign(rung) for rung in rungs if rung <= high)
        return tuple(candidate for candidate in mixes if candidate not in self.options)

    def _improve(self, candidate: Candidate, num_tokens: int, lengths: np.ndarray) -> Candidate:
        """Move single layers to faster options, the largest gain first, while the pack fits and takes less time.

        Only where a layer's bytes, beyond those of the mix so far, leave it within what a device holds.
        """
        alone_s = [self._time_s(option, lengths) for option in self.options]
        alone_bytes = [self._bytes(option, num_tokens) for option in self.options]
        faster = sorted(
            (alone_s[new] - alone_s[old], old, new)
            for old, new in permutations(range(len(self.options)), 2)
            if alone_s[new] < alone_s[old]
        )
        moved = True
        while moved:
            moved, counts = False, self._counts[candidate]
            now_s, room = self._time_s(candidate, lengths), self._budget_bytes - self._bytes(candidate, num_tokens)
            for _, old, new in faster:
                if not counts[old] or (alone_bytes[new] - alone_bytes[old]) / self.num_layers > room:
                    continue
                mix = self.mix([count + (place == new) - (place == old) for place, count in enumerate(counts)])
                if self._fits(mix, num_tokens) and self._time_s(mix, lengths) < now_s:
                    candidate, moved = mix, True
                    break
        return candidate

    def _time_s(self, candidate: Candidate, lengths: np.ndarray) -> float:
        return float(candidate.times_s(lengths).sum()) + candidate.overhead_s

    def _fits(self, candidate: Candidate, num_tokens: int) -> bool:
        # Bytes are cheaper to ask for than the most tokens, which decide.
        return (
            self._bytes(candidate, num_tokens) <= self._budget_bytes * (1 + ROUNDING)
            and candidate.max_tokens >= num_tokens
        )

    def _bytes(self, candidate: Candidate, num_tokens: int) -> float:
        return float(candidate.peak_bytes(np.array(num_tokens)))

    def _holds(self, candidate: Candidate) -> int:
        return candidate.cost.max_tokens(candidate.scheme, num_devices=candidate.num_cluster_devices)


def mixed_candidates(problem: PlanningProblem) -> tuple[Candidate, ...]:
    """The mixes that :class:`LayerAssigner` makes of every family of one stage, without those in the search space.

    With these added the search space is closed: policies choose among finitely many candidates, and bounds hold for
    all of them.
    """
    present = {_contents(candidate) for candidate in problem.candidates}
    mixed: list[Candidate] = []
    for candidates in problem.families.values():
        if len(options_of(candidates)) > 1:
            mixed += [mix for mix in LayerAssigner(candidates).mixes() if _contents(mix) not in present]
    return tuple(mixed)


def _contents(candidate: Candidate) -> tuple[Family, frozenset[tuple[tuple[Method, bool], int]]]:
    return candidate.family, frozenset(Counter(zip(candidate.scheme.methods, candidate.scheme.recompute)).items())


def steady_choices(times_s: np.ndarray, *, ratio: float) -> list[int]:
    """A choice for each of some sizes in turn, in the fewest runs of one choice that stay near the fastest.

    A run goes on for as long as one choice is within ``ratio`` of the fastest at all its sizes; it has the one of the
    least time over them. ParaDySe keeps what the last input had, which depends on the order of inputs; a choice by size
    alone is the same in any order, ahead of training and after a resume.

    Args:
        times_s: [choices, sizes] seconds; inf where a size does not fit.
        ratio: how much slower than the fastest a choice may be (ParaDySe's gamma).
    """
    near = times_s <= (1 + ratio) * times_s.min(axis=0)
    choices: list[int] = []
    while (first := len(choices)) < near.shape[1]:
        shared, end = near[:, first], first + 1
        while end < near.shape[1] and (shared & near[:, end]).any():
            shared, end = shared & near[:, end], end + 1
        run_s = np.where(shared, times_s[:, first:end].sum(axis=1), np.inf)
        choices += [int(run_s.argmin())] * (end - first)
    return choices
