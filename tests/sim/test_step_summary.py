"""The figures of a step, with and without its timeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.timeline import SpanKind
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions
from lengthwise.sim.step_summary import summary
from lengthwise.sim.time_losses import Losses, losses
from tests.sim.plans import lane, make_plan, plans

PARTS = ("compute", "communicate", "bubble", "imbalance", "switch", "update")


@st.composite
def options(draw):
    return SimOptions(
        jitter=draw(st.sampled_from([0.0, 0.2])),
        stragglers=draw(st.sampled_from([{}, {0: 2.0}])),
        transfer_s=draw(st.sampled_from([0.0, 0.1])),
        overlap=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@given(plans(decreasing=False), options())
def test_summary_agrees_with_the_timeline(plan, options):
    short, timeline = summary(plan, options), simulate(plan, options)
    split = losses(timeline, plan)
    assert short.step_time_s == timeline.step_time_s
    assert short.peak_bytes == max(sample.num_bytes for sample in timeline.memory)
    assert short.idle == pytest.approx(timeline.idle_fraction, abs=1e-9)
    assert vars(short.losses) == pytest.approx(vars(split), abs=1e-9)
    waits_s = [timeline.time_s(SpanKind.WAIT, rank) for rank in range(timeline.num_ranks)]
    assert short.busy_s == pytest.approx([timeline.step_time_s - wait_s for wait_s in waits_s], abs=1e-9)


@given(plans(), options())
def test_losses_add_up_to_the_whole_step(plan, options):
    timeline = simulate(plan, options)
    split = losses(timeline, plan)
    assert sum(getattr(split, name) for name in PARTS) == pytest.approx(
        1.0 if summary(plan, options).step_time_s else 0
    )


def test_losses_tell_bubbles_from_imbalance_switches_from_communication():
    staged, short = lane(6.0, stages=2), lane(2.0, degree=2, comm=0.5)
    plan = make_plan([staged, short], [lane(), lane(2.0, degree=3)], switch_s=1.0, update_s=5.0)
    split = losses(simulate(plan), plan)
    total_s = 4 * (12 + 1 + 2 + 5)
    expected = {
        "compute": 12 + 2 + 6, "communicate": 2, "bubble": 12, "imbalance": 20 + 2, "switch": 4, "update": 20
    }  # fmt: skip
    assert {name: getattr(split, name) * total_s for name in PARTS} == pytest.approx(expected)


def test_padding_is_a_share_of_the_computed_tokens():
    plan = make_plan([lane(1.0, padded_to=20), lane(1.0)])
    assert losses(simulate(plan), plan).padding == pytest.approx(15 / 25)
    assert summary(plan).losses.padding == plan.padding_fraction


def test_a_step_without_time_loses_nothing():
    plan = make_plan([lane(), lane()], update_s=0.0)
    assert summary(plan).losses == losses(simulate(plan), plan) == Losses(**dict.fromkeys(PARTS, 0.0), padding=0.0)
