"""Moves of packs in slices keep all sequences and fit, end pipelines sooner, and are the same on every rank."""

import sys
from itertools import chain

import numpy as np
import pytest

from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.heterogeneous import sliced_moves
from lengthwise.plan.heterogeneous.draft_refinement import DraftRefinement
from lengthwise.plan.heterogeneous.sliced_moves import rearranged
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft, runs_of
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.plan.space.sliced_packs import COUNTS_BETWEEN, Slices, in_slices
from lengthwise.sim.engine import simulate
from tests.plan.costs import make_batch

MODEL, CLUSTER = model_preset("llama-13b"), cluster_preset("4x8xH100-80GB")
LENGTHS = [90_000, 40_000, 22_000, 17_000, 9000, *[4000] * 5, *[700] * 12]


@pytest.fixture(scope="module")
def priced():
    cost = AnalyticCost(model=MODEL, cluster=CLUSTER)
    problem = make_problem(
        cost, cluster=CLUSTER, num_layers=MODEL.num_layers, max_length=max(LENGTHS), samples=(np.array(LENGTHS),),
        search_space=SearchSpace(slices=Slices.AUTO),
    )  # fmt: skip
    return PricedBatch(problem, make_batch(LENGTHS))


@pytest.fixture(scope="module")
def draft(priced):
    """All of it in one pipeline, each long sequence in a pack of its own."""
    sliced = [k for k in priced.problem.candidates if k.scheme.slices == 16 and k.num_devices == 32]
    candidate = max(sliced, key=lambda option: (option.num_stages, option.max_tokens))
    packs = (*((k,) for k in range(5)), (5, 6, 7), (8, 9), tuple(range(10, 22)))
    return DraftPlan(phases=((PipelineDraft(candidate=candidate, ranks=tuple(range(32)), packs=packs),),))


def test_moves_keep_all_sequences_fit_and_end_sooner(priced, draft):
    moved = rearranged(priced, draft, most_s=2.0)
    (pipeline,) = moved.phases[0]
    assert sorted(chain.from_iterable(pipeline.packs)) == list(range(len(LENGTHS))) and pipeline.is_in_order
    runs = runs_of(pipeline)
    assert all(run.max_tokens >= sum(LENGTHS[k] for k in pack) for run, pack in zip(runs, pipeline.packs))
    assert time_s(priced, moved) < time_s(priced, draft) * 0.99
    of_longest = next(run.scheme.slices for run, pack in zip(runs, pipeline.packs) if 0 in pack)
    assert of_longest == max(run.scheme.slices for run in runs) and of_longest in {16, *COUNTS_BETWEEN[16]}


def test_every_rank_moves_the_same(priced, draft):
    first, second = (rearranged(priced, draft, most_s=0.3).phases[0][0] for _ in range(2))
    assert first.packs == second.packs
    assert [run.scheme.slices for run in first.runs] == [run.scheme.slices for run in second.runs]


def test_without_time_nothing_moves(priced, draft):
    assert rearranged(priced, draft, most_s=0.0).phases[0][0] is draft.phases[0][0]


@pytest.mark.deep
def test_sequences_move_to_the_pipeline_that_ends_first(priced):
    """Two equal pipelines, one of which has but a short sequence."""
    halves = [k for k in in_slices(priced.problem.candidates) if (k.num_devices, k.scheme.slices) == (16, 16)]
    candidate = max(halves, key=lambda option: option.max_tokens)
    assert candidate.max_tokens >= LENGTHS[0]
    packs = ((0,), (1, 2), (3, 4), *((k,) for k in range(5, 21))), ((21,),)
    uneven = DraftPlan(
        phases=(
            tuple(
                PipelineDraft(candidate=candidate, ranks=tuple(range(16 * number, 16 * number + 16)), packs=of_pipeline)
                for number, of_pipeline in enumerate(packs)
            ),
        )
    )
    moved = rearranged(priced, uneven, most_s=4.0)
    of_pipelines = [sorted(chain.from_iterable(pipeline.packs)) for pipeline in moved.phases[0]]
    assert sorted(chain.from_iterable(of_pipelines)) == list(range(len(LENGTHS))) and len(of_pipelines[1]) > 1
    assert time_s(priced, moved) < time_s(priced, uneven) * 0.9


@pytest.mark.parametrize("move", sliced_moves.MOVES)
def test_a_move_loses_no_sequence_and_leaves_no_pack_empty(move):
    random = sliced_moves.Random(0)
    packs = [sliced_moves.CutPack((0, 1, 2), 4), sliced_moves.CutPack((3,), 2), sliced_moves.CutPack((4, 5), 1)]
    for number in range(200):
        after = move(packs, number % len(packs), random)
        assert sorted(chain.from_iterable(positions for positions, _ in after)) == list(range(6))
        assert all(positions and slices >= 1 for positions, slices in after)


def test_a_shift_loses_no_sequence_and_leaves_no_pack_empty():
    random = sliced_moves.Random(0)
    first = [sliced_moves.CutPack((0, 1, 2), 4), sliced_moves.CutPack((3,), 2)]
    for others in ([], [sliced_moves.CutPack((4, 5), 1)]):
        for _ in range(100):
            after = list(chain.from_iterable(sliced_moves._shifted(first, others, random)))
            assert sorted(chain.from_iterable(positions for positions, _ in after)) == list(range(4 + 2 * len(others)))
            assert all(positions and slices >= 1 for positions, slices in after)


@pytest.mark.deep  # by default: moves of such packs above, moves of auto in test_planned_moves
def test_auto_moves_packs_where_plans_have_slices_and_the_simulator_takes_as_long(priced, monkeypatch):
    def planned():
        return Planner(policy="auto", problem=priced.problem).plan(PricedBatch(priced.problem, priced.batch))

    plan = planned()
    monkeypatch.setattr(sys.modules[DraftRefinement.__module__], "MOST_REARRANGED", 0)
    without = planned()
    assert any(part.slices for pipeline in plan.pipelines for part in pipeline.micro_batches)
    assert plan.time_s < without.time_s and plan.lower_bound_s == without.lower_bound_s
    assert simulate(plan).step_time_s == pytest.approx(plan.time_s, rel=1e-9)
