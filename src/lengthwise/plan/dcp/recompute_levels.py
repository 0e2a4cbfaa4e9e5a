"""The fewest recomputed layers that fit: DCP-intra. A ladder of candidates answers for packs, a setting for one bucket.

Recomputing r layers costs r t_f seconds and frees r m bytes per device (Eq. 5 and 6), so a pack runs fastest with the
smallest r at which it fits. Algorithm 1 as printed looks for that r but keeps the first it tries, and compares times of
micro-batches of different size, where one sequence on all devices always wins. Here a setting (b, p, r) has the
greatest throughput b s / (p T(b, p, r)) of Eq. (1), with the smallest r that fits (b, p).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.finer_recompute import between, next_fewer
from lengthwise.plan.space.problem import PricedBatch

COMPARED_LENGTHS = 32
"""Lengths, from one token to the most that fit, at which a candidate must be no slower than another to replace it."""


class RecomputeLadder:
    """Kinds that can stand in for one another, pack by pack; those that are never of use are left out.

    A candidate is of no use if another holds as many tokens and is as fast at every length. Kinds that differ in their
    recomputed layers alone form a chain: the more tokens, the slower. Kinds of several methods need not.
    """

    candidates: tuple[Candidate, ...]
    """From the fewest to the most tokens."""
    limits: np.ndarray
    """Most tokens of each."""
    is_chain: bool
    """Whether each is at least as fast as the next at every length."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        family = tuple(candidates)
        longest = max(candidate.max_tokens for candidate in family)
        grid = np.unique(np.geomspace(1, longest, COMPARED_LENGTHS).astype(np.int64))
        # Overheads are compared apart from what tokens add: who wins in both wins in every pack.
        costs = {candidate: np.append(candidate.times_s(grid), candidate.overhead_s) for candidate in family}
        useful: list[Candidate] = []
        for candidate in sorted(family, key=lambda candidate: (-candidate.max_tokens, float(costs[candidate].sum()))):
            if not any((costs[roomier] <= costs[candidate]).all() for roomier in useful):
                useful.append(candidate)
        self.candidates = tuple(reversed(useful))
        self._next_fewer = next_fewer(family)
        self._finer: dict[Candidate, tuple[tuple[Candidate, ...], np.ndarray]] = {}
        self.limits = np.array([candidate.max_tokens for candidate in self.candidates])
        self.is_chain = all(
            (costs[fast] <= costs[slow]).all() for fast, slow in zip(self.candidates, self.candidates[1:])
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of a pack."""
        return int(self.limits[-1])

    def indices(self, num_tokens: np.ndarray) -> np.ndarray:
        """The index of the fastest candidate that holds each number of tokens, priced as one sequence of that length.

        In a chain it is the fastest for any lengths. O(log candidates) each in a chain, else O(candidates).

        Raises:
            InfeasibleError: some number of tokens fits under none.
        """
        tokens = np.asarray(num_tokens)
        if tokens.size and tokens.max() > self.max_tokens:
            raise InfeasibleError(
                f"a micro-batch of {int(tokens.max()):,} tokens fits under none of {len(self.candidates)} schemes; the "
                f"leanest, {self.candidates[-1].scheme.name}, holds {self.max_tokens:,}. Lower {Setting.MAX_LENGTH}.",
                what="a micro-batch", value=int(tokens.max()), limit=self.max_tokens, unit="tokens",
            )  # fmt: skip
        if self.is_chain:
            return np.searchsorted(self.limits, tokens)
        times_s = np.stack([candidate.times_s(tokens) + candidate.overhead_s for candidate in self.candidates])
        times_s[tokens > self.limits.reshape(-1, *[1] * tokens.ndim)] = np.inf
        return times_s.argmin(axis=0)

    def runs(self, priced: PricedBatch, packs: Sequence[Sequence[int]]) -> tuple[Candidate, ...]:
        """The fastest candidate that holds each pack, priced exactly; it recomputes the fewest layers that it can.

        Args:
            priced: the batch.
            packs: positions of each pack's sequences in it.

        Raises:
            InfeasibleError: some pack fits under none.
        """
        if not packs:
            return ()
        flat = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
        starts = np.cumsum([0, *map(len, packs)])[:-1]
        tokens = np.add.reduceat(priced.lengths[flat], starts)
        if self.is_chain or len(self.candidates) == 1:
            return self._with_fewest(self.indices(tokens).tolist(), tokens)
        self.indices(tokens.max())  # refuses what fits nowhere
        times_s = np.stack(
            [
                np.add.reduceat(priced.times_s(candidate)[flat], starts) + priced.overhead_s(candidate)
                for candidate in self.candidates
            ]
        )
        times_s[tokens > self.limits[:, None]] = np.inf
        return self._with_fewest(times_s.argmin(axis=0).tolist(), tokens)

    def _with_fewest(self, levels: Sequence[int], tokens: np.ndarray) -> tuple[Candidate, ...]:
        """The candidate of each level, or the one that recomputes the fewest layers and holds so many tokens."""
        runs = [self.candidates[level] for level in levels]
        for number, (run, num_tokens) in enumerate(zip(runs, tokens.tolist())):
            if run in self._next_fewer:
                finer, limits = self._finer_of(run)
                first = int(np.searchsorted(limits, num_tokens))
                runs[number] = finer[first] if first < len(finer) else run
        return tuple(runs)

    def _finer_of(self, candidate: Candidate) -> tuple[tuple[Candidate, ...], np.ndarray]:
        """Candidates with fewer layers recomputed than this and more than the next, and the most tokens of each."""
        if candidate not in self._finer:
            finer = between(self._next_fewer[candidate], candidate)
            self._finer[candidate] = finer, np.array([level.max_tokens for level in finer])
        return self._finer[candidate]


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSetting:
    """How micro-batches of sequences of one length run: b sequences as one candidate, which fixes p and r."""

    candidate: Candidate
    batch_size: int
    """Most sequences of a micro-batch."""
    time_s: float
    """Seconds of a micro-batch of that many."""

    @property
    def device_s(self) -> float:
        """Device-seconds per sequence: the length over the throughput of Eq. (1)."""
        return self.candidate.num_devices * self.time_s / self.batch_size


def fastest_setting(
    length: int,
    candidates: Iterable[Candidate],
    *,
    max_batch_size: int | None = None,
    overhead_per_sequence: bool = False,
) -> BucketSetting | None:
    """Algorithm 1, corrected: the setting of the greatest throughput for sequences of ``length``, if any fits.

    Times are separable, so under one candidate throughput grows with b: only the most sequences that fit need trying,
    and the candidate of the best setting is then the fastest that fits its (b, p). Ties take fewer devices.

    Args:
        length: tokens of each sequence.
        candidates: what they may run as, of one stage.
        max_batch_size: sequences there are, if that limits a micro-batch.
        overhead_per_sequence: charge the overhead to each sequence of a micro-batch.
    """
    best: BucketSetting | None = None
    for candidate in candidates:
        fitting = candidate.max_tokens // length
        batch_size = fitting if max_batch_size is None else min(fitting, max(1, max_batch_size))
        if batch_size < 1:
            continue
        overheads_s = candidate.overhead_s * (batch_size if overhead_per_sequence else 1)
        time_s = float(candidate.times_s(np.array([length]))[0]) * batch_size + overheads_s
        setting = BucketSetting(candidate=candidate, batch_size=batch_size, time_s=time_s)
        if best is None or (setting.device_s, candidate.num_devices) < (best.device_s, best.candidate.num_devices):
            best = setting
    return best
