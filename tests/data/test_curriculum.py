"""Curricula: every sequence once, none before its difficulty is reached, and otherwise at random."""

from collections import Counter
from itertools import pairwise, permutations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config.limits import MOST_BLOCKS
from lengthwise.core.errors import InputError
from lengthwise.data.curriculum import PACINGS, Curriculum, Pacing, paced_order
from lengthwise.data.order import Shuffled
from lengthwise.data.rng import draw, raw_stream

PACED = ("linear", "root", "step")
CHI_SQUARE_TAIL = 4.0
"""Standard deviations of chi-square above its mean: one draw of seeds in some ten thousand is beyond."""

pacings = st.builds(Pacing, name=st.sampled_from(PACED), start=st.floats(1e-3, 1), stages=st.integers(1, 7))


@given(count=st.integers(1, 80), pacing=pacings, seed=st.integers(0, 1 << 40), epoch=st.integers(0, 3))
def test_every_rank_comes_once_and_not_before_it_is_reached(count, pacing, seed, epoch):
    order = paced_order(count, pacing, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(count))
    for position, rank in enumerate(order.tolist()):
        assert rank < pacing.reached(position + 1, count)


@pytest.mark.parametrize("name", PACED)
def test_more_sequences_than_blocks_keep_to_the_pacing_within_a_block(name):
    count = 20 * MOST_BLOCKS + 7
    pacing = Pacing(name=name, start=0.05, stages=3)
    order = paced_order(count, pacing, seed=1, epoch=0)
    assert (np.sort(order) == np.arange(count)).all()
    reached = [pacing.reached(position + 1, count) for position in range(0, count, 97)]
    assert (order[::97] < np.array(reached) + 21).all()
    used = np.maximum.accumulate(order)[::97] / np.array(reached)
    assert (used[5:] > 0.9).all(), "hard ones come as soon as they may"


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("name", "start"), [("linear", 0.6), ("root", 0.5), ("step", 0.6)])
def test_all_orders_that_the_pacing_allows_are_as_likely(name, start):
    count, num_draws, pacing = 5, 1200, Pacing(name=name, start=start, stages=2)
    allowed = [
        order
        for order in permutations(range(count))
        if all(rank < pacing.reached(at + 1, count) for at, rank in enumerate(order))
    ]
    seen = Counter(tuple(paced_order(count, pacing, seed=seed, epoch=0).tolist()) for seed in range(num_draws))
    assert set(seen) <= set(allowed) and len(allowed) >= 8
    expected = num_draws / len(allowed)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in allowed)
    freedom = len(allowed) - 1
    assert chi_square < freedom + CHI_SQUARE_TAIL * sqrt(2 * freedom)


@given(size=st.integers(1, 60), share=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_drawn_numbers_are_different_and_below_the_size(size, share, seed):
    count = max(1, round(share * size))
    drawn = draw(raw_stream(seed=seed, epoch=0), count, size)
    assert len(drawn) == count == len(set(drawn.tolist())) and drawn.min() >= 0 and drawn.max() < size


@pytest.mark.parametrize("count", [2, 4])
def test_every_number_is_as_likely_at_every_place(count):
    size, num_draws, stream = 6, 6000, raw_stream(seed=3, epoch=0)
    drawn = np.array([draw(stream, count, size) for _ in range(num_draws)])
    for place in range(count):
        seen = np.bincount(drawn[:, place], minlength=size)
        assert abs(seen - num_draws / size).max() < 5 * sqrt(num_draws / size)


def test_competence_is_that_of_the_formulas():
    for position in range(0, 1000, 7):
        x = position / 1000
        assert Pacing(name="linear", start=0.25).reached(position, 1000) == pytest.approx(
            1000 * (0.25 + 0.75 * x), abs=1
        )
        assert Pacing(name="root", start=0.1).reached(position, 1000) == pytest.approx(
            1000 * sqrt(0.01 + 0.99 * x), abs=1
        )


@pytest.mark.parametrize(
    ("start", "levels"),
    [
        (0.5, {1: 500, 200: 500, 201: 625, 401: 750, 601: 875, 801: 1000, 1000: 1000}),
        (0.1, {1: 100, 100: 100, 101: 325, 325: 325, 326: 550, 551: 775, 775: 775, 776: 1000}),
    ],
)
def test_steps_are_equal_and_come_evenly_or_when_all_is_used_up(start, levels):
    pacing = Pacing(name="step", start=start, stages=4)
    assert {position: pacing.reached(position, 1000) for position in levels} == levels


@given(count=st.integers(1, 60), stages=st.integers(1, 9), seed=st.integers(0, 99))
def test_natural_groups_are_of_equal_size_and_shuffled_within(count, stages, seed):
    values = np.random.default_rng(seed).permutation(count)
    order = Curriculum(values=values, digest="m", pacing=Pacing(name="natural", stages=stages))
    ids = order.arrange(np.arange(count), seed=seed, epoch=0)
    edges = [0, *order.breaks(count, epoch=0).tolist()]
    assert edges[-1] == count and max(b - a for a, b in pairwise(edges)) - min(b - a for a, b in pairwise(edges)) <= 1
    for start, end in pairwise(edges):
        assert sorted(values[ids[start:end]].tolist()) == list(range(start, end))


@pytest.mark.parametrize("name", PACINGS)
def test_after_its_epochs_a_curriculum_is_shuffled(name):
    ids = np.arange(50) * 3
    order = Curriculum(values=np.arange(150), digest="m", pacing=Pacing(name=name, epochs=2))
    shuffled = [Shuffled().arrange(ids, seed=4, epoch=epoch).tolist() for epoch in range(4)]
    arranged = [order.arrange(ids, seed=4, epoch=epoch).tolist() for epoch in range(4)]
    assert arranged[2:] == shuffled[2:] and order.breaks(50, epoch=2) is None
    assert arranged[0] != shuffled[0] and arranged[0] != arranged[1]
    assert all(sorted(epoch) == ids.tolist() for epoch in arranged)


def test_equal_values_are_told_apart_by_id_and_a_sequence_taken_twice_comes_twice():
    order = Curriculum(values=np.zeros(4), digest="m", pacing=Pacing(name="step", start=1e-9, stages=1000))
    assert order.arrange(np.array([0, 1, 1, 3]), seed=0, epoch=0).tolist() == [0, 1, 1, 3]


def test_the_order_is_the_one_of_the_first_release():
    orders = {name: paced_order(12, Pacing(name=name, start=0.5), seed=1, epoch=2).tolist() for name in PACED}
    assert orders == {
        "linear": [1, 5, 2, 0, 7, 4, 8, 3, 9, 10, 6, 11],
        "root": [1, 5, 2, 0, 6, 4, 3, 7, 9, 10, 8, 11],
        "step": [1, 4, 2, 6, 0, 3, 8, 7, 5, 9, 10, 11],
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "cubic"}, "no pacing 'cubic'"),
        ({"start": 0.0}, "pacing_start 0"),
        ({"start": 1.5}, "pacing_start 1.5"),
        ({"stages": 0}, "pacing_stages 0"),
        ({"stages": 5000}, "pacing_stages 5,000"),
        ({"epochs": 0}, "curriculum_epochs 0"),
    ],
)
def test_a_pacing_that_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        Pacing(**wrong)
