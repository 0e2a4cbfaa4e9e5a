"""How long steps take under strategies, many of both at once: a deadline by which the sequences can be poured in.

Under a deadline D a pipeline holds only so much work if its longest sequence takes x (bubble, overhead per
micro-batch), so each sequence takes a share of it. Pipelines are filled with the longest sequences left, candidate by
candidate, those that are good at long sequences first; sequences are divisible. D is feasible if all are poured in and
the longest of them, which are not divisible after all, find enough pipelines. Neither a bound nor a plan, but within a
few percent of both.

M strategies, S steps, G deadlines, K candidates, C classes of length, the longest first.
"""

from functools import cached_property

import numpy as np

from lengthwise.plan.heterogeneous.propose.workload import Workload
from lengthwise.plan.solve.shop import Objective

DEADLINE_RATIO = 1.008
"""Of neighbouring deadlines: the resolution of estimates."""
SPAN = 8.0
"""The latest deadline over the highest floor; what takes longer counts as infinitely long."""
CROWDED_CLASSES = 24
"""The longest classes, for which single sequences are counted."""
LEFT = 1e-9
"""Sequences that rounding may leave over."""
FIRST_STRIDE = 24
"""Deadlines between a step's floor and the first that is tried; then five times as far each."""
BLOCK = 64
"""Deadlines tabulated at a time."""
ROWS = 4096
"""Strategies times steps poured at a time, which bounds memory."""


