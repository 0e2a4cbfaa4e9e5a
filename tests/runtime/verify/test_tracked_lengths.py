"""Integers that follow from a number of slots stay what they are, and know what they would be for other numbers."""

import copy
import functools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from lengthwise.runtime.verify.tracked_lengths import DecisionLog, TrackedFloat, TrackedInt, TrackLengths

SLOTS = 53


def track(num_slots=SLOTS):
    """A size of a tensor of so many slots, and its log."""
    log = DecisionLog(num_slots=num_slots)
    with TrackLengths(log):
        return torch.zeros(1, num_slots, 4).shape[1], log


OPERATIONS = [
    lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a * b, lambda a, b: a // b, lambda a, b: b % a,
    lambda a, b: a / b, lambda a, b: -a % b, lambda a, b: a & b, lambda a, b: a >> 1, lambda a, b: a**0.5 + b,
    lambda a, b: divmod(a, b)[1], lambda a, b: math.ceil(a / b), lambda a, b: math.floor(a / b), lambda a, b: abs(-a),
]  # fmt: skip


@example(lambda a, b: a & b, lambda a, b: math.ceil(a / b), 1, 1)
@given(st.sampled_from(OPERATIONS), st.sampled_from(OPERATIONS), st.integers(1, 70), st.integers(1, 500))
def test_a_formula_gives_what_the_operations_give_for_another_number_of_slots(first, second, constant, other):
    tracked, _ = track()
    try:
        expected = first(second(other, constant), constant)
        got = first(second(tracked, constant), constant)
    except (ZeroDivisionError, TypeError):  # of a remainder that is zero, or a float's bits
        return
    assert isinstance(got, TrackedInt | TrackedFloat)
    assert float(np.asarray(got.formula(np.array([other])), dtype=float)[0]) == pytest.approx(expected)


def test_decisions_say_at_which_lengths_they_are_the_same():
    tracked, log = track()
    is_short = max(tracked, 64) == 64
    if tracked % 13 and is_short and tracked != 36:
        tracked += -tracked % 16
    assert tracked == 64 and [decision.outcome for decision in log.decisions.values()][-1]
    lengths = np.arange(1, 100)
    taken = [
        np.asarray(decision.formula(lengths), dtype=bool) == decision.outcome for decision in log.decisions.values()
    ]
    expected = (lengths < 64) & (lengths % 13 != 0) & (lengths != 36) & (-(-lengths // 16) == 4)
    assert (np.logical_and.reduce(taken) == expected).all()


def test_sizes_that_follow_from_the_slots_are_tracked_and_others_are_not():
    log = DecisionLog(num_slots=SLOTS)
    with TrackLengths(log):
        x = torch.zeros(2, SLOTS, 4)
        target = x.shape[1] + -x.shape[1] % 16
        padded = F.pad(x, (0, 0, 0, target - x.shape[1]))
        sizes = x[:, 1:].size(1), x.numel(), padded.shape[1], x.size(2)
        assert not log.is_lost and len(x[0]) == SLOTS and log.is_lost
    assert [getattr(size, "text", None) for size in sizes] == ["(T - 1)", "(8 * T)", target.text, None]


def test_a_tracked_number_is_taken_wherever_a_plain_one_is():
    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n).tril()

    tracked, log = track()
    x = torch.zeros(1, SLOTS, 4)
    assert x.view(1, tracked, 2, 2).flatten(2)[:, :tracked].shape == x.shape
    assert json.dumps(tracked) == str(SLOTS)
    assert np.zeros(tracked).shape == (SLOTS,) and np.arange(tracked).dtype == np.int64
    assert type(pickle.loads(pickle.dumps(tracked))) is type(copy.deepcopy(tracked)) is int
    assert not log.is_lost
    assert mask(tracked).shape == (SLOTS, SLOTS) and {SLOTS: 1}[tracked] and log.is_lost
    assert int(tracked) == SLOTS and log.is_lost


def test_what_a_model_keeps_is_not_followed_after_its_forward():
    tracked, log = track()
    log.is_open = False
    assert tracked > 7 and type(tracked + 1) is int and not log.decisions and not log.is_lost
