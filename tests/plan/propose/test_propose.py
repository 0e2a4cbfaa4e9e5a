import numpy as np
import pytest
from hypothesis import given, settings

from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families
from lengthwise.plan.heterogeneous.propose import propose
from lengthwise.plan.heterogeneous.propose.parametric import integer_strategies
from lengthwise.plan.heterogeneous.propose.planned import PlannedSteps, price_steps
from lengthwise.plan.heterogeneous.propose.tiling import Tiler, strategy_of
from lengthwise.plan.heterogeneous.propose.workload import make_workload
from lengthwise.plan.space.placement import place, placeable
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem
from tests.plan.propose.workloads import problems, workload_of


def lognormal_samples(*, steps, sequences, most, seed=0):
    random = np.random.default_rng(seed)
    return [np.clip(random.lognormal(3, 1.2, size=sequences), 1, most).astype(int) for _ in range(steps)]


def planned_s(problem, strategy, steps):
    """Planned seconds of each of some steps."""
    planned = PlannedSteps(problem, price_steps(problem, steps)).under(strategy)
    return np.array([planned.time_s(step) for step in range(len(steps))])


def homogeneous_strategies(problem):
    for candidate in problem.candidates:
        if problem.num_devices % candidate.num_devices == 0 and candidate.max_tokens >= problem.max_length:
            yield ((candidate, problem.num_devices // candidate.num_devices),)


def published_strategies(problem, samples):
    workload = make_workload(problem, problem.candidates, samples)
    tiler = Tiler(workload, problem.devices_per_node)
    for bubble in (False, True):
        found = integer_strategies(workload, bubble=bubble)[0]
        yield strategy_of(workload.candidates, tiler.fill(found.counts.tolist()))


@given(problems(max_devices=12))
@settings(max_examples=examples(25), deadline=None)
def test_every_proposal_tiles_the_cluster_and_can_be_placed(problem):
    proposals = propose(problem)
    assert 1 <= len(proposals) <= 8
    assert len({proposal.counts for proposal in proposals}) == len(proposals)
    for proposal in proposals:
        place(proposal.counts, problem.num_devices, problem.devices_per_node)
        assert placeable(proposal.counts, problem.num_devices, problem.devices_per_node)


@given(problems(max_devices=12))
@settings(max_examples=examples(25), deadline=None)
def test_some_proposal_holds_the_longest_sequence(problem):
    assert any(
        candidate.max_tokens >= problem.max_length for proposal in propose(problem) for candidate, _ in proposal.counts
    )


@given(problems(max_devices=8, max_steps=7))
@settings(max_examples=examples(15), deadline=None)
def test_the_best_homogeneous_strategy_is_proposed_and_none_beats_the_best_proposal(problem):
    steps = problem.samples[:4]
    proposals = propose(problem)
    means_s = {strategy: planned_s(problem, strategy, steps).mean() for strategy in homogeneous_strategies(problem)}
    if means_s:
        best_s = min(means_s.values())
        assert any(means_s.get(proposal.counts, np.inf) <= best_s * (1 + 1e-9) for proposal in proposals)
        assert min(proposal.mean_s for proposal in proposals) <= best_s * (1 + 1e-9)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("capacity, stages, loss", [(100, (1, 2), 0.1), (60, (1, 2, 4), 0.02), (300, (1,), 0.4)])
def test_on_steps_not_searched_on_proposals_are_never_slower_than_what_is_published(capacity, stages, loss):
    samples = lognormal_samples(steps=15, sequences=40, most=200)
    cost = SimpleCost(a_s=1e-3, c_s=0.2, capacity=capacity, loss=loss)
    problem = make_problem(cost, num_devices=8, max_length=200, samples=samples, stages=stages)
    unseen = samples[2::3][:4]
    seen = [sample for number, sample in enumerate(samples) if number % 3 != 2 or number > 11]
    proposals_s = [planned_s(problem, proposal.counts, unseen) for proposal in propose(problem)]
    rivals = [*homogeneous_strategies(problem), *published_strategies(problem, seen)]
    for rival in rivals:
        rival_s = planned_s(problem, rival, unseen).mean()
        assert min(times_s.mean() for times_s in proposals_s) <= rival_s * (1 + 1e-9)
        assert np.min(proposals_s, axis=0).mean() <= rival_s * (1 + 1e-9)


def test_a_mix_of_lengths_gets_a_mix_of_pipelines_that_is_faster_than_equal_ones():
    samples = [np.array([400] + [10] * 1600)] * 9
    cost = SimpleCost(a_s=1e-3, c_s=0.0, capacity=100, loss=0.5)
    problem = make_problem(cost, num_devices=8, max_length=400, samples=samples, stages=(1,))
    proposals = propose(problem)
    best = proposals[0]
    equal_s = min(planned_s(problem, each, samples[:4]).mean() for each in homogeneous_strategies(problem))
    assert len(best.counts) > 1
    assert best.mean_s < 0.8 * equal_s


def test_proposals_are_the_same_again_and_come_fastest_first():
    samples = lognormal_samples(steps=12, sequences=30, most=200)
    problem = make_problem(SimpleCost(capacity=100), num_devices=8, max_length=200, samples=samples)
    first, again = propose(problem), propose(problem)
    assert first == again
    assert [each.mean_s for each in first] == sorted(each.mean_s for each in first)


def test_one_device_has_one_pipeline():
    problem = make_problem(num_devices=1, samples=[[10, 100], [50]])
    assert [proposal.counts for proposal in propose(problem)] == [((problem.candidates[0], 1),)]


def test_fewer_sequences_than_devices_get_larger_pipelines():
    cost = SimpleCost(a_s=1e-4, c_s=0.0, loss=0.1)
    problem = make_problem(cost, num_devices=8, samples=[[100]] * 9, stages=(1,))
    best = propose(problem)[0]
    assert [(candidate.scheme.degree, count) for candidate, count in best.counts] == [(8, 1)]


def test_the_longest_sequence_fits_one_candidate_only_and_that_is_there():
    samples = [np.array([20] * 100)] * 11 + [np.array([20] * 100 + [790])]
    cost = SimpleCost(capacity=100, loss=0.3)
    problem = make_problem(cost, num_devices=16, max_length=800, samples=samples, stages=(1,))
    proposals = propose(problem)
    assert any(candidate.scheme.degree == 8 for proposal in proposals for candidate, _ in proposal.counts)
    assert any(all(candidate.scheme.degree < 8 for candidate, _ in proposal.counts) for proposal in proposals)


def test_no_samples_is_a_corpus_made_up_of_the_longest_length():
    problem = make_problem(SimpleCost(capacity=60), num_devices=4, max_length=200)
    assert any(candidate.max_tokens >= 200 for proposal in propose(problem) for candidate, _ in proposal.counts)


def test_lengths_that_no_candidate_holds_do_not_hinder_proposals():
    problem = make_problem(SimpleCost(capacity=30), num_devices=2, max_length=5000, samples=[[10, 5000]])
    assert propose(problem)


def test_where_no_mix_fills_the_cluster_as_much_of_it_is_used_as_one_fills():
    problem = make_problem(num_devices=11, degrees=(4, 6), stages=(1,), samples=[[10] * 50])
    for proposal in propose(problem):
        assert sum(candidate.num_devices * count for candidate, count in proposal.counts) == 10


def test_flexible_pipelines_are_proposed_as_they_will_be_planned():
    samples = [np.array([20] * 60 + [350])] * 9
    problem = make_problem(
        SimpleCost(capacity=100), num_devices=4, max_length=350, recomputed=(0, 2, 4), samples=samples, stages=(1,)
    )
    best = propose(problem, candidate_families(problem))[0]
    assert best.mean_s == pytest.approx(planned_s(problem, best.counts, samples[:4]).mean())
    assert best.mean_s <= propose(problem)[0].mean_s * (1 + 1e-9)


def test_candidates_are_limited():
    samples = lognormal_samples(steps=12, sequences=30, most=200)
    problem = make_problem(SimpleCost(capacity=100), num_devices=8, max_length=200, samples=samples)
    assert len(propose(problem, max_strategies=3)) <= 3


def test_nodes_that_no_tiling_fills_whole_are_crossed():
    problem = make_problem(num_devices=6, devices_per_node=4, degrees=(3,), stages=(1,), samples=[[10]])
    (proposal,) = propose(problem)
    assert sum(count for _, count in proposal.counts) == 2


def test_a_workload_has_a_class_for_every_length_where_there_are_few():
    problem = make_problem(SimpleCost(capacity=60), num_devices=2, samples=[[5, 100, 100], [61]])
    workload = workload_of(problem)
    assert workload.longest.tolist() == [100, 61, 5]
    assert workload.counts.tolist() == [[2, 0, 1], [0, 1, 0]]


def test_classes_of_many_lengths_are_not_cut_by_what_a_candidate_holds():
    samples = [np.arange(1, 400)]
    problem = make_problem(SimpleCost(capacity=97), num_devices=4, samples=samples, stages=(1,))
    workload = workload_of(problem)
    assert len(workload.longest) < 100
    assert {97, 194, 388} <= set(workload.longest.tolist())
    assert workload.counts.sum() == 399
    assert workload.mean @ workload.lengths == pytest.approx(samples[0].sum())
