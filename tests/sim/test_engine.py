"""Closed forms of virtual time."""

from dataclasses import replace

import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.plan import MicroBatch, Pipeline, StepPlan
from lengthwise.core.scheme import dense_scheme
from lengthwise.core.timeline import SpanKind
from lengthwise.sim.engine import simulate


def plan_of(*loads_s, update_s=0.5):
    """One dense pipeline per list of micro-batch seconds."""
    pipelines = tuple(
        Pipeline(
            ranks=(rank,),
            scheme=dense_scheme(2),
            micro_batches=tuple(
                MicroBatch(pack=Pack(ids=(100 * rank + i,), lengths=(5,)), time_s=time_s, peak_bytes=7)
                for i, time_s in enumerate(load)
            ),
        )
        for rank, load in enumerate(loads_s)
    )
    return StepPlan(
        step=4, policy="any", pipelines=pipelines, loss_normaliser=1, update_s=update_s,
        time_s=max(sum(load) for load in loads_s) + update_s, lower_bound_s=0.0,
    )  # fmt: skip


def test_one_device_takes_the_sum_and_never_waits():
    timeline = simulate(plan_of([1.0, 2.0, 3.0]))
    assert timeline.step_time_s == pytest.approx(6.5)
    assert timeline.idle_fraction == 0


def test_simulated_time_is_the_planned_time():
    plan = plan_of([1.0, 2.5], [3.0], [], [0.25] * 4)
    assert simulate(plan).step_time_s == pytest.approx(plan.time_s)


def test_faster_ranks_wait_for_the_slowest():
    timeline = simulate(plan_of([4.0], [1.0], []))
    assert [timeline.time_s(SpanKind.WAIT, rank) for rank in range(3)] == [0, 3, 4]
    assert timeline.idle_fraction == pytest.approx(7 / 13.5)


def test_equal_loads_leave_no_idle():
    assert simulate(plan_of([2.0], [1.0, 1.0])).idle_fraction == 0


def test_stages_are_refused_by_name():
    plan = plan_of([1.0], [1.0])
    staged = replace(dense_scheme(2), stage_layers=(1, 1))  # two devices of one pipeline
    pipeline = Pipeline(ranks=(0, 1), scheme=staged, micro_batches=())
    with pytest.raises(InputError, match="2 stages are not simulated yet"):
        simulate(replace(plan, pipelines=(pipeline,)))
