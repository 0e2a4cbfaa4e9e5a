"""Pipelines do no more work by the time they end than their room says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import PassTimes, pipeline_end_s
from lengthwise.core.sliced_passes import sliced_end
from lengthwise.core.zero_bubble import filled_end_s
from lengthwise.plan.bounds.micro_batch_room import MicroBatchRoom
from lengthwise.plan.space.split_backwards import ZeroBubble
from tests.plan.costs import SimpleCost, make_problem

WORK_S = st.floats(-3, 0).map(lambda power: 10.0**power)


def room_of(candidate, problem):
    later = problem.bounding_stages(candidate, in_any_order=True) - 1.0
    return MicroBatchRoom.of([[candidate]], [later])


@given(
    st.lists(WORK_S, min_size=1, max_size=10), st.sampled_from([1, 2, 4]), st.sampled_from([0, 2, 4]),
    st.sampled_from([0.0, 0.01, 0.3]), st.booleans(),
)  # fmt: skip
def test_whole_micro_batches_do_no_more_than_there_is_room_for(works_s, stages, recomputed, overhead_s, is_split):
    cost = SimpleCost(c_s=overhead_s * stages)
    kind = ZeroBubble.AUTO if is_split else ZeroBubble.NONE
    problem = make_problem(cost, degrees=[1], stages=[stages], recomputed=(recomputed,), zero_bubble=kind)
    candidate = max(problem.candidates, key=lambda candidate: candidate.scheme.zero_bubble)
    times_s, forwards = np.array(works_s) + candidate.overhead_s, candidate.forwards
    end_s = pipeline_end_s(times_s.tolist(), [forwards] * len(works_s), stages)
    if candidate.scheme.zero_bubble:
        weights_s = (np.array(works_s) * candidate.most_weights).tolist()
        passes = PassTimes((times_s / forwards).tolist(), (times_s * (1 - 1 / forwards)).tolist(), weights_s)
        end_s = filled_end_s(passes, stages)
    room_s = room_of(candidate, problem).work_s(end_s, np.array([[max(works_s)]]))
    assert sum(works_s) <= room_s[0, 0] * (1 + 1e-9) + 1e-9


@given(
    st.lists(st.tuples(WORK_S, st.integers(1, 8)), min_size=1, max_size=6), st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([0.0, 0.01, 0.1]),
)  # fmt: skip
def test_slices_do_no_more_than_there_is_room_for(micro_batches, stages, overhead_s):
    """Slices of equal work, the longest micro-batch first; all memory there is."""
    num_slices = max(2, max(count for _, count in micro_batches))
    micro_batches = sorted(micro_batches, reverse=True)
    longest_s, _ = micro_batches[0]
    micro_batches[0] = longest_s, num_slices
    cost = SimpleCost(c_s=overhead_s * num_slices * stages)
    problem = make_problem(cost, num_devices=stages, num_layers=8, degrees=[1], stages=[stages])
    candidate = problem.candidates[0].in_slices(num_slices)
    assert candidate.overhead_s == pytest.approx(overhead_s * num_slices)
    slices_s = [work_s / count + overhead_s for work_s, count in micro_batches for _ in range(count)]
    forwards_s = [time_s / 3 for time_s in slices_s]
    passes = PassTimes(forwards_s, [2 * forward_s for forward_s in forwards_s], [0.0] * len(slices_s))
    counts = [count for _, count in micro_batches]
    end = sliced_end(counts, passes, [1] * len(slices_s), limit_bytes=10**6, num_stages=stages)
    room = room_of(candidate, problem)
    work_s = sum(work_s for work_s, _ in micro_batches)
    assert work_s <= room.work_s(end.end_s, np.array([[longest_s]]))[0, 0] * (1 + 1e-9) + 1e-9
    assert sum(slices_s) - overhead_s * (sum(counts) - num_slices) <= room.busy_s(end.end_s, 0) * (1 + 1e-9) + 1e-9


def test_a_pipeline_of_one_stage_has_the_overhead_of_one_micro_batch_at_least():
    problem = make_problem(SimpleCost(c_s=0.5), degrees=[1], stages=[1])
    assert room_of(problem.candidates[0], problem).work_s(3.0, np.array([[1.0]])) == pytest.approx(2.5)


def test_many_stages_have_room_for_less_than_they_have_time_for():
    """Of four stages and micro-batches of 0.05 s more, whichever number of them there is."""
    problem = make_problem(SimpleCost(c_s=0.2), degrees=[1], stages=[4])
    (room_s,) = room_of(problem.candidates[0], problem).work_s(2.0, np.array([[0.0]]))[0].tolist()
    best_s = max(
        2.0 - (count + 3) * 0.05 - 3 * (2.0 / (count + 3) - 0.05) for count in range(1, 30)
    )  # equal micro-batches
    assert best_s < room_s < 1.6