class Estimator:
    """Shares of every candidate, class and deadline, tabulated once."""

    def __init__(self, workload: Workload, objective: Objective) -> None:
        self.workload = workload
        floors_s = workload.floors_s()
        low_s, high_s = float(floors_s.min()), float(floors_s.max()) * SPAN
        count = int(np.ceil(np.log(high_s / low_s) / np.log(DEADLINE_RATIO))) + 1
        self.deadlines_s = low_s * DEADLINE_RATIO ** np.arange(count)
        blocks = np.array_split(self.deadlines_s, -(-count // BLOCK))
        self.shares = np.concatenate([_shares(workload, objective, block[:, None, None]) for block in blocks])
        with np.errstate(divide="ignore"):
            sequences_per_share = np.floor(1 / self.shares[:, :, :CROWDED_CLASSES] + LEFT)
        self._whole = np.where(self.shares[:, :, :CROWDED_CLASSES] > 0, sequences_per_share, 0.0)
        self._ranks = np.cumsum(workload.counts[:, :CROWDED_CLASSES], axis=1)

    @cached_property
    def device_shares(self) -> np.ndarray:
        """[G, C] fewest devices that a sequence takes for all of the deadline; inf if none is in time."""
        return np.where(self.shares > 0, self.shares * self.workload.devices[:, None], np.inf).min(axis=1)

    @cached_property
    def floors(self) -> np.ndarray:
        """[S] the first deadline by which a step's sequences fit all devices, in any mix of candidates."""
        needed = np.where(np.isfinite(self.device_shares), self.device_shares, 1e300)
        feasible = self.workload.counts @ needed.T <= self.workload.num_devices
        return np.where(feasible.any(axis=1), feasible.argmax(axis=1), len(self.deadlines_s) - 1)

    @cached_property
    def order(self) -> np.ndarray:
        """[K] candidates by how steeply shares grow with length, the flattest first.

        Two candidates are compared at the longest length both hold. What wins most comparisons comes first.
        """
        shares = self.shares[int(np.median(self.floors))]
        shares = np.where(shares > 0, shares, np.inf)
        limits = self.workload.limits
        columns = np.searchsorted(-self.workload.longest, -np.minimum(limits[:, None], limits))
        columns = np.minimum(columns, shares.shape[1] - 1)
        candidates = np.arange(len(limits))
        with np.errstate(invalid="ignore"):
            steepness = np.nan_to_num(shares[candidates[:, None], columns] / shares[:, -1:], nan=np.inf, posinf=np.inf)
            wins = (steepness < steepness.T * (1 - 1e-9)).sum(axis=1)
        return np.lexsort((candidates, -limits, -wins))

    def times_s(self, strategies: np.ndarray, steps: np.ndarray | None = None) -> np.ndarray:
        """[M, len(steps)] seconds of each step, by default of all, under [M, K] numbers of pipelines; inf: too long."""
        steps = np.arange(len(self.workload.counts)) if steps is None else steps
        at_once = max(1, ROWS // len(steps))
        parts = [
            self._times_s(strategies[start : start + at_once], steps) for start in range(0, len(strategies), at_once)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, len(steps)))

    def _times_s(self, strategies: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """A bisection over deadlines, one row per strategy and step: ``low`` is too early, ``high`` is feasible."""
        candidates, pipelines = self._in_order(strategies)
        candidates, pipelines = np.repeat(candidates, len(steps), axis=0), np.repeat(pipelines, len(steps), axis=0)
        steps_of = np.tile(steps, len(strategies))
        floors, never = self.floors[steps_of], len(self.deadlines_s)
        low, high = floors - 1, np.full(len(steps_of), never)
        while len(rows := np.flatnonzero(high - low > 1)):
            gallop = np.minimum(5 * low[rows] - 4 * floors[rows] + FIRST_STRIDE, never - 1)
            middle = np.where(high[rows] == never, gallop, (low[rows] + high[rows]) // 2)
            feasible = self._feasible(middle, candidates[rows], pipelines[rows], steps_of[rows])
            low[rows] = np.where(feasible, low[rows], middle)
            high[rows] = np.where(feasible, middle, high[rows])
        return np.append(self.deadlines_s, np.inf)[high].reshape(len(strategies), len(steps))

    def _in_order(self, strategies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[M, most candidates of a strategy] candidates of each strategy in the order of filling, and their counts."""
        ordered = strategies[:, self.order]
        places = np.argsort(ordered == 0, axis=1, kind="stable")[:, : int((ordered > 0).sum(axis=1).max())]
        return self.order[places], np.take_along_axis(ordered, places, axis=1).astype(np.float64)

    def _feasible(
        self, deadlines: np.ndarray, candidates: np.ndarray, pipelines: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        """[R] whether each row's step can be poured into its pipelines by its deadline.

        Where ``shares`` is 0 a sequence is late, or there are no such pipelines, and all of it is left.
        """
        left = self.workload.counts[steps]
        room = np.zeros((len(steps), self._whole.shape[2]))
        for place in range(candidates.shape[1]):
            count, candidate = pipelines[:, place, None], candidates[:, place]
            room += count * self._whole[deadlines, candidate]
            shares = np.where(count > 0, self.shares[deadlines, candidate], 0.0)
            load = left * shares
            over = np.minimum(np.maximum(np.cumsum(load, axis=1) - count, 0.0), load)
            left = np.divide(over, shares, out=left, where=shares > 0)
        return (left.sum(axis=1) <= LEFT * len(left[0])) & (room >= self._ranks[steps] * (1 - LEFT)).all(axis=1)


def _shares(workload: Workload, objective: Objective, deadlines_s: np.ndarray) -> np.ndarray:
    """[G, K, C] the part of a pipeline's time until each deadline that a sequence takes; 0 where it is late even alone.

    The most work W of V micro-batches, the longest of which takes m + setup, ends in time if the flow shop
    W + V setup + (stages - 1) (m + setup), or Eq. (1), does; m is at least that of the sequence, and W / V. In Eq. (1)
    a long sequence also leaves time for few micro-batches, whose tokens are limited.
    """
    setup, later = workload.setup_s[:, None], workload.stages[:, None] - 1.0
    fits = np.isfinite(workload.work_s)
    work = np.where(fits, workload.work_s, 0.0)
    charged = np.where(fits, workload.charged_s, 0.0)
    least = np.maximum(work, work * (workload.util_tokens[:, None] / workload.lengths)) + setup
    with np.errstate(divide="ignore", invalid="ignore"):
        max_batches = np.maximum(deadlines_s / least - later, 1.0)
        most_alone = np.maximum(deadlines_s / (work + setup) - later, 1.0)
        best = np.where(setup > 0, np.sqrt(deadlines_s * later / setup) - later, np.inf)
        count = np.where(later > 0, np.clip(best, 1.0, max_batches), 1.0)
        capacity = count * (deadlines_s / (count + later) - setup)
        if objective is Objective.FLOW_SHOP:
            capacity = np.maximum(capacity, deadlines_s - max_batches * setup - later * least)
            space = np.zeros(())
        else:
            space = workload.lengths / (workload.pack_tokens[:, None] * np.floor(most_alone + LEFT))
        left = deadlines_s - later * least
        shares = np.maximum(np.maximum(work / capacity, np.where(left > 0, charged / left, 0.0)), space)
    in_time = fits & (deadlines_s >= workload.alone_s * (1 - LEFT))
    shares = np.where(in_time, np.clip(shares, 0.0, 1.0), 0.0)
    return shares
