"""Leaving the other ranks: no thread of Gloo is left to abort the process at its end, and nobody is waited for."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from lengthwise.runtime.comm.world import shutdown_at_exit, start_world, stop_world

LEFT_WITHIN_S = 30.0
"""Half of what a collective of the pool's ranks waits for others."""


def test_no_thread_that_frees_tensors_outlives_the_groups_although_they_are_referred_to(fresh_ranks):
    for before, after in fresh_ranks(2).run(_threads_before_and_after):
        assert (before, after) == (4, 0), "two of each group"


def _threads_before_and_after():
    world = start_world("cpu")
    group = world.groups.of((0, 1))
    dist.all_reduce(torch.ones(3), group=group.handle)
    end = time.monotonic() + LEFT_WITHIN_S
    while (before := _num_threads()) < 4 and time.monotonic() < end:
        time.sleep(0.01)  # a thread names itself after it has begun
    stop_world(world)
    return before, _num_threads()


def _num_threads():
    """That free what a collective was given."""
    return sum(path.read_text() == "pt_gloo_runloop\n" for path in Path("/proc/self/task").glob("*/comm"))


def test_a_process_comes_to_its_end_although_others_never_join_its_collective(fresh_ranks, tmp_path):
    assert fresh_ranks(2).run(_leave_alone, str(tmp_path / "left")) == [True, True]


def _leave_alone(flag):
    world = start_world("cpu")
    group = world.groups.of((0, 1))
    if world.is_first:
        work = dist.all_reduce(torch.ones(3), group=group.handle, async_op=True)
        shutdown_at_exit(world)()
        Path(flag).touch()
        return not work.is_completed()
    end = time.monotonic() + LEFT_WITHIN_S
    while not Path(flag).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return Path(flag).exists()
