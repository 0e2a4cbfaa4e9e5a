"""Packs that grow where a pipeline begins and shrink where it ends: faster, exact, in the order of the plan."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lengthwise.core.one_f_one_b import pipeline_end_s
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.ramped_packs import Ramp, may_ramp, ramped, steepest_growth
from lengthwise.plan.space.split_backwards import ZeroBubble
from lengthwise.sim.engine import simulate
from tests.plan.costs import HiddenUpdates, SimpleCost, make_batch, make_problem

STAGES = 4


def problem_of(*, hides=False, zero_bubble=ZeroBubble.NONE, capacity=1000):
    cost = SimpleCost(c_s=0.01, capacity=capacity)
    return make_problem(
        HiddenUpdates(cost) if hides else cost, num_devices=STAGES, degrees=[1], stages=[STAGES],
        zero_bubble=zero_bubble, max_length=capacity,
    )  # fmt: skip


def in_equal_packs(problem, lengths, *, num_packs):
    """A draft plan of one pipeline, sequences dealt to its packs in turn."""
    packs = tuple(tuple(range(first, len(lengths), num_packs)) for first in range(num_packs))
    pipeline = PipelineDraft(candidate=problem.candidates[-1], ranks=tuple(range(STAGES)), packs=packs)
    return PricedBatch(problem, make_batch(lengths)), DraftPlan(phases=((pipeline,),))


@pytest.mark.parametrize(("stages", "growth"), [(2, 2.0), (3, (1 + 5**0.5) / 2), (8, 1.211)])
def test_packs_grow_as_fast_as_backwards_of_earlier_ones_hide_their_forwards(stages, growth):
    assert steepest_growth(stages) == pytest.approx(growth, rel=0.01)
    hidden = 2 * sum(steepest_growth(stages) ** -k for k in range(1, stages))
    assert hidden == pytest.approx(stages - 1, rel=1e-6)
    sizes = [steepest_growth(stages) ** k for k in range(12)]
    waits_s = pipeline_end_s(sizes, [3.0] * len(sizes), stages) - sum(sizes)
    steeper = [(1.5 * steepest_growth(stages)) ** k for k in range(12)]
    more_s = pipeline_end_s(steeper, [3.0] * len(steeper), stages) - sum(steeper)
    assert waits_s / sizes[-1] < more_s / steeper[-1]


def test_a_ramp_has_all_the_work_and_small_packs_at_both_ends():
    shares = Ramp(12, first=0.1, last=0.5).shares(STAGES)
    assert shares.sum() == pytest.approx(1) and shares[0] / shares.max() == pytest.approx(0.1)
    assert shares[-1] / shares.max() == pytest.approx(0.5)
    assert all(less <= more for less, more in pairwise(shares[: shares.argmax() + 1]))


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("zero_bubble", [ZeroBubble.NONE, ZeroBubble.ALL])
def test_ramps_are_faster_than_equal_packs_by_much_of_the_bubble(hides, zero_bubble):
    problem = problem_of(hides=hides, zero_bubble=zero_bubble)
    priced, draft = in_equal_packs(problem, [20] * 120, num_packs=8)
    option, option_s = ramped(priced, draft)
    assert option_s == time_s(priced, option) < 0.95 * time_s(priced, draft)
    ((pipeline,),) = option.phases
    assert sorted(position for pack in pipeline.packs for position in pack) == list(range(120))
    tokens = [20 * len(pack) for pack in pipeline.packs]
    assert pipeline.is_in_order and tokens[0] < max(tokens) / 2 and max(tokens) <= pipeline.candidate.max_tokens
    assert time_s(priced, replace(option, phases=((replace(pipeline, is_in_order=False),),))) > option_s


def test_no_pack_of_a_ramp_is_larger_than_memory():
    problem = problem_of(capacity=100)
    priced, draft = in_equal_packs(problem, [20] * 60, num_packs=12)
    option, option_s = ramped(priced, draft)
    assert option_s <= time_s(priced, draft)
    assert max(20 * len(pack) for pack in option.phases[0][0].packs) <= 100


def test_ramps_are_left_out_where_packs_have_sizes_slices_or_one_stage():
    problem = problem_of()
    priced, draft = in_equal_packs(problem, [20] * 24, num_packs=4)
    assert may_ramp(priced, draft) and not may_ramp(priced, draft, most_s=1e-6), "it may not be worth the search"
    ((pipeline,),) = draft.phases
    for other in (
        replace(pipeline, padded_to=(20,) * 4),
        replace(pipeline, candidate=pipeline.candidate.in_slices(4)),
        replace(pipeline, runs=(pipeline.candidate, *[replace(pipeline.candidate)] * 3)),
    ):
        assert not may_ramp(priced, DraftPlan(phases=((other,),)))
    alone = make_problem(SimpleCost(), num_devices=1)
    assert not may_ramp(*in_equal_packs(alone, [20] * 24, num_packs=4))


@pytest.mark.parametrize("zero_bubble", [ZeroBubble.NONE, ZeroBubble.ALL])
def test_auto_plans_ramps_and_the_simulator_comes_to_its_seconds(zero_bubble):
    rng = np.random.default_rng(0)
    batch = make_batch(rng.integers(5, 40, 100))
    plan = Planner(policy="auto", problem=problem_of(zero_bubble=zero_bubble))(batch)
    (pipeline,) = plan.pipelines
    times_s = [m.time_s for m in pipeline.micro_batches]
    assert times_s[0] < max(times_s) / 2, "the longest comes later"
    assert simulate(plan).step_time_s == pytest.approx(plan.time_s, rel=1e-12)
    assert plan.lower_bound_s <= plan.time_s
