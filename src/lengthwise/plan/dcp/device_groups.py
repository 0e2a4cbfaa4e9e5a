"""Which device groups a step needs so that all buckets end by a deadline, and how early the deadline can be.

K types of group, each of a degree p_k; I buckets, the longest first. Under a deadline C a group runs as many
micro-batches of a bucket as end by then, so bucket i needs ceil(n_i / that) groups of a type that needs little for it;
first, though, it fills what longer buckets leave of their groups. The least C whose groups fit
the cluster is found by bisection. Device groups must tile the cluster, whatever its size: a group is opened only if the
devices left can still be tiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FIRST_SLACK = 0.05
"""Share above the lower bound at which deadlines are tried first; doubled until one can be met."""
BISECTIONS = 5
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """What the buckets of a step ask of each type of group."""

    counts: np.ndarray
    """[I] sequences."""
    time_s: np.ndarray
    """[K, I] mean seconds that a sequence adds to a micro-batch."""
    overhead_s: np.ndarray
    """[K, I] seconds of a micro-batch before its first sequence."""
    alone_s: np.ndarray
    """[K, I] seconds of the longest sequence alone; inf where a type does not hold the bucket."""
    batch_sizes: np.ndarray
    """[K, I] most sequences of a micro-batch; 0 where a type does not hold the bucket."""

    def part(self, start: int, end: int) -> "Demand":
        """Buckets ``start`` to ``end``, the end left out."""
        return Demand(
            counts=self.counts[start:end],
            time_s=self.time_s[:, start:end],
            overhead_s=self.overhead_s[:, start:end],
            alone_s=self.alone_s[:, start:end],
            batch_sizes=self.batch_sizes[:, start:end],
        )

    def device_s(self, degrees: Sequence[int]) -> np.ndarray:
        """[K, I] device-seconds per sequence in full micro-batches, inf where a type does not hold the bucket."""
        full_s = self.time_s + self.overhead_s / np.maximum(self.batch_sizes, 1)
        return np.array(degrees)[:, None] * np.where(self.batch_sizes > 0, full_s, np.inf)


class Tiling:
    """Which numbers of devices groups of some degrees can tile."""

    def __init__(self, degrees: Sequence[int], num_devices: int) -> None:
        self.degrees, self.num_devices = tuple(degrees), num_devices
        self._tiled = [True] + [False] * num_devices
        for devices in range(1, num_devices + 1):
            self._tiled[devices] = any(devices >= p and self._tiled[devices - p] for p in self.degrees)

    def holds(self, degree: int) -> bool:
        """Whether the cluster can be tiled with at least one group of ``degree``."""
        return degree <= self.num_devices and self._tiled[self.num_devices - degree]

    def most(self, degree: int, wanted: int, left: int) -> int:
        """The most groups of ``degree``, up to ``wanted``, on ``left`` devices so that what remains can be tiled."""
        for count in range(min(wanted, left // degree), 0, -1):
            if self._tiled[left - count * degree]:
                return count
        return 0

    def fill(self, left: int, preferred: Sequence[int]) -> list[int]:
        """Types of the groups that tile ``left`` devices, each the first of ``preferred`` that leaves a tiling."""
        types = []
        while left:
            group_type = next(k for k in preferred if self.degrees[k] <= left and self._tiled[left - self.degrees[k]])
            types.append(group_type)
            left -= self.degrees[group_type]
        return types


@dataclass(eq=False)
class _Groups:
    """Equal device groups with as much time left."""

    group_type: int
    count: int
    spare_s: float


class GroupPlanner:
    """Finds device groups for one demand."""

    def __init__(self, demand: Demand, tiling: Tiling) -> None:
        self.tiling = tiling
        self._device_s = demand.device_s(tiling.degrees)
        order = np.argsort(self._device_s, axis=0, kind="stable").T.tolist()
        self.preferred = [
            [k for k in group_types if np.isfinite(self._device_s[k, i])] for i, group_types in enumerate(order)
        ]
        """[I] types that hold each bucket, the fewest device-seconds per sequence first."""
        self._counts = demand.counts.tolist()
        self._time_s, self._overhead_s = demand.time_s.tolist(), demand.overhead_s.tolist()
        self._alone_s, self._batch_sizes = demand.alone_s.tolist(), demand.batch_sizes.tolist()
        self._work_s = self._device_s.min(axis=0) * demand.counts
        self.floor_s = max(float(self._work_s.sum()) / tiling.num_devices, float(demand.alone_s.min(axis=0).max()))
        """A deadline that cannot be met earlier, by the demand's means: all devices busy, the longest alone."""

    def can_end_by(self, deadline_s: float) -> bool:
        """Whether :attr:`earliest` is as early, as far as one look at that deadline tells."""
        if "earliest" in self.__dict__:
            return self.earliest[0] <= deadline_s
        return self.by_deadline(deadline_s) is not None

    @cached_property
    def earliest(self) -> tuple[float, tuple[int, ...]]:
        """The earliest deadline found, and how many groups of each type [K] it takes."""
        low_s, slack, groups = self.floor_s, FIRST_SLACK, None
        while groups is None:
            high_s = self.floor_s * (1 + slack)
            groups = self.by_deadline(high_s)
            if groups is None:
                low_s, slack = high_s, 2 * slack
        for _ in range(BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if (groups_in_time := self.by_deadline(middle_s)) is None:
                low_s = middle_s
            else:
                high_s, groups = middle_s, groups_in_time
        return high_s, groups

    def by_deadline(self, deadline_s: float) -> tuple[int, ...] | None:
        """How many groups of each type [K] compute every bucket by the deadline and tile the cluster.

        None if the cluster is too small for what is found, by both rules: a bucket opens groups of the type that takes
        the fewest device-seconds per sequence, or of the one that takes the fewest devices to meet the deadline.
        """
        return self._by_rule(deadline_s, fewest_devices=False) or self._by_rule(deadline_s, fewest_devices=True)

    def _by_rule(self, deadline_s: float, *, fewest_devices: bool) -> tuple[int, ...] | None:
        deadline_s *= 1 + ROUNDING
        left, opened = self.tiling.num_devices, list[_Groups]()
        for bucket, wanted in enumerate(self._counts):
            wanted = self._share(opened, bucket, wanted)
            in_time = [
                group_type for group_type in self.preferred[bucket] if self._alone_s[group_type][bucket] <= deadline_s
            ]
            if fewest_devices:
                in_time.sort(key=lambda k: self.tiling.degrees[k] / self._fitting(k, bucket, deadline_s))
            for group_type in in_time:
                if wanted <= 0:
                    break
                num_per_group = self._fitting(group_type, bucket, deadline_s)
                count = self.tiling.most(self.tiling.degrees[group_type], -(-wanted // num_per_group), left)
                left -= count * self.tiling.degrees[group_type]
                fresh = [_Groups(group_type, count, deadline_s)] if count else []
                wanted = self._share(fresh, bucket, wanted)
                opened += fresh
            if wanted > 0:
                return None
        groups = [0] * len(self.tiling.degrees)
        for each_group_type in opened:
            groups[each_group_type.group_type] += each_group_type.count
        for group_type in self.tiling.fill(left, self._left_over) if left else ():
            groups[group_type] += 1
        return tuple(groups)

    @cached_property
    def _left_over(self) -> list[int]:
        """Types for devices that no bucket asks for: what is best for the bucket with the most work comes first."""
        first = self.preferred[int(self._work_s.argmax())]
        return first + [group_type for group_type in range(len(self.tiling.degrees)) if group_type not in first]

    def _share(self, opened: list[_Groups], bucket: int, wanted: int) -> int:
        """Fill the spare time of open groups with sequences of a bucket; how many of those wanted remain."""
        for groups in list(opened):
            if wanted <= 0:
                break
            if self._alone_s[groups.group_type][bucket] > groups.spare_s:
                continue
            num_per_group = self._fitting(groups.group_type, bucket, groups.spare_s)
            full = min(groups.count, wanted // num_per_group)
            last = wanted - full * num_per_group if full < groups.count else 0
            wanted -= full * num_per_group + last
            for count, share in ((full, num_per_group), (1, last)):
                if count and share:
                    spare_s = groups.spare_s - self._taken_s(groups.group_type, bucket, share)
                    opened.append(_Groups(groups.group_type, count, spare_s))
                    groups.count -= count
        opened[:] = [groups for groups in opened if groups.count]
        return wanted

    def _fitting(self, group_type: int, bucket: int, within_s: float) -> int:
        """Sequences of a bucket, at least one, that a group computes within some seconds."""
        time_s, overhead_s = self._time_s[group_type][bucket], self._overhead_s[group_type][bucket]
        size = self._batch_sizes[group_type][bucket]
        full, rest_s = divmod(within_s, size * time_s + overhead_s)
        return max(1, int(full) * size + min(size, max(0, int((rest_s - overhead_s) / time_s))))

    def _taken_s(self, group_type: int, bucket: int, count: int) -> float:
        batches = -(-count // self._batch_sizes[group_type][bucket])
        return count * self._time_s[group_type][bucket] + batches * self._overhead_s[group_type][bucket]
