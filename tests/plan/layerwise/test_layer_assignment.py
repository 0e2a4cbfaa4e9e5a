from functools import cache
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.layerwise.layer_assignment import (
    LayerAssigner,
    best_counts,
    mixed_candidates,
    options_of,
    steady_choices,
)
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem

SHARDED = (Method.MEGATRON_TS, Method.MEGATRON_CZ, Method.ULYSSES_Z, Method.METP)
NUM_LAYERS = 6
ROUNDING = 1e-9
"""Sums of the same few numbers in another order."""


SECONDS = dict(zip(SHARDED, (1.0, 1.3, 1.7, 2.9)))
KEPT = dict(zip(SHARDED, (10.0, 7.5, 6.0, 2.0)))


WORKING = dict(zip(SHARDED, (9.0, 3.0, 1.0, 4.0)))


class LayerCost(SimpleCost):
    """Every layer adds the seconds and bytes of its method; recomputing adds a third to one and takes two of the other.

    Fast methods keep more: the further down, the slower and the leaner. And there is room for the layer that works in
    the most bytes, once.
    """

    def of_layers(self, scheme, values, recomputed):
        flags = zip(scheme.methods, scheme.recompute)
        return sum(values[method] * (recomputed if flag else 1.0) for method, flag in flags)

    def sequence_times_s(self, lengths, scheme):
        return np.asarray(lengths, dtype=float) * 1e-3 * self.of_layers(scheme, SECONDS, 4 / 3)

    def overhead_s(self, scheme):
        return 0.2

    def max_tokens(self, scheme, *, num_devices):
        return int(1e4 / self.bytes_per_token(scheme))

    def peak_bytes(self, num_tokens, scheme, *, num_devices):
        return np.asarray(num_tokens) * self.bytes_per_token(scheme)

    def bytes_per_token(self, scheme):
        return self.of_layers(scheme, KEPT, 1 / 3) + max(WORKING[method] for method in scheme.methods)


def family(cost=None, *, recomputed=(0, NUM_LAYERS), methods=SHARDED, num_layers=NUM_LAYERS, **options):
    return make_problem(
        cost or LayerCost(), num_devices=4, degrees=[4], stages=[1], num_layers=num_layers, methods=methods,
        recomputed=recomputed, max_length=200, **options,
    )  # fmt: skip


DEEP = family(num_layers=24, recomputed=(0, 24))


@cache
def deep_pool():
    return [*DEEP.candidates, *mixed_candidates(DEEP)]


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


option = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(st.lists(option, min_size=1, max_size=5), st.integers(1, 8), st.integers(1, 300))
@settings(max_examples=examples(150), deadline=None)
def test_counts_take_the_least_time_of_all_compositions_that_fit(options, num_layers, budget):
    times_s, num_bytes = np.array(options, dtype=float).T
    counts = best_counts(times_s, num_bytes, num_layers=num_layers, budget_bytes=budget)
    fitting = [held for held in compositions(num_layers, len(options)) if num_bytes @ held <= budget]
    if not fitting:
        assert counts is None
        return
    assert counts.sum() == num_layers
    assert num_bytes @ counts <= budget
    assert times_s @ counts == pytest.approx(min(float(times_s @ held) for held in fitting))


def test_many_layers_and_options_are_exact_too():
    # Against the relaxation in fractions, which no integers beat: the gap is far below one layer's step.
    generator = np.random.default_rng(0)
    for _ in range(20):
        times_s, num_bytes = np.sort(generator.uniform(1, 9, 10)), np.sort(generator.uniform(1, 9, 10))[::-1]
        budget = 96 * float(generator.uniform(num_bytes.min(), num_bytes.max()))
        counts = best_counts(times_s, num_bytes, num_layers=96, budget_bytes=budget)
        pairs = []
        for a in range(10):
            for b in range(10):
                lean = np.arange(97)
                fits = lean * num_bytes[a] + (96 - lean) * num_bytes[b] <= budget
                pairs += (lean * times_s[a] + (96 - lean) * times_s[b])[fits].tolist()
        assert num_bytes @ counts <= budget * (1 + ROUNDING)
        assert times_s @ counts <= min(pairs) + ROUNDING


@given(st.integers(1, 1250))
@settings(deadline=None, max_examples=examples(40))
def test_a_pack_gets_the_fastest_of_all_mixes_that_hold_it(num_tokens):
    problem = family(methods=SHARDED[:1] + SHARDED[2:])
    assigner = LayerAssigner(problem.candidates)
    found = assigner.assign(num_tokens)
    mixes = [assigner.mix(counts) for counts in compositions(NUM_LAYERS, len(assigner.options))]
    holding = [mix for mix in mixes if mix.max_tokens >= num_tokens]
    least_s = min(mix.cost.time_s([num_tokens], mix.scheme) for mix in holding)
    assert found.max_tokens >= num_tokens
    assert found.cost.time_s([num_tokens], found.scheme) == pytest.approx(least_s)


