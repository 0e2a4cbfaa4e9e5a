"""Orders by name, by metric and within windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.batch_budget import Budget
from lengthwise.data.order import ORDERS, OrderSettings, make_order
from lengthwise.data.sort_key import by_length, of_values
from lengthwise.data.synthetic import synthetic_lengths


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_holds_what_it_was_given_and_depends_on_seed_and_epoch_alone(name):
    ids = np.array([0, 2, 2, 5, 7, 8, 9, 11, 12, 13, 17, 19])
    measured = of_values(np.random.default_rng(0).random(20), 20)
    orders = [make_order(OrderSettings(order=name, window=4), measured) for _ in range(2)]
    for epoch in range(3):
        first, again = (order.arrange(ids, seed=5, epoch=epoch).tolist() for order in orders)
        assert first == again and sorted(first) == ids.tolist()
    assert orders[0].to_json() == orders[1].to_json()
    changes = [orders[0].arrange(ids, seed=5, epoch=0).tolist() != orders[0].arrange(ids, seed=5, epoch=1).tolist()]
    changes += [orders[0].arrange(ids, seed=5, epoch=0).tolist() != orders[0].arrange(ids, seed=6, epoch=0).tolist()]
    assert changes == [name not in ("corpus", "sorted")] * 2


def test_sorted_is_by_metric_and_equal_ones_by_id():
    order = make_order("sorted", of_values([3.0, 1.0, 2.0, 1.0], 4))
    assert order.arrange(np.arange(4), seed=0, epoch=0).tolist() == [1, 3, 2, 0]


@given(count=st.integers(1, 60), window=st.integers(1, 20), seed=st.integers(0, 99))
def test_windows_hold_a_random_part_each_and_are_sorted_up_and_down_in_turn(count, window, seed):
    values = np.random.default_rng(seed).integers(0, 9, count)
    ids = np.arange(count)
    arranged = make_order(OrderSettings(order="windowed", window=window), of_values(values, count)).arrange(
        ids, seed=seed, epoch=1
    )
    shuffled = make_order("shuffled").arrange(ids, seed=seed, epoch=1)
    for number, start in enumerate(range(0, count, window)):
        part = arranged[start : start + window]
        assert sorted(part.tolist()) == sorted(shuffled[start : start + window].tolist())
        assert values[part].tolist() == sorted(values[part].tolist(), reverse=number % 2 == 1)


def test_windows_take_padding_away():
    lengths = LengthIndex(lengths=synthetic_lengths("commoncrawl", 20_000))
    budget = Budget(tokens=32_768, padded=True)
    padding = {
        name: budget.cut(
            lengths.lengths[make_order(name, by_length(lengths)).arrange(np.arange(20_000), seed=0, epoch=0)]
        ).padding
        for name in ("shuffled", "windowed", "sorted")
    }
    assert padding["sorted"] < padding["windowed"] < 0.05 and padding["shuffled"] > 0.5


def test_metrics_are_told_apart_by_their_values_and_their_type():
    digests = {of_values(values, 3).digest for values in ([1, 2, 3], [1, 2, 4], [1.0, 2.0, 3.0], [True, False, True])}
    assert len(digests) == 4 and of_values([1, 2, 3], 3).digest == of_values(np.array([1, 2, 3]), 3).digest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0], "one number for each of 3 sequences"),
        ([[1.0], [2.0], [3.0]], r"shape \(3, 1\)"),
        (["a", "b", "c"], "one number"),
        ([1.0, np.nan, 2.0], "sequence 1 is nan"),
        ([1.0, 2.0, -np.inf], "sequence 2 is -inf"),
    ],
)
def test_what_is_no_metric_is_refused(values, said):
    with pytest.raises(InputError, match=said):
        of_values(values, 3)


def test_orders_that_cannot_be_made_are_refused():
    with pytest.raises(InputError, match=r"no order 'shufled'.*shuffled"):
        make_order("shufled")
    with pytest.raises(InputError, match=r"data.order=sorted follows a metric"):
        make_order("sorted")
    with pytest.raises(InputError, match=r"data.window 0"):
        make_order(OrderSettings(order="windowed", window=0), of_values([1], 1))
