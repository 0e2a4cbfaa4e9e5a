"""The pool's bound holds for every strategy, every packing and every switch within a step."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import pipeline_end_s
from lengthwise.plan.bounds.search_space_bound import SearchSpaceBound
from lengthwise.plan.bounds.step_sequences import TOLERANCE
from lengthwise.plan.heterogeneous.fastest_runs import FastestRuns
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import counted_otherwise
from lengthwise.plan.space.split_backwards import ZeroBubble
from tests.examples import examples
from tests.plan.costs import HiddenUpdates, SimpleCost, make_batch, make_problem


class StagedUpdate(SimpleCost):
    """The fewer stages share the weights, the longer the update; the slowest pipeline decides."""

    def update_s(self, strategy):
        return max(4.0 / scheme.num_stages for scheme in strategy.schemes)


@st.composite
def arrangements(draw):
    """A random valid draft plan: up to three phases, random candidates tiling the devices, random packs that fit."""
    num_devices = draw(st.integers(1, 6))
    cost = draw(st.sampled_from([SimpleCost, StagedUpdate]))(
        c_s=draw(st.floats(0, 5)), a_s=draw(st.floats(0, 1e-2)), loss=draw(st.floats(0, 1)), capacity=50
    )
    problem = make_problem(
        HiddenUpdates(cost, slowdown=draw(st.sampled_from([0.0, 0.5]))) if draw(st.booleans()) else cost,
        num_devices=num_devices,
        recomputed=(0, 1, 2, 3, 4),
        overhead_per_sequence=draw(st.booleans()),
        max_length=80,
        zero_bubble=draw(st.sampled_from([ZeroBubble.NONE, ZeroBubble.AUTO])),
    )
    longest = min(80, problem.leanest.max_tokens)
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
    phases = [[] for _ in range(draw(st.integers(1, 3)))]
    for phase in phases:
        used = 0
        while used < num_devices:
            fitting = [candidate for candidate in problem.candidates if candidate.num_devices <= num_devices - used]
            candidate = draw(st.sampled_from(fitting))
            phase.append((candidate, tuple(range(used, used + candidate.num_devices)), []))
            used += candidate.num_devices
    everywhere = [pipeline for phase in phases for pipeline in phase]
    for position, length in enumerate(lengths):
        able = [pipeline for pipeline in everywhere if pipeline[0].max_tokens >= length]
        if not able:
            lengths[position] = 1
            able = everywhere
        candidate, _, packs = draw(st.sampled_from(able))
        open_packs = [p for p in packs if sum(lengths[i] for i in p) + lengths[position] <= candidate.max_tokens]
        if open_packs and draw(st.booleans()):
            draw(st.sampled_from(open_packs)).append(position)
        else:
            packs.append([position])
    in_order = draw(st.booleans())
    made = tuple(
        tuple(
            PipelineDraft(candidate=k, ranks=r, packs=tuple(map(tuple, packs)), is_in_order=in_order)
            for k, r, packs in phase
        )
        for phase in phases
    )
    return PricedBatch(problem, make_batch(lengths)), DraftPlan(phases=made)


@settings(max_examples=examples(300, most=12), deadline=None)
@given(arrangements())
def test_no_arrangement_of_the_pools_candidates_beats_the_bound(case):
    priced, draft = case
    problem, in_any_order = priced.problem, draft.phases[0][0].is_in_order
    bound = SearchSpaceBound(problem, problem.candidates, in_any_order=in_any_order)
    times_s = step_times_s(priced, draft)
    assert bound.of(priced.lengths) <= bound(priced) <= times_s[0] * (1 + 1e-9)
    assert bound.step_s(priced) <= sum(times_s) * (1 + 1e-9)
    for levels in ((0, 4), (0, 2, 4)):
        coarse = [candidate for candidate in problem.candidates if candidate.scheme.num_recomputed in levels]
        of_levels = SearchSpaceBound(problem, coarse, any_recompute=True, in_any_order=in_any_order)
        assert of_levels.of(priced.lengths) <= of_levels(priced) <= times_s[0] * (1 + 1e-9)
        assert of_levels.step_s(priced) <= sum(times_s) * (1 + 1e-9)


def test_the_bound_is_tight_where_one_device_fills_its_packs():
    problem = make_problem(SimpleCost(capacity=100), num_devices=1)
    priced = PricedBatch(problem, make_batch([50, 50, 60, 40]))
    candidate = problem.candidates[0]
    draft = DraftPlan(phases=((PipelineDraft(candidate=candidate, ranks=(0,), packs=((0, 1), (2, 3))),),))
    bound = SearchSpaceBound(problem, problem.candidates)
    np.testing.assert_allclose(bound(priced), step_times_s(priced, draft)[0], rtol=TOLERANCE)


@pytest.mark.parametrize(("stages", "lengths"), [(1, [60, 50, 50]), (2, [50]), (4, [60])])
def test_the_bound_is_tight_where_no_pack_fills_the_bubble_of_another(stages, lengths):
    problem = make_problem(SimpleCost(capacity=60, c_s=0.0), num_devices=stages, degrees=[1], stages=[stages])
    priced = PricedBatch(problem, make_batch(lengths))
    packs = tuple((number,) for number in range(len(lengths)))
    pipeline = PipelineDraft(candidate=problem.candidates[0], ranks=tuple(range(stages)), packs=packs)
    step_s, _, update_s = step_times_s(priced, DraftPlan(phases=((pipeline,),)))
    bound = SearchSpaceBound(problem, problem.candidates)
    np.testing.assert_allclose(bound(priced), step_s, rtol=TOLERANCE)
    np.testing.assert_allclose(bound.step_s(priced), step_s + update_s, rtol=TOLERANCE)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("lengths", [[60, 60, 60], [50, *[10] * 12], [40, 40, 30, 5]])
def test_the_bound_of_one_pipeline_counts_what_nobody_fills_of_the_longest_ones_bubble(stages, lengths):
    """S - 1 of its backwards, in which shorter ones have no place; and none of their backwards comes before its own."""
    problem = make_problem(SimpleCost(capacity=60, c_s=0.0), num_devices=stages, degrees=[1], stages=[stages])
    (candidate,) = problem.candidates
    times_s = candidate.times_s(np.array(lengths))
    certain_s = times_s.sum() + (problem.bounding_stages(candidate) - 1.0) * times_s.max()
    alone_s = candidate.num_stages * times_s.max()
    expected_s = max(certain_s, alone_s + 2 / 3 * (times_s.sum() - times_s.max()))
    assert problem.bounding_stages(candidate) > 1.5, "the bubble weighs"
    assert alone_s < expected_s <= pipeline_end_s(times_s, [3.0] * len(lengths), stages) * (1 + TOLERANCE)
    priced = PricedBatch(problem, make_batch(lengths))
    bound = SearchSpaceBound(problem, problem.candidates)
    np.testing.assert_allclose(bound(priced), expected_s, rtol=TOLERANCE)
    np.testing.assert_allclose(bound.step_s(priced), expected_s + candidate.update_s, rtol=TOLERANCE)


def test_a_sequence_that_may_choose_pays_for_its_own_bubble_where_no_longer_one_shares_its_pipeline():
    """Four pipelines of two stages and a sequence each: a time is refuted by the devices that all of them take."""
    problem = make_problem(SimpleCost(capacity=60, c_s=0.0), num_devices=8, degrees=[1], stages=[2])
    (candidate,) = problem.candidates
    lengths = [50] * 8
    times_s = candidate.times_s(np.array(lengths))
    priced = PricedBatch(problem, make_batch(lengths))
    bound = SearchSpaceBound(problem, problem.candidates)
    expected_s = 2 * times_s[0] + (problem.bounding_stages(candidate) - 1.0) * times_s[0]
    np.testing.assert_allclose(bound.of(priced.lengths), expected_s, rtol=TOLERANCE)


def test_a_scheme_that_does_not_hold_a_sequence_is_no_part_of_its_bound():
    problem = make_problem(SimpleCost(capacity=100), num_devices=2, stages=[1], max_length=150)
    small, large = sorted(problem.candidates, key=lambda candidate: candidate.num_devices)[:2]
    priced = PricedBatch(problem, make_batch([150]))
    assert small.max_tokens < 150 <= large.max_tokens
    bound = SearchSpaceBound(problem, [small, large])
    alone_s = float(large.times_s(np.array([150]))[0]) + large.overhead_s
    for found_s in (bound.floor_s(priced), bound(priced)):
        np.testing.assert_allclose(found_s, alone_s, rtol=1e-2)  # lengths are tabulated by steps of half a percent


def test_the_bound_of_a_sequence_alone_is_the_time_of_its_fastest_pipeline_to_the_last_digits():
    """It is where the search begins, not where it ends: four devices of a degree beat four stages."""
    problem = make_problem(SimpleCost(capacity=60, loss=0.1), degrees=[1, 4], stages=[1, 4])
    priced = PricedBatch(problem, make_batch([50]))
    bound = SearchSpaceBound(problem, problem.candidates)
    times_s = [k.num_stages * (float(k.times_s(np.array([50]))[0]) + k.overhead_s) for k in problem.candidates]
    for bound_s in (bound.floor_s(priced), bound.of(priced.lengths), bound(priced)):
        np.testing.assert_allclose(bound_s, min(times_s), rtol=1e-8)


def test_the_bound_is_tight_where_the_longest_sequence_makes_every_update_slow():
    """The short ones alone could go through two stages, whose update takes half."""
    problem = make_problem(StagedUpdate(capacity=100, c_s=0.0, loss=0.0), num_devices=2, max_length=150)
    priced = PricedBatch(problem, make_batch([150, 10, 10, 10, 10]))
    (candidate,) = (one for one in problem.candidates if (one.scheme.degree, one.num_stages) == (2, 1))
    packs = tuple((number,) for number in range(5))
    draft = DraftPlan(phases=((PipelineDraft(candidate=candidate, ranks=(0, 1), packs=packs),),))
    bound = SearchSpaceBound(problem, problem.candidates)
    np.testing.assert_allclose(bound.step_s(priced), sum(step_times_s(priced, draft)), rtol=TOLERANCE)


@dataclass(frozen=True)
class SlicedCost(SimpleCost):
    """Each slice has the overhead of a micro-batch, and attends to earlier keys that it reads again.

    n slices hold n ** ``growth`` times the tokens.
    """

    growth: float = 0.0

    def max_tokens(self, scheme, *, num_devices):
        return int(super().max_tokens(scheme, num_devices=num_devices) * scheme.slices**self.growth)

    def sequence_times_s(self, lengths, scheme):
        return super().sequence_times_s(lengths, scheme) * (1.1 - 0.1 / scheme.slices)

    def overhead_s(self, scheme):
        return super().overhead_s(scheme) * scheme.slices


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.sampled_from([2, 3, 4]), st.sampled_from([4, 16]),
    st.sampled_from([0.0, 0.001, 0.05]), st.sampled_from([0.0, 0.5, 0.8]), st.randoms(),
)  # fmt: skip
@settings(max_examples=examples(150, most=8))
def test_no_plan_with_slices_is_faster_than_the_bound(lengths, stages, num_slices, overhead_s, growth, rng):
    """A pipeline whose longest sequence is in slices, short ones in packs of fewer, beside devices of their own."""
    cost = SlicedCost(capacity=int(1200 / num_slices**growth) + 1, c_s=overhead_s, b_s=1e-3, growth=growth)
    problem = make_problem(cost, num_devices=2 * stages, degrees=[1], stages=[1, stages], max_length=1200)
    alone, whole = sorted(problem.candidates, key=lambda candidate: candidate.num_stages)
    cut = whole.in_slices(num_slices)
    problem = replace(problem, candidates=(alone, whole, cut))
    priced = PricedBatch(problem, make_batch(lengths))
    bound = SearchSpaceBound(problem, (*problem.candidates, *counted_otherwise(problem.candidates)))
    packs = [(cut, []), (cut, []), *((alone, []) for _ in range(stages))]
    for position in rng.sample(range(len(lengths)), len(lengths)):
        fitting = [pack for run, pack in packs if sum(lengths[k] for k in pack) + lengths[position] <= run.max_tokens]
        assume(fitting)
        rng.choice(fitting).append(position)
    phase = (
        PipelineDraft(
            candidate=cut, ranks=tuple(range(stages)), packs=tuple([tuple(pack) for _, pack in packs[:2] if pack])
        ),
        *(
            PipelineDraft(candidate=alone, ranks=(stages + number,), packs=(tuple(pack),) if pack else ())
            for number, (_, pack) in enumerate(packs[2:])
        ),
    )
    draft = DraftPlan(phases=(phase,))
    runs = FastestRuns(problem.candidates)
    faster = runs.of(priced, draft)
    for option in (draft, faster, runs.of(priced, faster)):
        assert bound(priced) <= step_times_s(priced, option)[0] * (1 + TOLERANCE)


def test_every_sequence_that_memory_holds_in_many_slices_alone_bears_their_overhead():
    """Of 13 to 16 slices, packs are taken to hold as many tokens as of 16."""
    cost = SlicedCost(capacity=100, c_s=4.0, growth=0.5)
    problem = make_problem(cost, num_devices=2, degrees=[1], stages=[2], max_length=400)
    cut = problem.candidates[0].in_slices(16)
    priced = PricedBatch(replace(problem, candidates=(cut,)), make_batch([cut.max_tokens] * 3))
    work_s = float(cut.in_slices(1).times_s(priced.lengths).sum()) + (1 + 2 * 13 / 16) * cut.overhead_s
    assert SearchSpaceBound(problem, [cut])(priced) >= work_s * 0.99  # lengths are tabulated by steps of half a percent
