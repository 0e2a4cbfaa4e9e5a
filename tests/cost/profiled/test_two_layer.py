"""Whole-model costs from two layers obey DCP's equations, with the fewest recomputed layers that fit."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.pipeline_config import Method, dense_scheme
from lengthwise.core.specs import GIB
from lengthwise.cost.profiled.two_layer import LayerProfile, TwoLayerCost, from_two_layers
from tests.cost.profiles import CLUSTER, MODEL, scheme_of

PROFILE = LayerProfile(
    forward_s=2.0, backward_s=4.0, constant_s=1.0, kept_bytes=100.0, input_bytes=10.0, constant_bytes=1000.0
)


def test_times_follow_equations_4_and_5():
    assert PROFILE.time_s(10, 0) == 10 * 6 + 1
    assert PROFILE.time_s(10, 3) == 10 * 6 + 3 * 2 + 1
    assert PROFILE.time_s(10, 10) == 10 * (2 * 2 + 4) + 1


def test_bytes_follow_equation_6_and_count_the_layer_alive_again():
    assert PROFILE.peak_bytes(10, 0) == 10 * 100 + 10 * 10 + 1000
    assert PROFILE.peak_bytes(10, 3) == (7 + 1) * 100 + 10 * 10 + 1000
    assert PROFILE.peak_bytes(10, 10) == 100 + 10 * 10 + 1000


@given(st.integers(1, 40), st.floats(1, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 5e10, allow_nan=False))
def test_the_fewest_recomputed_layers_are_the_first_count_that_fits(layers, kept, inputs, constant, memory):
    profile = LayerProfile(
        forward_s=1, backward_s=1, constant_s=0, kept_bytes=kept, input_bytes=inputs, constant_bytes=constant
    )
    fitting = [r for r in range(layers + 1) if profile.peak_bytes(layers, r) <= memory]
    closest = min(abs(profile.peak_bytes(layers, r) - memory) for r in range(layers + 1))
    assume(closest > 1e-6 * memory)  # where it fits to the bit, rounding decides
    if fitting:
        assert profile.fewest_recomputed(layers, memory) == fitting[0]
    else:
        with pytest.raises(InfeasibleError, match="with every one recomputed"):
            profile.fewest_recomputed(layers, memory)


def test_fewest_recomputed_is_exact_at_the_limit():
    for recomputed in (0, 2, 5, 10):
        assert PROFILE.fewest_recomputed(10, PROFILE.peak_bytes(10, recomputed)) == recomputed


def test_two_layers_give_back_the_profile_they_came_from():
    assert (
        from_two_layers(
            iteration_s=PROFILE.time_s(2, 2),
            peak_bytes=PROFILE.peak_bytes(2, 2),
            forward_s=PROFILE.forward_s,
            backward_s=PROFILE.backward_s,
            kept_bytes=PROFILE.kept_bytes,
            input_bytes=PROFILE.input_bytes,
        )
        == PROFILE
    )


def test_layers_that_take_longer_than_their_iteration_are_refused():
    with pytest.raises(InputError, match="negative times"):
        from_two_layers(iteration_s=1, peak_bytes=9, forward_s=2, backward_s=2, kept_bytes=1, input_bytes=1)


def measured(length, degree):
    """A layer of 1e-9 l^2 + 1e-6 l seconds forward, twice that backward, over ``degree`` devices."""
    forward_s = (1e-9 * length**2 + 1e-6 * length) / degree
    return LayerProfile(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        constant_s=1e-3,
        kept_bytes=1000 * length / degree,
        input_bytes=100 * length / degree,
        constant_bytes=GIB,
    )


LENGTHS = (128, 512, 2048, 8192)
COST = TwoLayerCost(
    {degree: {length: measured(length, degree) for length in LENGTHS} for degree in (1, 2)},
    model=MODEL,
    cluster=CLUSTER,
)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("recomputed", [0, 1, 4])
def test_measured_lengths_cost_what_the_equations_say(degree, recomputed):
    scheme = scheme_of(MODEL, Method.ULYSSES, degree, recomputed=recomputed)
    for length in LENGTHS:
        profile = measured(length, degree)
        assert COST.time_s([length], scheme) == pytest.approx(profile.time_s(4, recomputed))
        assert int(COST.peak_bytes(length, scheme, num_devices=2)) == int(profile.peak_bytes(4, recomputed))
    assert COST.time_s([128, 2048], scheme) == pytest.approx(
        COST.time_s([128], scheme) + COST.time_s([2048], scheme) - COST.overhead_s(scheme)
    )


def test_lengths_beyond_the_profile_grow_as_a_quadratic_does():
    scheme = dense_scheme(4)
    far = 65_536
    expected = 4 * 3 * measured(far, 1).forward_s
    assert COST.sequence_times_s(np.array([far]), scheme)[0] == pytest.approx(expected)


@given(st.integers(1, 10**5), st.integers(1, 1000))
def test_times_and_bytes_grow_between_measured_lengths(length, more):
    scheme = scheme_of(MODEL, Method.ULYSSES, 2, recomputed=2)
    assert COST.time_s([length + more], scheme) > COST.time_s([length], scheme)
    few, many = COST.peak_bytes([length, length + more], scheme, num_devices=2)
    assert few < many


def test_one_profiled_length_is_enough_to_answer():
    cost = TwoLayerCost({1: {512: measured(512, 1)}}, model=MODEL, cluster=CLUSTER)
    half, whole, twice = cost.sequence_times_s(np.array([256, 512, 1024]), dense_scheme(4))
    assert (half, twice) == pytest.approx((whole / 2, whole * 2))


def test_what_was_not_profiled_is_refused():
    for scheme in (scheme_of(MODEL, Method.ULYSSES, 4), scheme_of(MODEL, Method.RING, 2), dense_scheme(5)):
        with pytest.raises(InputError, match="no layer profile for scheme"):
            COST.overhead_s(scheme)
    with pytest.raises(InputError, match="at least one profile"):
        TwoLayerCost({}, model=MODEL, cluster=CLUSTER)
