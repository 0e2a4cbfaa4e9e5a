"""Split backwards: weight passes fill the waits of 1F1B, which no stage's memory or end suffers from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import (
    PassTimes,
    least_stages,
    least_stages_in_any_order,
    most_weights_in,
    pipeline_end_s,
    run_stages,
)
from lengthwise.core.pass_order import PassKind
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.zero_bubble import filled_end_s, filled_orders, stage_times

LAYERS = 8
FORWARD, BACKWARD, WEIGHTS = PassKind


@st.composite
def packs(draw):
    """Times of micro-batches, the longest first, of which gradients of weights take up to a forward, or nothing."""
    recomputed, stages = draw(st.integers(0, LAYERS)), draw(st.integers(2, 8))
    scheme = replace(
        uniform_scheme(LAYERS, stages=stages, method=Method.DENSE, recomputed=recomputed), zero_bubble=True
    )
    times_s = sorted(draw(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)), reverse=True)
    forwards, split = 3 + recomputed / LAYERS, 1 - recomputed / LAYERS
    shares = st.lists(st.floats(0, 1) | st.just(1.0), min_size=len(times_s), max_size=len(times_s))
    weights_s = [t / forwards * split * share for t, share in zip(times_s, draw(shares))]
    forwards_s = [t / forwards for t in times_s]
    return scheme, PassTimes(forwards_s, [t - f for t, f in zip(times_s, forwards_s)], weights_s), times_s


@given(packs())
def test_a_stage_runs_each_pass_once_in_order_and_the_first_stage_splits_nothing(case):
    scheme, times, times_s = case
    for stage, order in enumerate(filled_orders(times, scheme.num_stages)):
        for kind in PassKind:  # messages between two stages arrive in the order they are sent
            is_there = [kind is not WEIGHTS or (stage > 0 and weights_s > 0) for weights_s in times.weights_s]
            assert [i for other, i in order if other is kind] == [i for i, there in enumerate(is_there) if there]
        for i in range(len(times_s)):
            places = [order.index((kind, i)) for kind in PassKind if (kind, i) in order]
            assert places == sorted(places)


@given(packs())
def test_no_stage_holds_more_micro_batches_than_the_first_one_does(case):
    scheme, times, _ = case
    for order in filled_orders(times, scheme.num_stages):
        split, held = {i for kind, i in order if kind is WEIGHTS}, 0
        for kind, i in order:
            held += {FORWARD: 1, BACKWARD: -(i not in split), WEIGHTS: -1}[kind]
            assert 0 <= held <= scheme.num_stages
        assert held == 0


@given(packs())
def test_a_pipeline_of_equal_stages_ends_with_the_last_pass_of_its_stages(case):
    scheme, times, times_s = case
    whole = PassTimes(times.forwards_s, times.backwards_s)
    end_s = max(passes[-1].end_s for passes in run_stages([whole] * scheme.num_stages))
    forwards = [3 + scheme.num_recomputed / LAYERS] * len(times_s)
    assert pipeline_end_s(times_s, forwards, scheme.num_stages) == pytest.approx(end_s, rel=1e-12)


@given(packs())
def test_a_split_pipeline_ends_no_later_than_1f1b_and_no_earlier_than_its_bound(case):
    scheme, times, times_s = case
    end_s = filled_end_s(times, scheme.num_stages)
    orders = filled_orders(times, scheme.num_stages)
    of_stages = [stage_times(times, stage) for stage in range(scheme.num_stages)]
    assert end_s == max(passes[-1].end_s for passes in run_stages(of_stages, orders=orders))
    forwards = [3 + scheme.num_recomputed / LAYERS] * len(times_s)
    assert end_s <= pipeline_end_s(times_s, forwards, scheme.num_stages) * (1 + 1e-9)
    assert sum(times_s) + (least_stages(scheme) - 1) * times_s[0] <= end_s * (1 + 1e-9)


@given(packs(), st.randoms())
def test_a_split_pipeline_in_any_order_ends_no_earlier_than_its_bound(case, rng):
    scheme, times, times_s = case
    order = rng.sample(range(len(times_s)), len(times_s))
    shuffled = PassTimes(*([of_pass[k] for k in order] for of_pass in times))
    least_s = sum(times_s) + (least_stages_in_any_order(scheme) - 1) * max(times_s)
    alone_s = (1 + (scheme.num_stages - 1) * (1 - most_weights_in(scheme.recompute))) * max(times_s)
    assert max(least_s, alone_s) <= filled_end_s(shuffled, scheme.num_stages) * (1 + 1e-9)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("weights_s", [1.0, 0.4])
def test_equal_micro_batches_leave_the_bubble_of_zb_h1(stages, weights_s):
    """(S - 1)(F + B - W) of forwards, input gradients and weight gradients of F, B and W (Qi et al. 2023, table 2)."""
    count = 2 * stages
    times = PassTimes([1.0] * count, [1.0 + weights_s] * count, [weights_s] * count)
    bubble_s = filled_end_s(times, stages) - count * (2.0 + weights_s)
    assert bubble_s == pytest.approx((stages - 1) * (2.0 - weights_s))


def test_the_last_stage_puts_off_most_and_a_middle_one_less():
    orders = filled_orders(PassTimes([1.0] * 6, [2.0] * 6, [1.0] * 6), 3)
    words = [" ".join("FBW"[kind] + str(i) for kind, i in order) for order in orders]
    assert words == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 F5 B4 W3 B5 W4 W5",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5",
    ]
