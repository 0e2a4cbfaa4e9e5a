"""The bubble of 1F1B is at least its backwards, and at most the flow shop's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import (
    MIXED_RECOMPUTE,
    forwards_in,
    least_stages,
    least_stages_in_any_order,
    pipeline_end_s,
)
from lengthwise.core.pipeline_config import Method, uniform_scheme

LAYERS = 8
times = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)


def scheme_of(stages, recomputed):
    return uniform_scheme(LAYERS, degree=1, stages=stages, method=Method.DENSE, recomputed=recomputed)


@given(times, st.integers(1, 8), st.integers(0, LAYERS))
def test_a_pipeline_ends_between_its_bound_and_the_flow_shop(times_s, stages, recomputed):
    times_s = sorted(times_s, reverse=True)
    scheme = scheme_of(stages, recomputed)
    end_s = pipeline_end_s(times_s, [forwards_in(scheme.recompute)] * len(times_s), stages)
    least_s = sum(times_s) + (least_stages(scheme) - 1) * times_s[0]
    assert max(least_s, stages * times_s[0]) <= end_s * (1 + 1e-9)
    assert end_s <= (sum(times_s) + (stages - 1) * times_s[0]) * (1 + 1e-9)


@given(times, st.integers(1, 8), st.integers(0, LAYERS))
def test_a_pipeline_ends_no_earlier_than_its_bound_for_any_order(times_s, stages, recomputed):
    scheme = scheme_of(stages, recomputed)
    end_s = pipeline_end_s(times_s, [forwards_in(scheme.recompute)] * len(times_s), stages)
    least_s = sum(times_s) + (least_stages_in_any_order(scheme) - 1) * max(times_s)
    assert max(least_s, stages * max(times_s)) <= end_s * (1 + 1e-9)


def test_micro_batches_before_and_behind_the_longest_hide_what_the_first_would_wait_for():
    """Of its backward only what is longer than a forward is then waited for: a third, not two."""
    times_s, scheme = [0.25, 0.5, 1.0, 1.0, 1.0, 0.6], scheme_of(2, 0)
    first_s = pipeline_end_s(sorted(times_s, reverse=True), [3.0] * len(times_s), 2) - sum(times_s)
    within_s = pipeline_end_s(times_s, [3.0] * len(times_s), 2) - sum(times_s)
    assert least_stages_in_any_order(scheme) - 1 == pytest.approx(1 / 3)
    assert 1 / 3 <= within_s < 0.56 and first_s > 0.65


@given(st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(3.0, 4.0)), min_size=1, max_size=12), st.integers(1, 8))
def test_mixed_recompute_exceeds_the_flow_shop_by_at_most_a_twelfth(packs, stages):
    times_s, forwards = zip(*sorted(packs, reverse=True))
    flow_s = sum(times_s) + (stages - 1) * times_s[0]
    assert pipeline_end_s(times_s, forwards, stages) <= flow_s * MIXED_RECOMPUTE * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "recomputed"), [(2, 0), (4, 0), (2, LAYERS)])
def test_micro_batches_that_get_slowly_shorter_leave_only_the_backwards_idle(stages, recomputed):
    times_s = [1 - k / 500 for k in range(500)]
    scheme = scheme_of(stages, recomputed)
    end_s = pipeline_end_s(times_s, [forwards_in(scheme.recompute)] * len(times_s), stages)
    assert end_s - sum(times_s) == pytest.approx(least_stages(scheme) - 1, rel=0.02)
