"""No plan of one phase or two takes less than is certified, and what whole sequences cost is certified."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError
from lengthwise.plan.bounds.phase_columns import PhaseColumns
from lengthwise.plan.bounds.phase_cover import MOST_PHASES, TOLERANCE, PhaseCover, certified_s
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import counted_otherwise
from tests.examples import examples
from tests.plan.bounds.test_search_space_bound import SlicedCost, arrangements
from tests.plan.brute_force import BruteForce
from tests.plan.costs import SimpleCost, make_batch, make_problem
from tests.plan.test_against_brute_force import case, everything


@settings(max_examples=examples(300, most=16), deadline=None)
@given(arrangements())
def test_no_arrangement_of_two_phases_is_refuted(example):
    """Random pipelines, packs and phases."""
    priced, draft = example
    assume(len(draft.phases) <= MOST_PHASES)
    problem, in_any_order = priced.problem, draft.phases[0][0].is_in_order
    time_s = sum(step_times_s(priced, draft)) * (1 + 1e-9)
    for levels in ((0, 1, 2, 3, 4), (0, 4)):
        candidates = [candidate for candidate in problem.candidates if candidate.scheme.num_recomputed in levels]
        bound = SearchSpaceBound(problem, candidates, any_recompute=True, in_any_order=in_any_order)
        cover = PhaseCover(bound.sequences(priced.bounding_lengths))
        assert not all(cover.is_refuted(time_s, number) for number in range(1, len(draft.phases) + 1))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.deep)])
def test_the_optimum_of_two_phases_takes_no_less_than_is_certified(seeds):
    """Every strategy, idle devices included, dispatch, packing and split; what is certified is near it on average."""
    ratios = []
    for seed in seeds:
        problem, lengths = case(seed)
        priced = PricedBatch(problem, make_batch(lengths))
        try:
            planned_s = Planner(policy="auto", problem=problem)(priced.batch).time_s
        except InfeasibleError:
            continue
        best_s = BruteForce(problem, everything(problem), lengths, most_phases=2, may_idle=True).best_s()
        bound = SearchSpaceBound(problem, everything(problem), in_any_order=True)
        proven_s = certified_s(bound, priced, 1.5 * planned_s)
        assert bound.step_s(priced) * (1 - 1e-9) <= proven_s <= best_s * (1 + 1e-9), seed
        ratios.append(best_s / proven_s)
    assert len(ratios) >= len(seeds) / 2 and np.mean(ratios) < 1.15


def priced_on(num_devices, lengths, **options):
    """A step on single devices, and the bound of these."""
    problem = make_problem(SimpleCost(c_s=0.0), num_devices=num_devices, degrees=[1], stages=[1], **options)
    return PricedBatch(problem, make_batch(lengths)), SearchSpaceBound(problem, problem.candidates)


@pytest.mark.parametrize(("num_devices", "lengths", "rounds"), [(2, [50] * 3, 2), (4, [50] * 9, 3), (3, [50] * 4, 2)])
def test_sequences_are_whole_and_so_are_rounds_of_them(num_devices, lengths, rounds):
    """Equal sequences, a device each: two devices take as long for three as for four, in one phase or in two."""
    priced, bound = priced_on(num_devices, lengths)
    sequence_s = float(priced.times_s(priced.problem.candidates[0])[0])
    update_s = priced.problem.candidates[0].update_s
    planned_s = rounds * sequence_s + update_s
    assert bound.step_s(priced) < 0.95 * planned_s, "parts of sequences fill all devices"
    assert planned_s * (1 - 4 * TOLERANCE) <= certified_s(bound, priced, planned_s) <= planned_s


def test_what_is_certified_is_no_more_than_a_plan_takes():
    priced, bound = priced_on(2, [50] * 3)
    assert certified_s(bound, priced, 1e-3) <= 1e-3


def test_a_column_is_worth_no_less_than_any_set_of_sequences_that_a_pipeline_computes_in_time():
    rng = np.random.default_rng(0)
    priced, bound = priced_on(1, rng.integers(5, 90, 7).tolist())
    sequences = bound.sequences(priced.bounding_lengths)
    work_s = sequences.costs.bare_device_s[0] @ sequences.counts
    phase = PhaseColumns(sequences, float(0.6 * work_s))
    seconds = np.repeat(sequences.costs.bare_device_s[0], sequences.counts.astype(int))
    for _ in range(20):
        values = rng.uniform(0, 1, len(sequences.counts))
        of_each = np.repeat(values, sequences.counts.astype(int))
        chosen = (np.arange(1 << len(seconds))[:, None] >> np.arange(len(seconds))) & 1
        best = float((chosen @ of_each)[chosen @ seconds <= phase.time_s].max())
        worth, columns = phase.dearest(values)
        assert best <= worth * (1 + 1e-9) <= best * 1.05
        assert columns[0].counts @ values <= worth * (1 + 1e-9)


@settings(max_examples=examples(150, most=10), deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.sampled_from([2, 4]), st.sampled_from([4, 16]),
    st.sampled_from([0.0, 0.001, 0.05]), st.randoms(),
)  # fmt: skip
def test_no_plan_of_slices_in_any_order_is_refuted(lengths, stages, num_slices, overhead_s, rng):
    """The longest sequence is in all slices, each of the others in as many or fewer, before it or behind."""
    cost = SlicedCost(capacity=1300, c_s=overhead_s, b_s=1e-3)
    problem = make_problem(cost, num_devices=stages, degrees=[1], stages=[stages], max_length=1200)
    cut = problem.candidates[0].in_slices(num_slices)
    problem = replace(problem, candidates=(cut,))
    order = rng.sample(range(len(lengths)), len(lengths))
    longest = max(order, key=lengths.__getitem__)
    runs = [cut if k == longest else cut.in_slices(rng.choice([1, 2, num_slices])) for k in order]
    pipeline = PipelineDraft(
        candidate=cut, ranks=tuple(range(stages)), packs=tuple((k,) for k in order), runs=tuple(runs), is_in_order=True
    )
    priced = PricedBatch(problem, make_batch(lengths))
    time_s = sum(step_times_s(priced, DraftPlan(phases=((pipeline,),))))
    order = {"in_any_order": True, "slices_in_any_order": True}
    bound = SearchSpaceBound(problem, (cut, *counted_otherwise([cut])), any_recompute=True, **order)
    assert bound.step_s(priced) <= time_s * (1 + 1e-9)
    assert not PhaseCover(bound.sequences(priced.bounding_lengths)).is_refuted(time_s * (1 + 1e-9), 1)