@given(st.integers(1, 5000))
@settings(deadline=None, max_examples=examples(60))
def test_costs_that_do_not_add_up_over_layers_still_get_a_mix_that_fits_and_beats_every_option(num_tokens):
    factors = dict(zip(SHARDED, (1.0, 1.1, 1.25, 1.9)))
    problem = family(SimpleCost(capacity=400, method_factors=factors))
    assigner = LayerAssigner(problem.candidates)
    found = assigner.assign(num_tokens)
    holding = [candidate for candidate in problem.candidates if candidate.max_tokens >= num_tokens]
    assert found.max_tokens >= num_tokens
    assert found.cost.time_s([num_tokens], found.scheme) <= min(
        candidate.cost.time_s([num_tokens], candidate.scheme) for candidate in holding
    ) * (1 + ROUNDING)


def test_more_tokens_than_the_leanest_option_holds_are_refused_with_both_numbers():
    with pytest.raises(InfeasibleError, match=r"1,251 tokens .* holds 1,250"):
        LayerAssigner(family().candidates).assign(1251)


def test_methods_change_as_seldom_along_the_layers_as_they_can():
    problem = family()
    for mix in mixed_candidates(problem):
        layers = list(zip(mix.scheme.methods, mix.scheme.recompute))
        assert len(list(groupby(layers))) == len(set(layers))
        assert len(list(groupby(mix.scheme.methods))) == len(set(mix.scheme.methods))


def test_mixes_leave_out_what_the_pool_has_and_stay_in_its_families():
    problem = family(recomputed=(0, 2, NUM_LAYERS))
    mixes = mixed_candidates(problem)
    known = {(candidate.scheme.methods, candidate.scheme.num_recomputed) for candidate in problem.candidates}
    assert mixes
    assert {mix.family for mix in mixes} <= set(problem.families)
    assert not {(mix.scheme.methods, mix.scheme.num_recomputed) for mix in mixes} & known


def test_a_family_of_one_option_has_no_mixes():
    assert mixed_candidates(family(recomputed=(0,), methods=SHARDED[:1])) == ()


@given(st.integers(1, 2500))
@settings(deadline=None, max_examples=examples(25))
def test_mixes_of_a_few_token_counts_serve_all_token_counts_nearly_as_well(num_tokens):
    pool = deep_pool()
    assume(num_tokens <= max(candidate.max_tokens for candidate in pool))
    best_s = LayerAssigner(DEEP.candidates).assign(num_tokens)
    best_s = best_s.cost.time_s([num_tokens], best_s.scheme)
    least_s = min(
        candidate.cost.time_s([num_tokens], candidate.scheme)
        for candidate in pool
        if candidate.max_tokens >= num_tokens
    )
    assert best_s * (1 - ROUNDING) <= least_s <= 1.15 * best_s


def test_a_users_token_limit_holds_for_mixes():
    problem = family(token_limit=300)
    assert all(mix.max_tokens <= 300 for mix in mixed_candidates(problem))


def test_options_run_all_layers_alike():
    problem = family(recomputed=(0, 2, NUM_LAYERS))
    assert len(options_of(problem.candidates)) == 2 * len(SHARDED)


def test_one_choice_serves_as_many_sizes_as_it_is_near_the_fastest_at():
    times_s = np.array([[1.0, 1.04, 1.06, 1.0, np.inf, 9.0], [2.0, 1.0, 1.0, 0.97, 2.0, 1.0]])
    assert steady_choices(times_s, ratio=0.05) == [0, 0, 1, 1, 1, 1]
    assert steady_choices(times_s, ratio=0.07) == [0, 0, 0, 0, 1, 1]
    assert steady_choices(times_s, ratio=0.0) == [0, 1, 1, 1, 1, 1]


@given(arrays(float, (4, 9), elements=st.floats(1.0, 1.2)), st.floats(0.0, 0.1))
def test_no_choice_by_size_changes_less_often_and_stays_as_near(times_s, ratio):
    choices = steady_choices(times_s, ratio=ratio)
    near = times_s <= (1 + ratio) * times_s.min(axis=0)
    assert all(near[choice, size] for size, choice in enumerate(choices))
    fewest = np.where(near[:, 0], 0, 99)  # switches by the last choice so far
    for size in range(1, 9):
        fewest = np.where(near[:, size], np.minimum(fewest, fewest.min() + 1), 99)
    assert sum(a != b for a, b in pairwise(choices)) == fewest.min()
