"""Noise, slow ranks and hidden updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.timeline import SpanKind
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions
from tests.sim.plans import lane, make_plan, plans

HALF_OFF = 4.0
"""Standard errors that a mean of draws may be off; one in 16,000 seeds would be."""


@given(plans(), st.integers(0, 3), st.sampled_from([0.0, 0.2]))
def test_equal_seeds_give_equal_timelines(plan, seed, jitter):
    options = SimOptions(jitter=jitter, seed=seed)
    assert simulate(plan, options) == simulate(plan, options)


@given(plans(), st.integers(0, 3))
def test_without_jitter_the_seed_does_not_matter(plan, seed):
    assert simulate(plan, SimOptions(seed=seed)) == simulate(plan)


def test_other_seeds_and_other_steps_draw_other_times():
    def time_s(seed, step):
        return simulate(make_plan([lane(1.0, 1.0)], step=step), SimOptions(jitter=0.1, seed=seed)).step_time_s

    assert len({time_s(seed, step) for seed in range(3) for step in range(3)}) == 9


def test_jitter_is_lognormal_with_mean_one():
    sigma, count = 0.3, 4000
    timeline = simulate(make_plan([lane(*[3.0] * count)], update_s=0.0), SimOptions(jitter=sigma))
    forwards_s = np.array([s.duration_s for s in timeline.spans if s.name.startswith("forward")])
    assert np.log(forwards_s).std() == pytest.approx(sigma, rel=HALF_OFF / np.sqrt(2 * count))
    assert forwards_s.mean() == pytest.approx(1.0, rel=HALF_OFF * sigma / np.sqrt(count))


@given(st.sampled_from([1.0, 1.5, 7.0]), st.integers(0, 2))
def test_a_straggler_slows_a_plan_of_one_stage_by_exactly_its_factor(factor, rank):
    plan = make_plan([lane(3.0, 2.0, 1.0, degree=3, comm=0.2)], update_s=0.0)
    assert simulate(plan, SimOptions(stragglers={rank: factor})).step_time_s == pytest.approx(6.0 * factor)


@given(plans(), st.sampled_from([1.5, 4.0]))
def test_when_every_rank_is_slow_so_is_the_whole_computation(plan, factor):
    slow = simulate(plan, SimOptions(stragglers=dict.fromkeys(range(plan.num_devices), factor)))
    fixed_s = plan.switch_s + plan.update_s
    assert slow.step_time_s - fixed_s == pytest.approx(factor * (simulate(plan).step_time_s - fixed_s), abs=1e-9)


@given(plans(), st.sampled_from([1.5, 4.0]), st.data())
def test_one_straggler_costs_between_nothing_and_its_factor(plan, factor, data):
    rank = data.draw(st.integers(0, plan.num_devices - 1))
    plain_s = simulate(plan).step_time_s
    slow_s = simulate(plan, SimOptions(stragglers={rank: factor})).step_time_s
    assert plain_s * (1 - 1e-9) <= slow_s <= plain_s * factor * (1 + 1e-9)


def test_a_slow_stage_sets_the_pace_of_its_pipeline_and_of_no_other():
    plan = make_plan([lane(*[1.0] * 50, stages=2), lane(*[1.0] * 10)], update_s=0.0)
    timeline = simulate(plan, SimOptions(stragglers={1: 2.0}))
    assert timeline.step_time_s == pytest.approx(101)  # forward and backward of the first stage only at both ends
    assert timeline.time_s(SpanKind.COMPUTE, 0) == pytest.approx(50)
    assert timeline.time_s(SpanKind.COMPUTE, 2) == pytest.approx(10)


def test_an_update_hides_beneath_the_first_forward_and_the_last_backward_and_no_longer():
    def update_s(update_s, overlap):
        plan = make_plan([lane(6.0, 3.0), lane(1.0)], update_s=update_s)
        return simulate(plan, SimOptions(overlap=overlap)).time_s(SpanKind.UPDATE, rank=0)

    assert update_s(2.0, 0.0) == pytest.approx(2.0)
    assert update_s(2.0, 0.5) == pytest.approx(1.0)
    assert update_s(2.0, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert update_s(10.0, 1.0) == pytest.approx(6.0)  # a forward of 2 s and a backward of 2 s cover 4 s


def test_nothing_hides_an_update_without_micro_batches():
    assert simulate(make_plan([lane()]), SimOptions(overlap=1.0)).step_time_s == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jitter": -0.1}, "jitter must be finite and at least 0, not -0.1"),
        ({"jitter": float("nan")}, "jitter must be finite"),
        ({"transfer_s": float("inf")}, "transfer_s must be finite"),
        ({"overlap": 1.5}, "between 0 and 1, not 1.5"),
        ({"seed": -1}, "seed must be between 0"),
        ({"stragglers": {3: 0.5}}, "straggler 3 must be slower by a finite factor of at least 1, not 0.5"),
    ],
)
def test_options_outside_their_range_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        SimOptions(**changes)


def test_a_straggler_that_is_no_rank_is_refused():
    with pytest.raises(InputError, match="no rank 2 to be slow: the plan of step 4 has 2 ranks, 0 to 1"):
        simulate(make_plan([lane(1.0), lane(1.0)]), SimOptions(stragglers={2: 2.0}))
