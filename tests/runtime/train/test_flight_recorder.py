"""What torch's flight recorder saw on ranks is what was proven of their plans, in one order on all of them."""

import json
import random
from contextlib import contextmanager
from math import prod
from unittest import mock

import pytest
import torch

from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from lengthwise.sim.issued_collectives import differences_from_plan
from tests.runtime.harness import RankPool
from tests.runtime.train.runs import RandomTokens, local_world, new_state
from tests.sim.random_plans import SPEC, random_batch, random_plan

SEEDS = range(6)
BYTES = 8
"""Of a number in float64."""


def plan_of(seed):
    rng = random.Random(seed)
    batch = random_batch(rng, seed)
    return random_plan(rng, batch, 4), batch


@pytest.mark.deep
def test_the_flight_recorder_saw_the_proven_operations_of_random_plans():
    pool = RankPool(4, TORCH_FR_BUFFER_SIZE="20000")
    try:
        recorded = pool.run(record, SEEDS)
    finally:
        pool.close()
    num_messages = 0
    for number, seed in enumerate(SEEDS):
        issued = {rank: of_rank[number] for rank, of_rank in enumerate(recorded)}
        assert all(issued.values())
        schedule = PipelineSchedule.ONE_F_ONE_B
        plan, _ = plan_of(seed)
        assert differences_from_plan(plan, issued, schedule=schedule, model=SPEC, dtype="float64") == []
        num_messages += sum(c["kind"] == "send" for collectives in issued.values() for c in collectives)
        for rank in (0, 3):  # a list that lacks one of them is no such list
            lacking = issued | {rank: issued[rank][:-1]}
            assert differences_from_plan(plan, lacking, schedule=schedule, model=SPEC, dtype="float64")
    assert num_messages > 10


def record(seeds):
    """For each plan, what this rank issued in its step: its messages, then its collectives."""
    world = local_world()
    model, state = new_state(world, torch.float64)
    recorded, seen = [], 0
    for seed in seeds:
        plan, batch = plan_of(seed)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        with messages_of(world.rank) as messages:
            run_step(plan, model, state, source, lr=1e-3, clip_norm=1.0, clock=StepClock(world))
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
        ranks_of = {group.handle.group_name: group.ranks for group in world.groups._made.values() if is_member(group)}
        collectives = [issued(entry, ranks_of, world.size) for entry in entries if entry["record_id"] >= seen]
        recorded.append([*messages, *collectives])
        seen = entries[-1]["record_id"] + 1
    return recorded


def is_member(group):
    return group.handle is not None and group.rank >= 0


@contextmanager
def messages_of(rank):
    """Messages between stages, which the recorder leaves out with Gloo."""
    messages, send, receive = [], Group.send, Group.receive

    def note(kind, sender, receiver, x):
        if x.numel():
            messages.append(
                {"operation": "", "kind": kind, "ranks": (sender, receiver), "num_bytes": x.numel() * BYTES}
            )

    def noted_send(group, x, to, *, tag=0):
        note("send", rank, group.ranks[to], x)
        return send(group, x, to, tag=tag)

    def noted_receive(group, x, source, *, tag=0):
        note("receive", group.ranks[source], rank, x)
        return receive(group, x, source, tag=tag)

    with mock.patch.object(Group, "send", noted_send), mock.patch.object(Group, "receive", noted_receive):
        yield messages


def issued(entry, ranks_of, num_ranks):
    """An entry of the recorder as a dry run lists collectives."""
    sizes = [prod(size) * BYTES for size in (*entry["input_sizes"], *entry["output_sizes"])]
    return {
        "operation": "",
        "kind": entry["profiling_name"].removeprefix("gloo:"),
        "ranks": ranks_of.get(entry["process_group"][0], tuple(range(num_ranks))),
        "num_bytes": max(sizes),
    }
