"""Prepared models whose ranks reduce gradients to shares in every backward learn the same, whatever goes wrong."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.core.layout import shard_size
from lengthwise.runtime.loop import shared_gradients
from lengthwise.runtime.state.gradient_shares import GradientShares
from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import plain_loop, train_through_trouble, with_plans_changed
from tests.runtime.loop.memory_runs import plan_on
from tests.runtime.loop.runs import Packs, in_double, prepared
from tests.runtime.loop.test_families import CASES
from tests.runtime.loop.test_update_overlap import REST, steps_of

SHARED = (
    Packs(ranks=(2, 0), packs=((0, 1), (3,), (2,)), recompute=(True, False), shards_gradients=True),
    Packs(ranks=(1,), packs=(REST[:3], REST[3:]), recompute=(False, True)),
)
STAGED = (Packs(ranks=(2, 0, 3, 1), packs=((0, 1), (3, *REST), (2,)), stage_layers=(1, 2), shards_gradients=True),)
EXACT = 1e-12
"""float64: sums of a few numbers in another order, and three steps of AdamW."""


def with_shares(plan):
    pipelines = (replace(p, scheme=replace(p.scheme, shard_gradients=True)) for p in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def sharing(function, *arguments, **options):
    """``function`` where every plan shards gradients."""
    return with_plans_changed(with_shares, function, *arguments, **options)


def steps_with_shares(groups, *, reads_early):
    """Losses, weights, elements of gradients kept, and most units whole at once; with and without shares."""
    results = []
    for shards in (True, False):
        plan = tuple(replace(group, shards_gradients=shards and group.shards_gradients) for group in groups)
        sizes, most, reduce = [], [0], GradientShares._reduce

        def counted(self, unit, whole, most=most, sizes=sizes, reduce=reduce):
            most.append(1 + len(self._whole) + len(self._under_way))
            sizes.append(len(self._gradients))
            reduce(self, unit, whole)

        with mock.patch.object(GradientShares, "_reduce", counted):
            losses, weights, pushed, *_ = steps_of(plan, by_layer=False, overlaps=True, reads_early=reads_early)
        results.append((losses, weights, pushed, sizes[-1] if sizes else 0, max(most)))
    return results


@pytest.mark.deep  # by default: tests/session/test_prepared_gradient_shares.py
@pytest.mark.parametrize(
    ("groups", "num_ranks", "reads_early"),
    [
        (STAGED, 4, True),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in ((SHARED, 3, False), (SHARED, 3, True), (STAGED, 4, False))
        ),
    ],
)  # fmt: skip
def test_steps_learn_the_same_from_shares_of_gradients(ranks, groups, num_ranks, reads_early):
    """Also of a loss that read weights before the forward, whose gradients come after those of their unit."""
    with in_double():
        sizes = prepared(CASES["llama"], (), local_world_of_one(), num_steps=1).state.table.unit_sizes
    for rank, (shared, whole) in enumerate(ranks(num_ranks).run(steps_with_shares, groups, reads_early=reads_early)):
        assert shared[0] == pytest.approx(whole[0], rel=EXACT)
        for found, expected in zip(shared[1], whole[1]):
            torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
        has_share = groups is STAGED or rank != 1
        assert shared[3] == has_share * sum(shard_size(size, 2) for size in sizes)
        assert shared[4] <= (2 if not reads_early else len(sizes)) and whole[3:] == (0, 0)
        assert has_share == (shared[4] > 0)


def local_world_of_one():
    from lengthwise.runtime.comm.world import DistContext

    return DistContext(rank=0, size=1, device=torch.device("cpu"), ranks_per_node=1)


@pytest.mark.deep
@pytest.mark.parametrize(("num_ranks", "stages"), [(2, 1), (4, 2)])
@memory_runs.at_few_places_and_in_deep_runs_at_all
def test_a_rank_that_runs_out_of_memory_keeps_no_other_waiting(ranks, num_ranks, stages, places):
    pool, expected = ranks(num_ranks), memory_runs.train(1, 1, {})
    for place in places if stages == 1 else places[1::2]:
        failing = (num_ranks - 1,) if stages == 1 else range(num_ranks)
        for losses, told, weights in pool.run(
            sharing, memory_runs.train, 2, 1, dict.fromkeys(failing, (place,)), stages=stages
        ):
            assert told, place
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "place",
    [
        "before the backward",
        *(pytest.param(p, marks=pytest.mark.deep) for p in ("the loss", "before the forward", "after the backward")),
    ],
)
def test_a_rank_that_leaves_a_step_keeps_no_other_waiting(ranks, place):
    losses, expected = plain_loop()
    for found, weights, _ in ranks(2).run(sharing, train_through_trouble, 2, 1, place, {1}):
        assert found == pytest.approx(losses, abs=1e-10)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def test_a_rank_that_would_keep_other_shares_in_each_phase_is_refused():
    plan = with_shares(plan_on(2, 2, 0)(next(memory_runs.Stream())))
    assert shared_gradients.shares_of_step(plan) == [(0, 2), (1, 2)]
    (pipeline,) = plan.pipelines
    later = replace(pipeline, phase=1, scheme=replace(pipeline.scheme, shard_gradients=False))
    with pytest.raises(InputError, match="rank 0 would keep other shares of gradients in each phase"):
        shared_gradients.shares_of_step(replace(plan, pipelines=(pipeline, later)))
