"""Whole pipelines that occupy exactly all devices: from fractional counts, and from counts that leave devices over."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate, tile_of
from lengthwise.plan.heterogeneous.propose.workload import Workload
from lengthwise.plan.space.placement import placeable

MOST_ROUNDED = 6
"""Kinds with the largest fractions, of which both neighbouring whole counts are tried."""

Counts = tuple[int, ...]
"""Pipelines of each candidate."""


class Tiler:
    """Fills the devices of one cluster."""

    def __init__(self, workload: Workload, devices_per_node: int) -> None:
        self.workload = workload
        self.devices_per_node = devices_per_node
        self.sizes: list[int] = workload.devices.tolist()
        self.may_cross = False
        """Whether strategies are allowed whose stages cross nodes needlessly."""
        self._limits: list[int] = workload.limits.tolist()

    @cached_property
    def values(self) -> np.ndarray:
        """[K] devices of the best candidates that a pipeline replaces, for the class of length that it is best at."""
        device_s = self.workload.devices[:, None] * self.workload.charged_s
        with np.errstate(invalid="ignore"):
            efficiency = np.nan_to_num(device_s.min(axis=0) / device_s)
        values: np.ndarray = self.workload.devices * efficiency.max(axis=1)
        return values

    @cached_property
    def _fillings(self) -> tuple[np.ndarray, np.ndarray]:
        """For each number of devices, the most value of pipelines that occupy them exactly, and one of these."""
        best = np.full(self.workload.num_devices + 1, -np.inf)
        last = np.full(self.workload.num_devices + 1, -1)
        best[0] = 0.0
        sizes, values = self.workload.devices, self.values
        for number in range(1, len(best)):
            fitting = np.flatnonzero(sizes <= number)
            reached = best[number - sizes[fitting]] + values[fitting]
            if len(reached) and reached.max() > -np.inf:
                last[number] = fitting[int(reached.argmax())]
                best[number] = reached.max()
        return best, last

    def fill(self, counts: Sequence[int]) -> Counts | None:
        """Add pipelines on the devices left, giving up as few of ``counts`` as that takes; None if impossible."""
        filled = [int(count) for count in counts]
        left = self.workload.num_devices - sum(size * count for size, count in zip(self.sizes, filled))
        best, last = self._fillings
        while left < 0 or best[left] == -np.inf:
            present = [candidate for candidate, count in enumerate(filled) if count]
            if not present:
                return None
            least = min(present, key=lambda candidate: (self.values[candidate], candidate))
            filled[least] -= 1
            left += self.sizes[least]
        while left:
            candidate = int(last[left])
            filled[candidate] += 1
            left -= self.sizes[candidate]
        return tuple(filled)

    def round(self, counts: np.ndarray, *, least: int | None = None) -> list[Counts]:
        """Round fractional counts to whole strategies nearby, filled, with at least one pipeline of ``least``."""
        floors = np.floor(counts + 1e-9).astype(np.int64)
        if least is not None:
            floors[least] = max(floors[least], 1)
        fractions = counts - floors
        up = [
            candidate
            for candidate in np.argsort(-fractions, kind="stable")[:MOST_ROUNDED].tolist()
            if fractions[candidate] > 1e-9
        ]
        rounded_counts: dict[Counts, None] = {}
        for steps in product((1, 0), repeat=len(up)):
            rounded = floors.copy()
            rounded[up] += np.array(steps, dtype=np.int64)
            if rounded @ self.workload.devices <= self.workload.num_devices:
                filled = self.fill(rounded.tolist())
                if filled is not None and (least is None or filled[least]):
                    rounded_counts[filled] = None
        return list(rounded_counts)

    def max_length(self, counts: Counts) -> int:
        """Longest sequence that some pipeline holds."""
        return max((limit for limit, count in zip(self._limits, counts) if count), default=0)

    def is_placeable(self, counts: Counts) -> bool:
        """Whether no stage crosses more nodes than its size makes it, or all are allowed to."""
        if self.may_cross or self._divides:
            return True
        strategy = strategy_of(self.workload.candidates, counts)
        pipelines = [(tile_of(candidate, count).candidate, count) for candidate, count in strategy]
        return placeable(pipelines, self.workload.num_devices, self.devices_per_node)

    @cached_property
    def _divides(self) -> bool:
        """Whether every degree divides the next larger one, nodes among them: then any tiling can be placed."""
        node = min(self.devices_per_node, self.workload.num_devices)
        degrees = sorted({node, *(candidate.scheme.degree for candidate in self.workload.candidates)})
        return all(large % small == 0 for small, large in pairwise(degrees))


def fillable(candidates: Sequence[ProposedCandidate], num_devices: int, *, holding: int) -> list[int]:
    """How many devices to use, the most first: all, or where nothing fills them, the most that mixes fill.

    Some pipeline has to hold ``holding`` tokens. The last number is one that equal pipelines fill.
    """
    filled, everything = 1, (1 << num_devices + 1) - 1  # bit n: n devices can be filled
    for size in sorted({candidate.num_devices for candidate in candidates}):
        step = size
        while step <= num_devices:
            filled |= filled << step & everything
            step *= 2
    holders = {candidate.num_devices for candidate in candidates if candidate.max_tokens >= holding}
    mixed = max((size + (filled & everything >> size).bit_length() - 1 for size in holders), default=num_devices)
    equal = max((num_devices // size * size for size in holders), default=num_devices)
    return sorted({num_devices, mixed, equal}, reverse=True)


def strategy_of(
    candidates: Sequence[ProposedCandidate], counts: Sequence[int]
) -> tuple[tuple[ProposedCandidate, int], ...]:
    """The candidates that are used with their counts, the one that holds the longest sequences first."""
    used = [(candidate, int(count)) for candidate, count in zip(candidates, counts) if count]
    return tuple(sorted(used, key=lambda entry: -entry[0].max_tokens))
