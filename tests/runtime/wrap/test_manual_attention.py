"""Attention that a model writes out becomes a scale and a bias by position, or is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.manual_attention import (
    begin_scores,
    begin_scores_with_bias,
    find_scores,
    record_operation,
)

HEADS, T, SIZE = 3, 5, 4
GENERATOR = torch.Generator().manual_seed(0)
BIAS = torch.randn(HEADS, T, T, generator=GENERATOR, dtype=torch.float64)


def scores_of(*leading, t=T, keys=None, dtype=torch.float64):
    """Scores of random queries and keys."""
    query = torch.randn(*leading, t, SIZE, generator=GENERATOR, dtype=torch.float64).to(dtype)
    key = torch.randn(*leading, keys or t, SIZE, generator=GENERATOR, dtype=torch.float64).to(dtype)
    return begin_scores(query, key.transpose(-2, -1))


def recorded(scores, *operations):
    """Scores after ``operations``: a function and its further arguments each."""
    for function, *others in operations:
        scores = record_operation(function, (scores, *others), {})
    return scores


@pytest.mark.parametrize("leading", [(2, HEADS), (HEADS,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_recorded_computes_what_the_model_computes(leading, dtype):
    scores = recorded(scores_of(*leading, dtype=dtype), (torch.mul, 0.5), (torch.add, BIAS[0].to(dtype)))
    attended = scores.attended
    value = torch.randn(*leading, T, SIZE + 1, generator=GENERATOR, dtype=torch.float64)
    weights = (0.5 * attended.query @ attended.key.mT + BIAS[0].to(dtype)).softmax(-1)
    torch.testing.assert_close(attended.of(value), weights.double() @ value)
    if len(leading) == 2:  # a model may flatten rows and heads of its values
        flat = value.flatten(0, 1)
        torch.testing.assert_close(attended.of(flat), (weights.double() @ value).flatten(0, 1))


@pytest.mark.parametrize("leading", [(1, HEADS), (HEADS,), (2, HEADS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_operations_become_a_scale_and_a_bias_for_each_head(leading, dtype):
    """A bias of each head, one of all, and none; what is hidden is minus infinity."""
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    bias = BIAS.to(dtype)
    for given, expected in ((bias, bias), (bias[:1], bias[:1]), (torch.zeros(T, T, dtype=dtype), torch.zeros(1, T, T))):
        scores = recorded(scores_of(*leading, dtype=dtype), (torch.mul, 0.25), (torch.add, given))
        scores = recorded(scores, (torch.masked_fill, ~seen, -math.inf))
        scale, found = scores.attended.scale_and_bias()
        assert scale == pytest.approx(0.25, rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
        expected = expected.double().masked_fill(~seen, -math.inf)
        if len(expected) == HEADS and leading[0] == 2:
            expected = expected.repeat(2, 1, 1) if len(found) == 2 * HEADS else expected
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-12)


def test_a_bias_may_need_all_heads_or_the_dtype_of_the_model():
    viewed = recorded(scores_of(HEADS), (Tensor.view, 1, HEADS, T, T), (torch.add, BIAS))
    scale, bias = viewed.attended.scale_and_bias()
    assert scale == pytest.approx(1.0)
    torch.testing.assert_close(bias, BIAS)
    flattened = recorded(scores_of(2, HEADS), (Tensor.view, 2 * HEADS, T, T), (torch.add, BIAS[0]))
    torch.testing.assert_close(flattened.attended.scale_and_bias(), (1.0, BIAS[:1]))
    single = in_its_dtype(scores_of(HEADS, dtype=torch.float32)).attended
    torch.testing.assert_close(single.scale_and_bias()[1], torch.ones(1, T, T))
    with pytest.raises(InputError, match="calls baddbmm between its products"):
        replace(single, query=single.query.bfloat16()).scale_and_bias()


def test_products_added_to_a_bias_have_its_factors():
    query = torch.randn(HEADS, T, SIZE, generator=GENERATOR, dtype=torch.float64)
    for factors in ({}, {"beta": 0.5, "alpha": 0.25}, {"alpha": 2.0}, {"beta": 0.0}):
        attended = begin_scores_with_bias(BIAS, query, query.mT, **factors).attended
        torch.testing.assert_close(attended.logits(query @ query.mT), torch.baddbmm(BIAS, query, query.mT, **factors))
        assert len(attended.steps) == (factors.get("alpha", 1.0) != 1.0) + (factors.get("beta", 1.0) != 0.0)


def in_its_dtype(scores, added=1.0):
    """Scores and ``added``, by a function that takes one dtype alone and all heads."""
    ones = torch.ones(HEADS, 1, T, dtype=scores.dtype)
    return record_operation(torch.baddbmm, (scores, added * ones.mT, ones), {})


def test_rounding_of_the_dtype_is_no_difference():
    low = in_its_dtype(recorded(scores_of(HEADS, dtype=torch.bfloat16), (torch.mul, 0.3)))
    assert low.attended.scale_and_bias()[0] == pytest.approx(0.3, rel=2e-2)
    large = in_its_dtype(recorded(scores_of(HEADS, dtype=torch.float32), (torch.mul, 0.3)), 1e4)
    assert large.attended.scale_and_bias()[0] == pytest.approx(0.3, rel=1e-2)
    with pytest.raises(InputError, match="does more to its logits"):
        in_its_dtype(recorded(scores_of(HEADS, dtype=torch.float32), (bent, 1e-2))).attended.scale_and_bias()


def test_scale_and_bias_are_those_of_float64_where_that_can_be_computed():
    scores = recorded(scores_of(HEADS, dtype=torch.float32), (torch.mul, 0.3), (torch.add, 1e4))
    scale, bias = scores.attended.scale_and_bias()
    assert scale == pytest.approx(0.3, rel=1e-9) and torch.equal(bias, torch.full((1, T, T), 1e4).double())
    swapped = recorded(scores_of(HEADS, dtype=torch.float32), (torch.add, BIAS), (torch.mul, 0.3))
    swapped = record_operation(Tensor.__getitem__, (swapped, ([2, 0, 1],)), {})
    torch.testing.assert_close(swapped.attended.scale_and_bias(), (0.3, 0.3 * BIAS[[2, 0, 1]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cast", [(Tensor.float,), (Tensor.to, torch.bfloat16), (Tensor.type_as, torch.zeros(1).half())]
)
def test_a_cast_before_the_softmax_rounds_no_scale(dtype, cast):
    root = math.sqrt(8)
    scores = recorded(scores_of(HEADS, dtype=dtype), (Tensor.__truediv__, root), cast, (torch.add, BIAS[0]))
    scale, bias = scores.attended.scale_and_bias()
    assert scale == pytest.approx(1 / root, rel=1e-14)
    torch.testing.assert_close(bias, BIAS[:1], rtol=0, atol=1e-14)


def bent(logits, amount):
    return logits + amount * logits * logits


@pytest.mark.parametrize("t", [T, 300])
def test_more_than_a_scale_and_a_bias_is_refused_but_for_rounding(t):
    assert scores_of(1, HEADS, t=t).shape[-1] == t
    with pytest.raises(InputError, match="does more to its logits than to scale them"):
        recorded(scores_of(1, HEADS, t=t), (bent, 1e-2)).attended.scale_and_bias()
    assert recorded(scores_of(1, HEADS, t=t), (bent, 1e-5)).attended.scale_and_bias()[0] == pytest.approx(1, abs=1e-4)
    by_half = scores_of(1, HEADS, t=t), (lambda x: x.masked_fill(x == 0.5, 7.0),)
    if t == T:  # any function that is linear at 0, 1 and 1 / 2 alone passes where all numbers are 1 / 2
        recorded(*by_half).attended.scale_and_bias()
    else:
        with pytest.raises(InputError, match="does more to its logits"):
            recorded(*by_half).attended.scale_and_bias()


def test_what_is_hidden_may_be_anything_and_the_scale_is_that_of_what_is_seen():
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    kept = record_operation(torch.where, (seen, recorded(scores_of(1, HEADS), (torch.mul, 3.0)), -6000.0), {})
    scale, bias = kept.attended.scale_and_bias()
    assert scale == 3.0 and torch.equal(bias, torch.zeros(1, T, T).masked_fill(~seen, -math.inf).double())
    low = record_operation(torch.where, (seen, recorded(scores_of(1, HEADS), (torch.mul, 3.0)), -4000.0), {})
    with pytest.raises(InputError, match="does more to its logits"):
        low.attended.scale_and_bias()  # seen, and not scaled


def test_questions_about_scores_are_answered_and_record_nothing():
    scores = scores_of(2, HEADS)
    assert record_operation(Tensor.size, (scores, -1), {}) == T and record_operation(Tensor.dim, (scores,), {}) == 4
    assert record_operation(Tensor.shape.__get__, (scores,), {}) == (2, HEADS, T, T)
    assert record_operation(Tensor.numel, (scores,), {}) == 2 * HEADS * T * T
    assert scores.attended.steps == () and scores.attended.dropout == 0.0 and not scores.attended.is_weights


def test_scores_are_found_in_lists_and_keyword_arguments():
    scores = scores_of(HEADS)
    assert find_scores((1, torch.ones(2), [2, (scores,)])) is scores
    assert find_scores((1, [torch.ones(2)], ())) is None
    added = record_operation(torch.add, (torch.ones(T, T),), {"other": scores})
    torch.testing.assert_close(added.attended.scale_and_bias()[1], torch.ones(1, T, T).double())
    stacked = record_operation(torch.cat, ([scores, torch.zeros(HEADS, T, 1)], -1), {})
    assert stacked.shape == (HEADS, T, T + 1)


@pytest.mark.parametrize("options", [{"dim": -1}, {"dim": 2}])
def test_softmax_over_keys_makes_weights_and_any_other_is_refused(options):
    scores = scores_of(HEADS)
    weights = record_operation(F.softmax, (scores,), options)
    assert weights.attended.is_weights and not scores.attended.is_weights and weights.attended.steps == ()
    with pytest.raises(InputError, match="calls softmax between"):
        record_operation(F.softmax, (weights,), options)
    for wrong in (0, 1, -2):
        with pytest.raises(InputError, match="calls softmax between"):
            record_operation(F.softmax, (scores,), {"dim": wrong})


@pytest.mark.parametrize(
    ("args", "kwargs", "dropout"),
    [
        ((0.3, True), {}, 0.3), ((0.3, False), {}, 0.0), ((), {"p": 0.2, "training": True}, 0.2),
        ((0.2,), {"training": False}, 0.0), ((), {"p": 0.2, "train": True}, 0.2), ((0.3, True, False), {}, 0.3),
    ],
)  # fmt: skip
def test_dropout_of_weights_is_noted(args, kwargs, dropout):
    weights = recorded(scores_of(HEADS), (F.softmax, -1))
    dropped = record_operation(F.dropout, (weights, *args), kwargs)
    assert dropped.attended.dropout == dropout and dropped.attended.is_weights and dropped.shape == weights.shape


def test_weights_may_change_their_dtype_and_rows_and_nothing_else():
    weights = recorded(scores_of(2, HEADS), (F.softmax, -1))
    assert recorded(weights, (Tensor.to, torch.float32)).dtype == torch.float32
    assert recorded(weights, (Tensor.view, 2 * HEADS, T, T)).shape == (2 * HEADS, T, T)
    for function, *others in ((Tensor.transpose, -2, -1), (torch.mul, 1.05), (Tensor.flip, 1), (Tensor.view, 2, -1)):
        with pytest.raises(InputError, match=f"calls {function.__name__} between its products"):
            recorded(weights, (function, *others))


def test_operations_in_place_change_the_scores_themselves():
    scores = scores_of(HEADS)
    assert recorded(scores, (Tensor.mul_, 0.5)) is scores and len(scores.attended.steps) == 1
    assert recorded(scores, (Tensor.__mul__, 0.5)) is not scores and len(scores.attended.steps) == 1
    assert scores.attended.scale_and_bias()[0] == 0.5


def test_a_pack_longer_than_a_table_is_taken_where_positions_are_known():
    """The table cannot be applied, and what follows is not computed."""
    table = torch.ones(T - 2, T - 2, dtype=torch.float64)
    with pytest.raises(InputError, match="calls add between its products"):
        recorded(scores_of(HEADS), (torch.add, table))
    scores = scores_of(HEADS)
    beyond = record_operation(torch.add, (scores, table), {}, is_known=True)
    assert beyond.attended.is_beyond and beyond.shape == scores.shape and not scores.attended.is_beyond
    weights = recorded(scores, (F.softmax, -1))
    for wrong, other in (
        (weights, table),
        (scores, torch.ones(T + 2, T + 2)),
        (scores, torch.ones(T - 2)),
        (scores, "a"),
    ):
        with pytest.raises(InputError, match="calls add between its products"):
            record_operation(torch.add, (wrong, other), {}, is_known=True)


def test_what_is_trained_or_no_tensor_is_refused():
    with pytest.raises(InputError, match="calls add of its logits and of what is trained"):
        recorded(scores_of(HEADS), (torch.add, torch.zeros(T, T, dtype=torch.float64, requires_grad=True)))
    with pytest.raises(InputError, match="calls topk between"):
        recorded(scores_of(HEADS), (torch.topk, 2))
    with pytest.raises(InputError, match=r"takes its logits to .*, which cannot be honoured"):
        torch.ops.aten.exp(scores_of(HEADS))
    with pytest.raises(InputError, match="calls mul between its products"):
        recorded(recorded(scores_of(HEADS), (F.softmax, -1)), (torch.mul, 0.0))
