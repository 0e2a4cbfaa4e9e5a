"""The sequences of one step, and the largest time of which it is refuted that some plan takes no longer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lengthwise.plan.bounds.micro_batch_room import MARGIN, MicroBatchRoom

TOLERANCE = 1e-4
"""Relative width at which the search for the largest refuted time ends."""
RULES = "", "light_", "bare_"
"""How costs begin by which the longest sequence and others beside it share the overhead of their micro-batch: by the
slices that each asks for; as few as possible to the others; all of it to the longest."""
COMPARED = 5
"""Classes of length by which groups are compared before all are."""


class SequenceCosts(NamedTuple):
    """What sequences of each class of length take under each group of schemes; inf where they do not fit.

    All [G, C], in seconds or, where the name says so, device-seconds.
    """

    alone_s: np.ndarray
    """Of a pipeline with one micro-batch, of this sequence."""
    bubble_s: np.ndarray
    """That a pipeline whose longest it is idles at least."""
    device_s: np.ndarray
    """Per stage, with a share of the overhead."""
    least_s: np.ndarray
    """Of a pipeline whose longest it is, to which the work of others comes."""
    drained_s: np.ndarray
    """Of such a pipeline to which the backwards of others come, their forwards in its waits."""
    light_device_s: np.ndarray
    """``device_s`` beside the longest, if that bears more of its micro-batch's overhead."""
    light_least_s: np.ndarray
    """``least_s`` then."""
    light_drained_s: np.ndarray
    """``drained_s`` then."""
    bare_device_s: np.ndarray
    """``device_s`` without overhead."""
    bare_least_s: np.ndarray
    """``least_s`` if the longest bears all overhead of its micro-batch."""
    bare_drained_s: np.ndarray
    """``drained_s`` then."""
    longest_s: np.ndarray
    """Per stage, with all of the overhead, in as many slices as the scheme has."""

    def rows(self, groups: np.ndarray) -> "SequenceCosts":
        """The costs under some groups alone, given by their numbers."""
        return SequenceCosts(*(table[groups] for table in self))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSequences:
    """The sequences of a step in C classes of length under G groups of schemes; the longest comes last."""

    num_devices: int
    counts: np.ndarray
    """[C]"""
    devices: np.ndarray
    """[G] of a pipeline."""
    shares: np.ndarray
    """[G] of the work of others on the longest one's pipeline, what none of its waits can hide at least."""
    updates_s: np.ndarray
    """[G] seconds of an update."""
    room: MicroBatchRoom
    """What pipelines of the groups can do at most."""
    costs: SequenceCosts
    _least_by_time: dict[float, np.ndarray] = field(init=False, default_factory=dict, repr=False)

    def under(self, update_s: float) -> "StepSequences":
        """The sequences under the groups alone whose updates take at most so long."""
        return self._of(np.flatnonzero(self.updates_s <= update_s))

    def without_dominated(self, *, by_passes: bool = False) -> "StepSequences":
        """The sequences without groups than which another of as many devices is no worse in anything.

        ``by_passes``: also in how its pipelines fill and drain.
        """
        undominated: list[int] = []
        more = self.room.limits_of_passes if by_passes else ()
        limits = np.column_stack([self.shares, self.updates_s, *self.room.limits, *more])
        columns = np.unique(np.linspace(0, len(self.counts) - 1, COMPARED).astype(int))
        sample = np.concatenate([limits, *(table[:, columns] for table in self.costs)], axis=1)
        order = np.argsort(np.where(np.isfinite(sample), sample, 0.0).sum(axis=1), kind="stable")
        for group in order.tolist():
            rivals = [k for k in undominated if self.devices[k] == self.devices[group]]
            able = (k for k in rivals if (sample[k] <= sample[group]).all())
            if not any(all((table[k] <= table[group]).all() for table in self.costs) for k in able):
                undominated.append(group)
        return self._of(np.sort(undominated))

    def _of(self, groups: np.ndarray) -> "StepSequences":
        rows = {name: getattr(self, name)[groups] for name in ("devices", "shares", "updates_s")}
        return replace(self, **rows, room=self.room.under(groups), costs=self.costs.rows(groups))

    @cached_property
    def floor_s(self) -> float:
        """Seconds as if pipelines never filled or drained, and of the sequence that takes longest alone."""
        return self.floor_under_s(np.inf)

    def floor_under_s(self, update_s: float) -> float:
        """:attr:`floor_s` under the groups alone whose updates take at most so long."""
        allowed = self.updates_s <= update_s
        even_s = float(self.costs.device_s[allowed].min(axis=0) @ self.counts) / self.num_devices
        return max(even_s, float(self.costs.alone_s[allowed].min(axis=0).max())) * (1 - MARGIN)

    def even_bound_s(self, limit_s: float = np.inf) -> float:
        """The largest refuted time, each sequence paying for its own bubble; ``limit_s`` if that is refuted."""
        return _largest_refuted_s(lambda time_s: self._even_devices(time_s) > self._most_devices, self.floor_s, limit_s)

    def bound_s(self, limit_s: float = np.inf) -> float:
        """The largest refuted time if no other sequence uses the bubble of the longest; ``limit_s`` if that is."""
        even_s, best_s, longest_alone_s = self.even_bound_s(limit_s), limit_s, self.costs.alone_s[:, -1]
        for host in np.flatnonzero(np.isfinite(longest_alone_s)).tolist():
            low_s = max(even_s, float(longest_alone_s[host]) * (1 - MARGIN))

            def is_refuted(time_s: float, host: int = host) -> bool:
                return any(self._hosted_devices(time_s, host, rule) > self._most_devices for rule in RULES)

            if low_s < best_s:
                best_s = _largest_refuted_s(is_refuted, low_s, best_s)
        return best_s

    @property
    def _most_devices(self) -> float:
        return self.num_devices * (1 + MARGIN)

    @cached_property
    def _needed_s(self) -> np.ndarray:
        """[G, C] seconds below which there is no time for a sequence."""
        return self.costs.alone_s * (1 - MARGIN)

    @cached_property
    def _work_s(self) -> np.ndarray:
        """[G, C] seconds per stage without overhead."""
        return self.costs.bare_device_s / self.devices[:, None]

    def _least_devices(self, time_s: float) -> np.ndarray:
        """[C] devices that a sequence of each length takes at least; inf where there is no time for it.

        Of each group that of its two rules under which all sequences would take more.
        """
        if time_s not in self._least_by_time:
            fits = time_s >= self._needed_s
            with np.errstate(divide="ignore", invalid="ignore"):
                devices = np.where(fits, self.costs.device_s / (time_s - self.costs.bubble_s), np.inf)
                room_s = self.room.work_s(time_s, self._work_s)
                by_room = np.where(fits & (room_s > 0), self.costs.bare_device_s / room_s, np.inf)
            more = np.where(np.isfinite(by_room), by_room - np.where(fits, devices, 0.0), 0.0) @ self.counts
            self._least_by_time[time_s] = np.where(more[:, None] > 0, by_room, devices).min(axis=0)
        return self._least_by_time[time_s]

    def _even_devices(self, time_s: float) -> float:
        return float(self._least_devices(time_s) @ self.counts)

    def _hosted_devices(self, time_s: float, host: int, rule: str) -> float:
        """Devices that all sequences take at least if the longest runs on a pipeline of group ``host``.

        What shares its pipeline saves most per second of its room: a fractional knapsack. Room is cheaper as long as
        others have forwards for what the longest waits for.
        """
        costs = self.costs
        drained_s, least_s = (float(getattr(costs, f"{rule}{name}")[host, -1]) for name in ("drained_s", "least_s"))
        num_devices, share = float(self.devices[host]), float(self.shares[host])
        cheap_s = max(0.0, drained_s - least_s) / (1 - share)
        until_s = max(0.0, time_s - drained_s) / share if share else np.inf
        room_s = np.array([min(cheap_s, until_s), max(0.0, time_s - least_s)])
        room_s[1] = room_s[1] if room_s[1] > cheap_s else room_s[0]
        if rule == RULES[-1]:
            room_s = np.minimum(room_s, max(0.0, self.room.busy_s(time_s, host) - float(costs.longest_s[host, -1])))
        elsewhere = np.minimum(self._least_devices(time_s), 2.0 * self.num_devices)
        others = self.counts - (np.arange(len(self.counts)) == len(self.counts) - 1)
        beside = getattr(costs, f"{rule}device_s")[host] / time_s
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
