"""Closed forms of virtual time."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from lengthwise.core.timeline import SpanKind
from lengthwise.sim.engine import BUBBLE, IMBALANCE, SWITCH, simulate
from tests.sim.plans import STATE, lane, make_plan, plans

CLOSE = pytest.approx
"""Sums of a few floats in another order: 1e-6 relative, far above their rounding."""


def waits_s(timeline, name):
    """Seconds each rank waits."""
    found = [0.0] * timeline.num_ranks
    for span in timeline.spans:
        if span.kind is SpanKind.WAIT and span.name == name:
            found[span.rank] += span.duration_s
    return found


def test_one_device_takes_the_sum_and_never_waits():
    timeline = simulate(make_plan([lane(1.0, 2.0, 3.0)]))
    assert timeline.step_time_s == CLOSE(6.5)
    assert timeline.idle_fraction == CLOSE(0, abs=1e-12)
    assert timeline.time_s(SpanKind.WAIT) == 0


def test_simulated_time_is_the_planned_time_without_stages():
    plan = make_plan([lane(1.0, 2.5), lane(3.0, degree=2), lane(), lane(*[0.25] * 4)])
    assert simulate(plan).step_time_s == CLOSE(plan.time_s, rel=1e-12)


@given(plans())
def test_stages_never_take_longer_than_planned_when_micro_batches_get_shorter(plan):
    assert simulate(plan).step_time_s <= plan.time_s * (1 + 1e-9)


def test_faster_ranks_wait_for_the_slowest():
    timeline = simulate(make_plan([lane(4.0), lane(1.0), lane()]))
    assert waits_s(timeline, IMBALANCE) == CLOSE([0, 3, 4])
    assert timeline.idle_fraction == CLOSE(7 / 13.5)


def test_equal_loads_leave_no_idle():
    timeline = simulate(make_plan([lane(2.0), lane(1.0, 1.0), lane(0.5, 1.0, 0.5, degree=3)]))
    assert timeline.time_s(SpanKind.WAIT) == CLOSE(0, abs=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("recomputed", [0, 5, 12])
def test_equal_micro_batches_take_one_time_each_and_one_per_further_stage(stages, count, recomputed):
    plan = make_plan([lane(*[2.0] * count, stages=stages, recomputed=recomputed)], update_s=0.0)
    timeline = simulate(plan)
    assert timeline.step_time_s == CLOSE((stages - 1 + count) * 2.0)
    assert waits_s(timeline, BUBBLE) == CLOSE([(stages - 1) * 2.0] * stages)
    assert waits_s(timeline, IMBALANCE) == [0] * stages


def test_phases_and_the_switches_between_them_add_up():
    first, second, third = [lane(4.0), lane(1.0, degree=2)], [lane(2.0, stages=3)], [lane(0.5), lane(), lane()]
    plan = make_plan(first, second, third, switch_s=3.0, update_s=0.25)
    timeline = simulate(plan)
    assert timeline.step_time_s == CLOSE(4.0 + 1.5 + 3 * 2.0 + 1.5 + 0.5 + 0.25)
    switches = sorted((s.start_s, s.end_s, s.rank) for s in timeline.spans if s.name == SWITCH)
    assert switches == [CLOSE((start_s, start_s + 1.5, rank)) for start_s in (4.0, 11.5) for rank in range(3)]


def test_a_step_without_micro_batches_is_its_update():
    timeline = simulate(make_plan([lane(), lane(degree=2, stages=2)]))
    assert timeline.step_time_s == 0.5
    assert {span.kind for span in timeline.spans} == {SpanKind.UPDATE}
    assert {sample.num_bytes for sample in timeline.memory} == {STATE}


@given(plans(decreasing=False))
def test_every_rank_has_spans_without_gaps_from_the_start_to_the_end(plan):
    timeline = simulate(plan)
    for rank in range(timeline.num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        times_s = [0.0, *(time_s for span in spans for time_s in (span.start_s, span.end_s)), timeline.step_time_s]
        assert times_s[::2] == times_s[1::2]
        assert all(span.duration_s > 0 for span in spans)


@given(plans(decreasing=False))
def test_every_rank_computes_and_communicates_what_its_micro_batches_cost(plan):
    timeline = simulate(plan)
    for rank in range(timeline.num_ranks):
        mine = [m for p in plan.pipelines if rank in p.ranks for m in p.micro_batches]
        busy_s = timeline.time_s(SpanKind.COMPUTE, rank), timeline.time_s(SpanKind.COMMUNICATE, rank)
        comm_s = sum(m.comm_s for m in mine)
        assert busy_s == CLOSE((sum(m.time_s for m in mine) - comm_s, comm_s + plan.switch_s), abs=1e-9)


def test_ranks_of_a_stage_do_the_same():
    timeline = simulate(make_plan([lane(3.0, 2.0, 1.0, degree=3, stages=2, comm=0.2), lane(1.0)]))
    spans = [[replace(s, rank=0) for s in timeline.spans if s.rank == rank] for rank in range(7)]
    assert spans[0] == spans[1] == spans[2] != spans[3] == spans[4] == spans[5]
    memory = [[replace(m, rank=0) for m in timeline.memory if m.rank == rank] for rank in range(7)]
    assert memory[0] == memory[1] == memory[2] != memory[3] == memory[4] == memory[5]


def test_names_say_which_pass_of_which_micro_batch():
    timeline = simulate(make_plan([lane(3.0, 3.0, comm=0.5)], update_s=1.0))
    assert [(s.name, s.kind, s.duration_s) for s in timeline.spans] == [
        (name, kind, CLOSE(half_s))
        for name, half_s in [("forward 0", 0.5), ("backward 0", 1.0), ("forward 1", 0.5), ("backward 1", 1.0)]
        for kind in (SpanKind.COMPUTE, SpanKind.COMMUNICATE)
    ] + [("update", SpanKind.UPDATE, CLOSE(1.0))]


@given(plans(decreasing=False))
def test_memory_never_exceeds_what_the_plan_says(plan):
    timeline = simulate(plan)
    for rank in range(plan.num_used):
        peaks = [STATE, *(m.peak_bytes for p in plan.pipelines if rank in p.ranks for m in p.micro_batches)]
        held = [sample.num_bytes for sample in timeline.memory if sample.rank == rank]
        assert min(held) >= STATE and max(held) <= max(peaks)
        assert held[-1] == STATE


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_first_stage_of_a_full_pipeline_holds_what_the_plan_says_and_later_ones_less(stages):
    timeline = simulate(make_plan([lane(*[1.0] * 6, stages=stages, held=[1200] * 6)]))
    peaks = [max(m.num_bytes for m in timeline.memory if m.rank == rank) for rank in range(stages)]
    assert peaks == [STATE + 1200 * (stages - s) // stages for s in range(stages)]


def test_a_micro_batch_is_kept_from_the_start_of_its_forward_to_the_end_of_its_backward():
    timeline = simulate(make_plan([lane(3.0, 6.0, held=[500, 700])]))
    assert [(m.time_s, m.num_bytes) for m in timeline.memory] == [(0, 1500), (CLOSE(3), 1700), (CLOSE(9), 1000)]
    timeline = simulate(make_plan([lane(3.0, stages=2, held=[500])]))
    assert [(m.time_s, m.rank, m.num_bytes) for m in timeline.memory] == [
        (0, 0, 1250), (CLOSE(6), 0, 1000), (0, 1, 1000), (CLOSE(1), 1, 1250), (CLOSE(4), 1, 1000)
    ]  # fmt: skip


@given(plans(decreasing=False))
def test_memory_is_sampled_when_it_changes_and_at_the_start_of_phases(plan):
    timeline = simulate(plan)
    starts_s = {0.0, *(span.end_s for span in timeline.spans if span.name == SWITCH)}
    assert {sample.rank for sample in timeline.memory} == set(range(plan.num_used)), (
        "idle ranks have no pipeline's state"
    )
    for rank in range(plan.num_used):
        samples = [sample for sample in timeline.memory if sample.rank == rank]
        assert samples[0].time_s == 0 or all(rank not in pipeline.ranks for pipeline in plan.pipelines_of(0))
        if plan.switch_s or plan.num_phases == 1:
            for before, after in pairwise(samples):
                assert before.time_s < after.time_s
                assert before.num_bytes != after.num_bytes or after.time_s in starts_s
