"""Any number of groups one after the other: the least recently used are released, on every rank the same ones."""

import os
import resource

import pytest
import torch
import torch.distributed as dist

from lengthwise.core.errors import InfeasibleError
from lengthwise.runtime.comm import groups as module
from lengthwise.runtime.comm.world import start_world

MOST_FILES = 160
"""That a process of these tests may open: it has about forty open before it makes a group."""


@pytest.mark.parametrize("num_steps", [50, pytest.param(330, marks=pytest.mark.deep)])
def test_plans_with_groups_of_their_own_at_every_step_do_not_run_out_of_files(fresh_ranks, num_steps):
    for sums, most, kept in fresh_ranks(3).run(_make_many, num_steps):
        assert sums == [3.0 * (1 + step) for step in range(num_steps) for _ in range(2)]
        assert most <= MOST_FILES and 2 <= kept < 20


def _make_many(num_steps):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
    groups, sums, most = start_world("cpu").groups, [], 0
    for step in range(num_steps):
        groups.prepare([((0, 1, 2), f"{step}"), ((1, 2), f"{step}"), ((0, 1, 2), "of every step")])
        own, steady = (groups.of((0, 1, 2), purpose) for purpose in (f"{step}", "of every step"))
        sums += [float(group.all_reduce(torch.tensor(1.0 + step), dist.ReduceOp.SUM)) for group in (own, steady)]
        most = max(most, len(os.listdir("/proc/self/fd")))
    return sums, most, len(groups)


def test_the_least_recently_used_groups_are_released_and_fail_if_used(ranks, monkeypatch):
    assert ranks(2).run(_release) == [(True, True, True, True)] * 2


def _release():
    kept, module.MOST_GROUPS = module.MOST_GROUPS, 2
    try:
        groups = start_world("cpu").groups
        groups.prepare([((0, 1), "a"), ((0, 1), "b")])
        first, second = groups.of((0, 1), "a"), groups.of((0, 1), "b")
        groups.prepare([((0, 1), "a")])
        groups.prepare([((0, 1), "c")])
        is_there = groups.of((0, 1), "a") is first
        with pytest.raises((AssertionError, ValueError), match=r"released|not initialized"):  # ours, or torch's
            second.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
        groups.prepare([((0, 1), "b")])
        again = groups.of((0, 1), "b")
        is_made_anew = again is not second and again.all_reduce(torch.ones(1), dist.ReduceOp.SUM).item() == 2
        groups.prepare([((0, 1), purpose) for purpose in "pqrst"])  # more than the limit, but one step needs them
        return (
            is_there,
            is_made_anew,
            len(groups) == 5,
            groups.of((0, 1), "p").all_reduce(torch.ones(1), dist.ReduceOp.SUM).item() == 2,
        )
    finally:
        module.MOST_GROUPS = kept


def test_groups_to_keep_are_never_released(ranks):
    assert ranks(2).run(_keep) == [True] * 2


def _keep():
    most, module.MOST_GROUPS = module.MOST_GROUPS, 2
    try:
        groups = start_world("cpu").groups
        groups.keep([((0, 1), "kept")])
        for purpose in "abc":
            groups.prepare([((0, 1), purpose)])
        return groups.of((0, 1), "kept").all_reduce(torch.ones(1), dist.ReduceOp.SUM).item() == 2 and len(groups) == 2
    finally:
        module.MOST_GROUPS = most
        groups.close()


def test_a_group_that_nobody_used_is_released_when_every_rank_has_made_it(fresh_ranks):
    """Else a slower rank, as on a busy machine, finds that the others closed their sockets while it still connects."""
    assert fresh_ranks(3).run(_release_unused) == [True] * 3


def _release_unused():
    module.MOST_GROUPS = 1
    groups = start_world("cpu").groups
    for number in range(60):
        groups.prepare([((0, 1, 2), f"{number}")])
    return len(groups) == 1


def test_a_step_that_needs_more_files_than_there_may_be_is_refused_on_every_rank(fresh_ranks):
    for message in fresh_ranks(2).run(_refuse):
        assert "the groups of one step need 800 open files in a process, and the limit is 160; raise it" in message


def _refuse():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
    with pytest.raises(InfeasibleError) as error:
        start_world("cpu").groups.prepare(((0, 1), f"{number}") for number in range(100))
    return str(error.value)
