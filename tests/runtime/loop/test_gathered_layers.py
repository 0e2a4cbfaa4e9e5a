"""Weights that are gathered layer by layer train as the model's own loop does, and no rank hangs or holds more."""

import random

import pytest
import torch

from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import plain_loop, train_through_trouble
from tests.runtime.loop.runs import (
    EXACT,
    LENGTHS,
    Packs,
    assert_exact,
    in_double,
    plan_of,
    prepared,
    step_alone,
    step_on_ranks,
    train,
)
from tests.runtime.loop.test_families import CASES, DEGREES
from tests.runtime.train.runs import local_world


@pytest.mark.parametrize(("name", "num_kept"), [("llama", 1), ("gpt2", 3), ("bert", 0)])
def test_a_family_whose_weights_are_gathered_by_layer_is_exact_at_degrees_1_to_4(ranks, name, num_kept):
    for found in ranks(4).run(step_on_ranks, CASES[name], DEGREES, by_layer=True, num_kept=num_kept):
        assert_exact(CASES[name], found, name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep) for name in CASES])
def test_every_family_is_exact_however_many_layers_stay_whole(ranks, name):
    for num_kept in range(4):
        for found in ranks(4).run(step_on_ranks, CASES[name], DEGREES, by_layer=True, num_kept=num_kept):
            assert_exact(CASES[name], found, name)


@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [(2, 1, 0), *(pytest.param(*p, marks=pytest.mark.deep) for p in ((4, 2, 1), (2, 2, 2)))],
)
def test_a_rank_that_runs_out_of_memory_goes_on_gathering_for_the_others(ranks, num_ranks, degree, recomputed):
    expected = ranks(1).run(memory_runs.train, 1, 0, {})[0]
    places = [f"{way} of layer {layer}" for way in ("forward", "backward") for layer in range(memory_runs.LAYERS)]
    for place in places:
        for losses, told, weights in ranks(num_ranks).run(
            memory_runs.train, degree, recomputed, {1: (place,)}, by_layer=True
        ):
            assert told == ["rank 1 in micro-batch 0"]
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("trained", memory_runs.TRAINED)
def test_a_model_of_which_only_parts_are_trained_gathers_those(ranks, trained):
    expected = ranks(1).run(memory_runs.train, 1, 0, {}, trained)[0]
    for recomputed in (0, 3):
        for losses, _, weights in ranks(3).run(memory_runs.train, 1, recomputed, {}, trained, by_layer=True):
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", ["before the forward", "before the backward", "the loss", "after the backward"])
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [
        (3, 1, 2),
        *(pytest.param(2, degree, recomputed, marks=pytest.mark.deep) for degree, recomputed in ((1, 0), (2, 1))),
    ],
)
def test_a_rank_that_leaves_a_step_goes_on_gathering_for_the_others(ranks, num_ranks, degree, recomputed, place):
    losses, expected = plain_loop()
    for found, weights, _ in ranks(num_ranks).run(
        train_through_trouble, degree, recomputed, place, {num_ranks - 1}, by_layer=True
    ):
        assert found == pytest.approx(losses, abs=1e-10)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def random_groups(rng, num_ranks, num_layers=3):
    """Phases of disjoint groups of ranks with any number of packs each, of every sequence once."""
    ids = rng.sample(range(len(LENGTHS)), len(LENGTHS))
    packs = []
    while ids:
        count = rng.randint(1, len(ids))
        packs.append(tuple(ids[:count]))
        ids = ids[count:]
    groups = []
    for phase in range(rng.randint(1, 2)):
        ranks = rng.sample(range(num_ranks), num_ranks)
        while ranks:
            degree = rng.randint(1, len(ranks))
            groups.append((phase, tuple(ranks[:degree]), []))
            ranks = ranks[degree:]
    for pack in packs:
        rng.choice(groups)[2].append(pack)
    return tuple(
        Packs(ranks=ranks, packs=tuple(own), phase=phase, recompute=tuple(rng.choices([True, False], k=num_layers)))
        for phase, ranks, own in groups
    )


def gradients_of_random_plans(name, seeds, expected):
    """The largest error of this rank's share of the gradient, and of the loss, over a step of each seed's plan."""
    case, world, errors = CASES[name], local_world(), []
    with in_double():
        run = prepared(case, random_groups(random.Random(0), world.size), world, num_steps=len(seeds), by_layer=True)
        run.lr, number = lambda step: 0.0, run.wrapped_model.structure.num_layers
        run.planner = lambda batch: plan_of(
            batch, random_groups(random.Random(seeds[batch.step]), world.size, number), number
        )
        run.keep_layers = lambda plan: seeds[plan.step] % (number + 1)
        own = torch.cat([
            expected[1][slot.name].flatten()[max(a, slot.start) - slot.start : max(0, b - slot.start)]
            for a, b in run.state.owned_layout.intervals[world.rank] for slot in run.state.table.slots.values()
        ])  # fmt: skip
        run.on_finish = lambda step: errors.append(
            max(abs(step.result.loss - expected[0]), float((run.state.pushed - own).abs().max()))
        )
        train(run)
        run.close()
    return errors


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_plans"),
    [
        ("llama", 3, 12),
        *(pytest.param(name, ranks, 400, marks=pytest.mark.deep) for name in CASES for ranks in (2, 3, 4)),
    ],
)
def test_random_plans_are_exact(ranks, name, num_ranks, num_plans):
    loss, changes = step_alone(CASES[name])
    expected = loss, {parameter: -change for parameter, change in changes.items()}
    for first in range(0, num_plans, 20):
        seeds = range(first, min(first + 20, num_plans))
        for errors in ranks(num_ranks).run(gradients_of_random_plans, name, seeds, expected):
            assert len(errors) == len(seeds) and max(errors) <= EXACT, max(zip(errors, seeds))
