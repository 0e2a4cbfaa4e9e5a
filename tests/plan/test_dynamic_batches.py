"""verl's dynamic micro-batches as the benchmark of rollouts runs them: hand-computed balance and lock-step."""

from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.memory_model import largest_unit, state_bytes
from lengthwise.plan.space.problem import PricedBatch
from tests.plan.costs import SimpleCost, make_batch, make_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = [60, 40, 40, 10]
"""Dealt to two ranks as 60 + 10 and 40 + 40, and cut into two micro-batches on each."""


@pytest.fixture
def lock_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import fsdp_lock_step

    return fsdp_lock_step


@pytest.fixture
def balancer(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import balanced_dynamic_batches

    return balanced_dynamic_batches


@pytest.fixture
def two_ranks():
    """A micro-batch takes half a second and one for each token, the update a quarter."""
    cost = SimpleCost(a_s=0.0, b_s=1.0, c_s=0.5, capacity=100)
    problem = make_problem(cost, num_devices=2, degrees=[1], stages=[1], max_length=60)
    return problem, PricedBatch(problem, make_batch(LENGTHS))


def test_ranks_in_lock_step_take_the_slowest_of_each_micro_batch(lock_step):
    assert lock_step.lock_step_s([[3.0, 1.0], [2.0, 2.0]]) == 5.0
    assert lock_step.lock_step_s([[3.0], [2.0, 2.0]]) == 5.0
    assert lock_step.lock_step_s([[], []]) == 0.0


def test_a_step_in_lock_step_adds_what_ranks_wait_in_each_micro_batch(balancer, lock_step, two_ranks):
    problem, priced = two_ranks
    options = {"problem": problem, "candidate": problem.candidates[0], "limit": 60}
    assert balancer.DynamicBatches(**options).step_s(priced) == (40.5 + 40.5) + 0.25
    assert lock_step.LockStepBatches(**options).step_s(priced) == (60.5 + 40.5) + 0.25


def test_what_is_tuned_is_tuned_for_the_waiting(balancer, lock_step, two_ranks):
    problem, priced = two_ranks
    waiting = balancer.tuned(problem, problem.candidates, [priced], run_by=lock_step.LockStepBatches)
    assert waiting.limit >= 80, "one micro-batch on each rank: 80.5 s"
    assert waiting.step_s(priced) == 80.5 + 0.25


def test_every_rank_has_as_many_micro_batches_the_most_work_first(balancer):
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 1000, 48)
        by_rank = balancer.micro_batches(lengths, 8, limit=1000)
        assert sorted(item for packs in by_rank for pack in packs for item in pack) == list(range(48))
        assert len({len(packs) for packs in by_rank}) == 1
        for packs in by_rank:
            work = [balancer.work_of(lengths[list(pack)]).sum() for pack in packs]
            assert work == sorted(work, reverse=True)


def test_sharded_state_leaves_room_for_all_but_a_share_and_two_units(lock_step):
    model, cluster = model_preset("llama-7b"), cluster_preset("8x8xH100-80GB")
    whole = state_bytes(model, num_devices=64, dtype="bfloat16")
    more = lock_step.with_sharded_state(cluster, model, dtype="bfloat16").device.memory_bytes
    optimizer, held = 16, 2 + 4  # bytes per parameter: sharded by both; a weight and its gradient
    needed = model.num_params / 64 * (optimizer + held) + 2 * largest_unit(model) * held
    assert whole - (more - cluster.device.memory_bytes) == pytest.approx(needed, rel=1e-6)
