import numpy as np
from hypothesis import given, settings

from lengthwise.core.pipeline_config import Method
from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families
from lengthwise.plan.heterogeneous.propose.reduce import reduce_candidates
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import problems


@given(problems(recomputed=(0, 2, 4), methods=(Method.ULYSSES, Method.RING)))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_dropped_another_candidate_replaces_in_every_respect(problem):
    lengths = np.concatenate(problem.samples)
    kept = reduce_candidates(problem.candidates, lengths, max_candidates=1000)
    for candidate in problem.candidates:
        fitting = np.unique(lengths[lengths <= candidate.max_tokens])
        assert any(
            other.num_devices == candidate.num_devices
            and other.max_tokens >= candidate.max_tokens
            and other.num_stages <= candidate.num_stages
            and other.overhead_s <= candidate.overhead_s
            and (not len(fitting) or (other.times_s(fitting) <= candidate.times_s(fitting)).all())
            for other in kept
        )


@given(problems(recomputed=(0, 2, 4)))
@settings(max_examples=examples(40), deadline=None)
def test_few_candidates_in_their_order_still_hold_the_longest_sequence(problem):
    lengths = np.concatenate(problem.samples)
    for most in (1, 3):
        kept = reduce_candidates(problem.candidates, lengths, max_candidates=most)
        assert 1 <= len(kept) <= most
        assert kept == [candidate for candidate in problem.candidates if candidate in kept]
        assert max(candidate.max_tokens for candidate in kept) >= lengths.max()


def test_a_slower_method_is_dropped_where_it_holds_no_more():
    cost = SimpleCost(method_factors={Method.RING: 1.3})
    problem = make_problem(cost, num_devices=4, methods=(Method.ULYSSES, Method.RING))
    kept = reduce_candidates(problem.candidates, np.array([10, 100]))
    assert kept and all(Method.RING not in candidate.scheme.methods for candidate in kept)


def test_recompute_is_kept_for_what_it_holds():
    problem = make_problem(SimpleCost(capacity=50), num_devices=1, recomputed=(0, 4))
    assert reduce_candidates(problem.candidates, np.array([10, 150])) == list(problem.candidates)


def test_flexible_pipelines_are_compared_by_what_their_packs_hold():
    problem = make_problem(num_devices=2, recomputed=(0, 4), samples=[np.array([10, 1500])])
    candidates = candidate_families(problem)
    assert {candidate.num_devices for candidate in reduce_candidates(candidates, np.array([10, 1500]))} == {1, 2}
