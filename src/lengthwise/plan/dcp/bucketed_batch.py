"""A batch by buckets, the longest first, and what each bucket costs on each type of device group."""

from collections.abc import Sequence

import numpy as np

from lengthwise.plan.dcp.deal_buckets import BucketCosts
from lengthwise.plan.dcp.device_groups import Demand
from lengthwise.plan.dcp.length_buckets import LengthBuckets
from lengthwise.plan.dcp.recompute_levels import RecomputeLadder
from lengthwise.plan.space.problem import PricedBatch

FEW = 8
"""Sequences of a bucket up to which each is counted by itself when groups are chosen: their mean says little."""


class BucketedBatch:
    """Prices of I buckets of a batch on K types of device group, each running a bucket at its highest throughput."""

    order: np.ndarray
    """[B] positions in the batch, the longest sequence first."""
    counts: np.ndarray
    """[I] sequences of each bucket that is present."""
    batch_sizes: np.ndarray
    """[K, I] most sequences of a micro-batch; 0 where a type does not hold the bucket."""
    demand: Demand
    """With a row per bucket, or per sequence of a bucket that has few."""

    def __init__(self, priced: PricedBatch, buckets: LengthBuckets, ladders: Sequence[RecomputeLadder]) -> None:
        self.order = np.argsort(-priced.lengths, kind="stable")
        bucket_of = buckets.of(priced.lengths[self.order])
        self._starts = np.flatnonzero(np.diff(bucket_of, prepend=-1))
        self.counts = np.diff(np.append(self._starts, len(bucket_of)))
        alone = np.repeat(self.counts <= FEW, self.counts)
        alone[self._starts] = True
        row_starts = np.flatnonzero(alone)
        self._first_rows = np.searchsorted(row_starts, np.append(self._starts, len(bucket_of)))
        self._price(priced, ladders, row_starts)

    def __len__(self) -> int:
        return len(self.counts)

    def _price(self, priced: PricedBatch, ladders: Sequence[RecomputeLadder], row_starts: np.ndarray) -> None:
        longest = priced.lengths[self.order][self._starts]
        times, means, firsts, overheads, sizes = [], [], [], [], []
        row_counts = np.diff(np.append(row_starts, len(self.order)))
        bucket_of_row = np.repeat(np.arange(len(self)), np.diff(self._first_rows))
        for ladder in ladders:
            times_s = np.stack([priced.times_s(candidate)[self.order] for candidate in ladder.candidates])
            overhead_s = np.array([priced.overhead_s(candidate) for candidate in ladder.candidates])
            mean_s = np.add.reduceat(times_s, self._starts, axis=1) / self.counts
            holds = ladder.limits[:, None] // longest
            # A micro-batch is not counted on to hold more than the bucket's share of an even step.
            share = np.maximum(-(-self.counts * ladder.candidates[0].num_devices // priced.problem.num_devices), 1)
            best = np.where(holds > 0, mean_s + overhead_s[:, None] / np.clip(holds, 1, share), np.inf).argmin(axis=0)
            times.append(times_s[np.repeat(best, self.counts), np.arange(len(self.order))])
            means.append(np.add.reduceat(times[-1], row_starts) / row_counts)
            firsts.append(times[-1][row_starts])
            overheads.append(overhead_s[best])
            sizes.append(holds[best, np.arange(len(self))])
        self._times_s, self._overhead_s, self.batch_sizes = times, np.stack(overheads), np.stack(sizes)
        overhead_of_row, size_of_row = self._overhead_s[:, bucket_of_row], self.batch_sizes[:, bucket_of_row]
        self.demand = Demand(
            counts=row_counts,
            time_s=np.stack(means),
            overhead_s=overhead_of_row,
            alone_s=np.where(size_of_row > 0, np.stack(firsts) + overhead_of_row, np.inf),
            batch_sizes=size_of_row,
        )

    def demand_of(self, start: int, end: int) -> Demand:
        """The demand of buckets ``start`` to ``end``, the end left out."""
        return self.demand.part(int(self._first_rows[start]), int(self._first_rows[end]))

    def cost_of(self, bucket: int, types: Sequence[int], degrees: Sequence[int]) -> BucketCosts:
        """What dealing a bucket to groups of ``types`` costs; ``degrees`` are those of all K types."""
        start = self._starts[bucket]
        sizes, overhead_s = self.batch_sizes[:, bucket], self._overhead_s[:, bucket]
        times_s = [times_s[start : start + self.counts[bucket]] for times_s in self._times_s]
        holding = [candidate for candidate in types if sizes[candidate]]
        device_s = {k: degrees[k] * (float(times_s[k].mean()) + overhead_s[k] / sizes[k]) for k in holding}
        return BucketCosts(
            times_s=times_s,
            overhead_s=overhead_s.tolist(),
            batch_sizes=sizes.tolist(),
            preferred=sorted(holding, key=lambda candidate: device_s[candidate]),
        )

    def positions(self, bucket: int) -> list[int]:
        """Positions in the batch of a bucket's sequences, the longest first."""
        start = int(self._starts[bucket])
        return self.order[start : start + int(self.counts[bucket])].tolist()
