import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.dcp.recompute_levels import RecomputeLadder, fastest_setting
from lengthwise.plan.space.problem import PricedBatch
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

ONE_OF_EIGHT = (0, 1, 2, 3, 4, 5, 6, 7, 8)


def fastest_fitting(candidates, num_tokens):
    """The fastest of some candidates that holds a pack of ``num_tokens``: the one with the fewest recomputed layers."""
    ladder = RecomputeLadder(candidates)
    return ladder.candidates[int(ladder.indices(np.array(num_tokens)))]


def recompute_family(**costs):
    cost = SimpleCost(capacity=100, **costs)
    problem = make_problem(cost, num_devices=4, num_layers=8, recomputed=ONE_OF_EIGHT, stages=[1])
    return problem, next(held for family, held in problem.families.items() if family[0] == 4)


@given(st.integers(1, 1600))
@settings(deadline=None)
def test_the_fastest_fitting_candidate_recomputes_the_fewest_layers_that_fit(num_tokens):
    _, candidates = recompute_family()
    fewest = min(candidate.scheme.num_recomputed for candidate in candidates if candidate.max_tokens >= num_tokens)
    assert fastest_fitting(candidates, num_tokens).scheme.num_recomputed == fewest


def test_many_token_counts_at_once_get_what_each_gets_alone():
    _, candidates = recompute_family()
    ladder, tokens = RecomputeLadder(candidates), np.arange(1, 1601, 7)
    assert ladder.is_chain
    alone = [fastest_fitting(candidates, int(each)) for each in tokens]
    assert [ladder.candidates[at] for at in ladder.indices(tokens)] == alone


def test_more_tokens_than_the_leanest_holds_are_refused_with_both_numbers():
    _, candidates = recompute_family()
    with pytest.raises(InfeasibleError, match=r"1,601 tokens .* holds 1,600"):
        fastest_fitting(candidates, 1601)


def test_candidates_that_are_slower_and_hold_less_are_left_out():
    cost = SimpleCost(method_factors={Method.RING: 2.0})
    problem = make_problem(cost, num_devices=2, degrees=[2], stages=[1], methods=(Method.ULYSSES, Method.RING))
    assert [candidate.scheme.methods[0] for candidate in RecomputeLadder(problem.candidates).candidates] == [
        Method.ULYSSES
    ]


class TwoMethods(SimpleCost):
    """Ulysses adds more to every token and starts sooner; ring the other way round."""

    def sequence_times_s(self, lengths, scheme):
        factor = 3.0 if scheme.methods[0] is Method.ULYSSES else 1.0
        return factor * super().sequence_times_s(lengths, scheme)

    def overhead_s(self, scheme):
        return 0.1 if scheme.methods[0] is Method.ULYSSES else 1.0


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=6))
@settings(deadline=None, max_examples=examples(50))
def test_every_pack_runs_as_the_fastest_candidate_that_holds_it_with_the_fewest_layers_that_it_can(packs):
    problem = make_problem(
        TwoMethods(capacity=100), num_devices=2, degrees=[2], stages=[1], recomputed=(0, 2, 4),
        methods=(Method.ULYSSES, Method.RING),
    )  # fmt: skip
    priced = PricedBatch(problem, make_batch([length for pack in packs for length in pack]))
    places = iter(range(len(priced.lengths)))
    positions = [[next(places) for _ in pack] for pack in packs]
    for run, pack in zip(RecomputeLadder(problem.candidates).runs(priced, positions), packs):
        held = [candidate for candidate in problem.candidates if candidate.max_tokens >= sum(pack)]
        least = min(candidate.cost.time_s(pack, candidate.scheme) for candidate in held)
        fastest = [k for k in held if k.cost.time_s(pack, k.scheme) <= least * (1 + 1e-9)]
        fewest = {run.recomputing(n).max_tokens >= sum(pack): n for n in reversed(range(5))}[True]
        assert run.scheme == run.recomputing(fewest).scheme and run.max_tokens >= sum(pack)
        assert run.scheme.methods in [k.scheme.methods for k in fastest]
        assert run.cost.time_s(pack, run.scheme) <= least * (1 + 1e-9)


@given(st.integers(10, 1600), st.one_of(st.none(), st.integers(1, 20)))
@settings(deadline=None, max_examples=examples(30))
def test_a_setting_has_the_greatest_throughput_of_all_batch_sizes_degrees_and_recomputed_layers(length, most):
    problem, _ = recompute_family()
    setting = fastest_setting(length, problem.candidates, max_batch_size=most)
    throughputs = [
        size * length / (candidate.num_devices * candidate.cost.time_s([length] * size, candidate.scheme))
        for candidate in problem.candidates
        for size in range(1, min(candidate.max_tokens // length, most or candidate.max_tokens) + 1)
    ]
    assert length / setting.device_s == pytest.approx(max(throughputs))
    assert setting.batch_size * length <= setting.candidate.max_tokens
    of_degree = [
        candidate for candidate in problem.candidates if candidate.num_devices == setting.candidate.num_devices
    ]
    assert setting.candidate is fastest_fitting(of_degree, setting.batch_size * length)


def test_no_setting_holds_a_sequence_longer_than_every_candidate():
    problem, _ = recompute_family()
    assert fastest_setting(1601, problem.candidates) is None


def test_short_sequences_take_one_device_and_no_recompute_where_both_fit():
    problem, _ = recompute_family(c_s=0.01)
    setting = fastest_setting(10, problem.candidates)
    assert (setting.candidate.num_devices, setting.candidate.scheme.num_recomputed) == (1, 0)
