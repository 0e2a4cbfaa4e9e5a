"""The learning-rate's factor: a function of the batch alone."""

import math

import numpy as np
import pytest

from lengthwise.core.batch import MASKED, GlobalBatch
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.lr_scaling import LrScaling, mean_size
from lengthwise.data.order import make_order
from lengthwise.data.sampler import Sampler


def batch_of(lengths, **more):
    return GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=tuple(lengths), **more)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_the_rules_are_the_published_ones(rule, factor):
    assert LrScaling(rule=rule, reference=16).factor(64) == factor


def test_the_published_example_gives_five_and_two_thousandths():
    # 30 tokens a batch, a rate of 1e-3 for batches of 2: batches of 10 and of 4 sequences.
    lengths = LengthIndex(lengths=np.array([3] * 10 + [7] * 4))
    sampler = Sampler(lengths, seed=0, tokens_per_step=30, order=make_order("corpus"))
    scaling = LrScaling(rule="linear", by="sequences", reference=2)
    batches = [next(sampler), next(sampler)]
    assert [len(batch.ids) for batch in batches] == [10, 4]
    assert [1e-3 * scaling.of(batch) for batch in batches] == pytest.approx([5e-3, 2e-3])


def test_sizes_count_tokens_sequences_or_targets():
    batch = batch_of([10, 30], objective=MASKED)
    factors = {by: LrScaling(by=by, reference=1).of(batch) for by in ("tokens", "sequences", "targets")}
    assert factors == {"tokens": 40, "sequences": 2, "targets": 2 + 4}
    assert LrScaling(by="targets", reference=4).of(batch_of([1])) == 0.25  # without a target


def test_the_clamp_bounds_the_factor_on_both_sides():
    scaling = LrScaling(rule="linear", reference=10, clamp=(0.5, 2))
    assert [scaling.factor(size) for size in (1, 10, 15, 1000)] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("by", ["tokens", "sequences", "targets"])
@pytest.mark.parametrize("budget", [{"tokens_per_step": 40}, {"sequences_per_step": 5}])
def test_the_reference_left_out_is_a_batch_of_mean_lengths(by, budget):
    lengths = LengthIndex(lengths=np.array([1, 7] * 50))  # 4 tokens on average
    budgets = {"tokens_per_step": None, "sequences_per_step": None, **budget}
    count = budget.get("sequences_per_step", 10)
    expected = {"tokens": 4.0 * count, "sequences": count, "targets": 3.0 * count}[by]
    assert math.isclose(mean_size(lengths, by=by, objective="next-token", **budgets), expected)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": "square"}, "no rule 'square'; known: none, linear, sqrt"),
        ({"by": "bytes"}, "no by 'bytes'"),
        ({"reference": 0}, "the reference is 0"),
        ({"clamp": (4, 0.25)}, r"the clamp is \(4, 0.25\)"),
    ],
)
def test_what_is_no_scaling_is_refused_by_name(wrong, said):
    with pytest.raises(InputError, match=said):
        LrScaling(**{"reference": 1, **wrong})


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_a_batch_without_a_size_has_no_factor(size):
    with pytest.raises(InputError, match="a batch has size"):
        LrScaling(reference=1).factor(size)
