"""The groups of a world: made when they are needed, and the least recently used released before files run out.

A group of p ranks takes each of them about p sockets and a few more files with Gloo, or a communicator with NCCL. Plans
may ask for other groups at every step.
"""

import resource
from collections import Counter, OrderedDict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lengthwise.core.errors import InfeasibleError
from lengthwise.runtime.comm.activity import CollectiveWait
from lengthwise.runtime.comm.collectives import all_reduce
from lengthwise.runtime.comm.group import Group

MOST_GROUPS = 256
"""That a rank is in at a time; Gloo has two or three threads for each."""
FILES_OF_GROUP = 6
"""That a group takes besides a socket to each of its ranks."""
SHARE_OF_FILES = 0.5
"""Of those a process may open, for groups; the rest is for data, checkpoints and libraries."""

Key = tuple[tuple[int, ...], str]
"""Ranks, which ascend, and a purpose: groups of different purpose do not wait for each other's messages."""


class GroupRegistry:
    """The groups of a world. Making and releasing is collective; looking one up that is there is not."""

    def __init__(self, rank: int, timeout: timedelta | None = None, *, device: torch.device | None = None) -> None:
        self._rank, self._timeout, self._device = rank, timeout, device or torch.device("cpu")
        self._made: OrderedDict[Key, Group] = OrderedDict()
        self._limit: int | None = None
        self._kept: list[Key] = []

    def __len__(self) -> int:
        return len(self._made)

    def of(self, ranks: tuple[int, ...], purpose: str = "") -> Group | None:
        """The group of ``ranks``, which ascend; None on a rank outside of it.

        One that is not there yet is made: then every rank asks for it, in the same order, whether it is in it or not.
        """
        assert list(ranks) == sorted(set(ranks)), f"torch sorts the ranks of a group, so {ranks} must ascend"
        group = self._made.get((ranks, purpose)) or self._make((ranks, purpose))
        return group if group.rank >= 0 else None

    def prepare(self, keys: Iterable[Key]) -> None:
        """Make what a step needs, and release what was not used for longest if there are too many; every rank calls it.

        No operation of a group may be under way any more when another step is prepared.

        Raises:
            InfeasibleError: on every rank, as the step alone needs more files than a process may open.
        """
        needed = list(dict.fromkeys([*self._kept, *keys]))
        for key in needed:
            if key in self._made:
                self._made.move_to_end(key)
        if missing := [key for key in needed if key not in self._made]:
            self._make_room(missing, needed)
        for key in missing:
            self.of(*key)

    def keep(self, keys: Iterable[Key]) -> None:
        """Make groups that are never released before the end; every rank calls it."""
        self._kept = list(dict.fromkeys([*self._kept, *keys]))
        for key in self._kept:
            self.of(*key)

    def close(self) -> None:
        """Release all groups; none can be used any more."""
        for group in self._made.values():
            group.handle = None

    def _make(self, key: Key) -> Group:
        ranks, _ = key
        handle = None
        if len(ranks) > 1:
            with CollectiveWait("making a group", ranks):
                handle = dist.new_group(list(ranks), timeout=self._timeout)
        place = ranks.index(self._rank) if self._rank in ranks else -1
        self._made[key] = Group(rank=place, ranks=ranks, handle=handle)
        return self._made[key]

    def _make_room(self, missing: list[Key], needed: list[Key]) -> None:
        """Release groups that are not ``needed``. All ranks know all groups, and so release the same ones."""
        files, counts = self._usage([*self._made, *missing])
        limit = self._most_files()
        for number, key in enumerate([key for key in self._made if key not in needed]):
            is_small = max(files.values(), default=0) <= SHARE_OF_FILES * limit
            if is_small and max(counts.values(), default=0) <= MOST_GROUPS:
                return
            if number == 0:  # a rank that is still making a group would find its peers gone
                all_reduce(torch.zeros(1, device=self._device), dist.ReduceOp.SUM)
            group = self._made.pop(key)
            used, times = self._usage([key])
            files.subtract(used)
            counts.subtract(times)
            _release(group)
        if (wanted := max(files.values(), default=0)) > limit:
            raise InfeasibleError(
                f"the groups of one step need {wanted:,} open files in a process, and the limit is {limit:,}; raise "
                "it (ulimit -n) or use plans with fewer pipelines",
                what="the process groups of one step", value=wanted, limit=limit, unit="files",
            )  # fmt: skip

    @staticmethod
    def _usage(keys: Iterable[Key]) -> tuple[Counter[int], Counter[int]]:
        """Numbers of files and groups of each rank."""
        files: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for ranks, _ in keys:
            if len(ranks) > 1:
                files.update(dict.fromkeys(ranks, len(ranks) + FILES_OF_GROUP))
                counts.update(ranks)
        return files, counts

    def _most_files(self) -> int:
        """Files that the rank that may open the fewest may open; all ranks ask for it at the same time, once."""
        if self._limit is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = (1 << 20) if soft == resource.RLIM_INFINITY else soft
            smallest = torch.tensor([limit], device=self._device)
            if dist.get_world_size() > 1:
                all_reduce(smallest, dist.ReduceOp.MIN)
            self._limit = int(smallest)
        return self._limit


class _Released:
    """Placeholder for the handle of a released group: whatever uses it fails, instead of using all ranks."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("this group of ranks was released; ask for it again")


def _release(group: Group) -> None:
    handle, group.handle = group.handle, _Released()  # type: ignore[assignment]
    if handle is not None and group.rank >= 0:
        dist.destroy_process_group(handle)
