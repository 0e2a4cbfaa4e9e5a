"""No pipeline ends sooner than its linear program says, and the programs' optima are those that are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import PassTimes, pipeline_end_s
from lengthwise.core.zero_bubble import filled_end_s
from lengthwise.plan.bounds.least_ends import COUNTS, FORWARDS, STAGES, WEIGHTS, least_ends
from lengthwise.plan.bounds.least_ends_program import solved

SHARE = st.floats(-3, 0).map(lambda power: 10.0**power)


@given(st.lists(SHARE, min_size=1, max_size=12), st.sampled_from(STAGES), st.floats(3.0, 4.0), st.floats(0.0, 1 / 3))
def test_no_sizes_of_micro_batches_end_sooner(sizes, num_stages, forwards, weights):
    times_s = np.array(sizes)
    number = next(place for place, count in enumerate(COUNTS) if len(sizes) <= count)
    least_s = float(least_ends(num_stages, (forwards, forwards), 0.0)[number]) * times_s.sum()
    assert least_s <= pipeline_end_s(times_s.tolist(), [forwards] * len(sizes), num_stages) * (1 + 1e-9)
    forwards_s = times_s / forwards
    passes = PassTimes(forwards_s.tolist(), (times_s - forwards_s).tolist(), (times_s * weights).tolist())
    least_split_s = float(least_ends(num_stages, (forwards, forwards), weights)[number]) * times_s.sum()
    assert times_s.sum() * (1 - 1e-9) <= least_split_s <= least_s
    assert least_split_s <= filled_end_s(passes, num_stages) * (1 + 1e-9)


@given(st.lists(st.tuples(SHARE, st.floats(3.0, 4.0)), min_size=2, max_size=10), st.sampled_from([2, 3, 4]))
def test_nor_do_micro_batches_that_recompute_differently(of_each, num_stages):
    times_s, forwards = map(list, zip(*of_each))
    number = next(place for place, count in enumerate(COUNTS) if len(times_s) <= count)
    least_s = float(least_ends(num_stages, (3.0, 4.0), 0.0)[number]) * sum(times_s)
    assert least_s <= pipeline_end_s(times_s, forwards, num_stages) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_stages", "forwards", "weights", "count"),
    [
        (STAGES[stages], FORWARDS[pair], WEIGHTS[weights], COUNTS[count])
        for stages, pair, weights, count in [(0, 0, 0, 3), (1, 5, 7, 6), (2, 2, 4, 8), (4, 1, 2, 7), (6, 0, 6, 9)]
    ],
)
def test_the_kept_optima_are_those_of_the_programs(num_stages, forwards, weights, count):
    optimum = least_ends(num_stages, forwards, weights)[COUNTS.index(count)]
    assert optimum == pytest.approx(solved(num_stages, forwards, weights, count), abs=2e-6)


def test_a_micro_batch_alone_goes_through_all_stages_one_after_another():
    for num_stages in STAGES:
        assert least_ends(num_stages, (3.0, 3.0), 0.0)[0] == pytest.approx(num_stages, abs=1e-5)


def test_more_micro_batches_never_end_later_and_more_split_weights_neither():
    for num_stages in STAGES:
        ends = np.array([least_ends(num_stages, (3.0, 3.0), weights) for weights in WEIGHTS])
        assert (np.diff(ends, axis=1) <= 2e-6).all()
        assert (np.diff(ends, axis=0) <= 2e-6).all()


def test_of_more_stages_than_are_kept_nothing_is_claimed():
    assert (least_ends(STAGES[-1] + 1, (3.0, 3.0), 0.0) == 1.0).all()
