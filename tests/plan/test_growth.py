"""What planning costs grows about as a step does, not with its square: operations are counted, not seconds."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.one_f_one_b import pipeline_end_s
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.heterogeneous.propose.planned import MOST_PLANNED, PlannedSteps, price_steps
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import POLICIES, prepare
from lengthwise.plan.solve.shop import Machines, Objective, schedule
from lengthwise.plan.solve.shop.exchange_moves import MOST_JOBS, MOST_PAIRS, Assignment, _few_jobs, estimating
from lengthwise.plan.solve.shop.model import make_problem as make_shop
from lengthwise.plan.solve.shop.pack import fewest_conceivable, pack, spread
from lengthwise.plan.space import draft_times
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.search_space import FEWEST_SAMPLES, NUM_SAMPLES, SAMPLED_SEQUENCES, lengths_of
from lengthwise.plan.uniform.padded import step_s
from lengthwise.plan.uniform.tune import tiling_candidates

from .costs import make_batch, make_problem

FEW, TIMES = 800, 4
MOST_GROWTH = 1.6 * TIMES
"""Of operations, where jobs grow ``TIMES``-fold: what sorting and searching add, far from ``TIMES`` squared."""


def lengths_of_step(count, *, longest=100, seed=0):
    return np.clip(np.exp(np.random.default_rng(seed).normal(2.5, 0.8, count)), 1, longest).astype(np.int64)


def calls(run):
    """How many functions are called, Python's and others."""
    count = 0

    def tick(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_four_times_as_large_takes_about_four_times_as_many_operations(policy):
    problem = make_problem(
        num_devices=8, samples=[lengths_of_step(FEW, seed=seed) for seed in range(2)], recomputed=(0, 4),
        methods=(Method.ULYSSES, Method.RING), stages=(1, 2),
    )  # fmt: skip
    prepare(policy, problem)
    planner = Planner(policy=policy, problem=problem)
    counts = []
    for size in (FEW, TIMES * FEW):
        batch = make_batch(lengths_of_step(size, seed=9))
        counts.append(calls(lambda batch=batch: planner.plan(PricedBatch(problem, batch)).to_json()))
    assert counts[1] < MOST_GROWTH * counts[0], counts


@pytest.mark.deep
def test_a_plan_that_training_waits_for_takes_fewer_operations_and_is_hardly_slower():
    problem = make_problem(
        num_devices=8, samples=[lengths_of_step(200, seed=seed) for seed in range(4)], recomputed=(0, 4),
        methods=(Method.ULYSSES, Method.RING), stages=(1, 2),
    )  # fmt: skip
    waited = replace(problem, is_waited_for=True)
    batches = [make_batch(lengths_of_step(200, seed=seed)) for seed in range(10, 12)]
    times_s, counts = [], []
    for asked in (problem, waited):
        planner = Planner(policy="auto", problem=asked)
        plans = [planner(batch) for batch in batches]  # and prepared
        times_s.append([plan.time_s for plan in plans])
        counts.append(calls(lambda planner=planner: [planner(batch) for batch in batches]))
    assert counts[1] < 0.5 * counts[0], counts
    assert all(late_s <= early_s * 1.02 for early_s, late_s in zip(*times_s)), times_s


def test_padding_is_tuned_without_a_schedule_of_every_pipeline(monkeypatch):
    """The flow shop says which pipelines cannot be the slowest, and which set-ups cannot be the fastest."""
    samples = [lengths_of_step(800, seed=seed) for seed in range(4)]
    problem = make_problem(num_devices=64, samples=samples, stages=(2, 4))
    setups = [(candidate, size) for candidate in tiling_candidates(problem, policy="padded") for size in (1, 2, 4)]
    scheduled = []
    monkeypatch.setattr(draft_times, "pipeline_end_s", lambda *of: scheduled.append(of) or pipeline_end_s(*of))
    batch = PricedBatch(problem, make_batch(samples[0]))
    for candidate, size in setups:
        every_s = []
        for number in range(pipelines := problem.num_devices // candidate.num_devices):
            starts = range(number * size, len(samples[0]), pipelines * size)
            packs = [samples[0][start : start + size] for start in starts]
            times_s = [float(candidate.times_s(pack.max(keepdims=True))[0]) * len(pack) for pack in packs]
            times_s = sorted((time_s + candidate.overhead_s for time_s in times_s), reverse=True)
            every_s.append(pipeline_end_s(times_s, [candidate.forwards] * len(times_s), candidate.num_stages))
        assert step_s(batch, candidate, size=size) == pytest.approx(max(every_s), rel=1e-12)
    assert len(scheduled) < len(setups) * 8  # of 16 or 32 pipelines each
    scheduled.clear()
    prepare("padded", problem)
    assert len(scheduled) < 64


class Counted(int):
    """A size that counts what it is compared with."""

    compared = 0
    __hash__ = int.__hash__


def _counting(name):
    compare = getattr(int, name)

    def counted(self, other):
        Counted.compared += 1
        return compare(self, other)

    return counted


for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"):
    setattr(Counted, name, _counting(name))


def comparisons(run):
    Counted.compared = 0
    run()
    return Counted.compared


@pytest.mark.parametrize(
    "sizes",
    [
        lambda count: np.sort(np.random.default_rng(0).integers(1, 600, count))[::-1],
        lambda count: np.full(count, 300),
        lambda count: np.repeat([700, 290, 11], count // 3),
        lambda count: np.repeat([1000, 1], [count // 10, count - count // 10]),
    ],
)
def test_spreading_jobs_over_batches_compares_each_size_a_few_times(sizes):
    counts = []
    for count in (1200, 4800):
        each = list(map(Counted, sizes(count).tolist()))
        work = [1.0] * count  # so that batches that are full are not those of most work
        for spare in (0, 1):  # the least number of batches has hardly room, one more has
            batches = -(-sum(map(int, each)) // 1000) + spare * count // 50
            counts.append(comparisons(lambda each=each, work=work, batches=batches: spread(work, each, batches, 1000)))
    assert counts[2] < 5 * counts[0] + 50 and counts[3] < 5 * counts[1] + 50, counts


def test_a_batch_set_aside_takes_smaller_jobs_later():
    """Longest first onto the least work that has room, as told job by job; the reference looks at every batch."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        sizes = np.sort(rng.integers(1, 60, int(rng.integers(3, 40))))[::-1].tolist()
        work = np.sort(rng.random(len(sizes)))[::-1].tolist()
        count = max(2, -(-sum(sizes) // 90))
        loads, room, expected = [0.0] * count, [90] * count, []
        for value, size in zip(work, sizes):
            open_ = [batch for batch in range(count) if room[batch] >= size]
            if not open_:
                break
            chosen = min(open_, key=lambda batch: (loads[batch], batch))
            loads[chosen], room[chosen] = loads[chosen] + value, room[chosen] - size
            expected.append(chosen)
        if len(expected) == len(sizes) and count < len(sizes):
            batches = [[job for job, batch in enumerate(expected) if batch == number] for number in range(count)]
            assert spread(work, sizes, count, 90) == [batch for batch in batches if batch]


def test_numbers_of_batches_that_cannot_hold_the_jobs_are_not_tried(monkeypatch):
    """Jobs of 60 % and of 40 % of the capacity: from the total, two fifths of the batches look enough."""
    tried = []
    module = sys.modules[pack.__module__]
    monkeypatch.setattr(module, "spread", lambda *arguments: tried.append(arguments[2]) or spread(*arguments))
    for size, together in ((60, 1), (40, 2)):
        assert fewest_conceivable([size] * 4000, 100) == 4000 // together
        tried.clear()
        machines = Machines(count=1, stages=4, setup=1.0, capacity=100)
        _, batches = pack([1.0] * 4000, [size] * 4000, machines, objective=Objective.FLOW_SHOP)
        assert len(batches) >= 4000 // together and len(tried) < 20


def test_of_many_jobs_few_pairs_are_looked_at_and_the_schedule_is_as_good():
    sizes = lengths_of_step(2 * MOST_JOBS, longest=5000, seed=1)
    work = (sizes + 1e-3 * sizes**2)[None, :].astype(float)
    machines = [Machines(count=3, setup=5.0, capacity=20_000)]
    problem = make_shop(work, sizes, machines, objective=Objective.FLOW_SHOP)
    jobs = [list(range(start, len(sizes), 3)) for start in range(3)]
    assignment = Assignment(problem, jobs, estimating(problem))
    few = _few_jobs(assignment, 0, [1, 2])
    assert len(few[0]) * (len(few[1]) + len(few[2])) <= MOST_PAIRS
    assert all(few[machine][:2] == jobs[machine][:2] and set(few[machine]) <= set(jobs[machine]) for machine in few)
    small = make_shop(work[:, :MOST_JOBS], sizes[:MOST_JOBS], machines, objective=Objective.FLOW_SHOP)
    assert _few_jobs(Assignment(small, [[0, 1, 2], [3, 4], []], estimating(small)), 0, [1, 2])[0] == [0, 1, 2]
    found = schedule(work, sizes, machines)
    assert found.makespan < found.lower_bound * 1.001


def test_large_steps_are_bounded_not_planned_while_strategies_are_compared():
    problem = make_problem(num_devices=4)
    steps = [lengths_of_step(size, longest=20) for size in (200, MOST_PLANNED + 1)]
    planned = PlannedSteps(problem, price_steps(problem, steps)).under(
        [(problem.leanest, problem.num_devices // problem.leanest.num_devices)]
    )
    assert planned.time_s(0) > planned.bound_s(0)
    assert planned.time_s(1) == planned.bound_s(1)


def test_fewer_batches_are_samples_where_they_are_large():
    small, large = make_batch([1]), make_batch([1] * (SAMPLED_SEQUENCES // 4))
    assert len(list(lengths_of(small for _ in range(99)))) == NUM_SAMPLES
    assert len(list(lengths_of(large for _ in range(99)))) == FEWEST_SAMPLES
