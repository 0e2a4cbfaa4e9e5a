"""Batches that ranks bring themselves: planned, sent where they are computed, and as exact as a plain loop."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.rollouts import (
    batches,
    bring,
    degrees_of_forwards,
    fail_to_score,
    score,
    score_beside_step,
    token_logps,
    train_grpo,
    train_grpo_alone,
)
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT = 1e-11
NORMALISERS = ("tokens", "items", "constant")


@pytest.mark.parametrize("num_ranks", [*(pytest.param(number, marks=pytest.mark.deep) for number in (1, 3)), 2])
def test_a_step_of_brought_rollouts_trains_what_a_plain_loop_trains(ranks, num_ranks):
    # On two ranks means over tokens; others are those of test_objectives.py, which sums over them in such steps too.
    ways = [{"normaliser": normaliser} for normaliser in (() if num_ranks == 2 else NORMALISERS)]
    ways.append({"normaliser": "tokens", "policy": "auto", "packing": "always", "check": True})
    ways = [way | {"recompute": "auto" if num_ranks == 1 else "none"} for way in ways]
    used = set()
    for found in ranks(num_ranks).run(train_grpo, ways):
        for way, (losses, degrees, weights) in zip(ways, found):
            expected = train_grpo_alone(way["normaliser"])
            np.testing.assert_allclose(losses, expected[0], rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, expected[1])
            used |= degrees
    assert num_ranks == 1 or max(used) > 1, "ranks share the longest"


def test_iterated_batches_end_when_no_rank_has_one(ranks):
    way = {"normaliser": "tokens", "weights": "by-layer"}
    losses, weights = train_grpo_alone("tokens")
    for (found, _, theirs), *_ in ranks(2).run(train_grpo, [way], via="steps"):
        np.testing.assert_allclose(found, losses, rtol=EXACT)
        assert_equal_weights(theirs, weights)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "by-layer"},
        *(
            pytest.param(options, marks=pytest.mark.deep)
            for options in ({}, {"packing": "never", "cost": SimpleCost(capacity=50)})
        ),
    ],
)
def test_scores_come_back_to_the_rank_that_brought_the_items(ranks, options):
    model, brought = models.gpt(), 0
    losses = []
    for by_token, by_sequence, rows, loss in ranks(2).run(score, options):
        for found, total, row in zip(by_token, by_sequence, rows, strict=True):
            tokens = torch.as_tensor(row)
            with torch.no_grad():
                expected = token_logps(model(tokens[None])[0][0, :-1], tokens[1:]).numpy()
            np.testing.assert_allclose(found[:-1], expected, rtol=1e-10)
            assert found[-1] == 0, "the last token predicts nothing"
            np.testing.assert_allclose(total, expected.sum(), rtol=1e-10)
            assert np.shape(total) == (), "also where another rank computed it"
        brought += len(rows)
        losses.append(loss)
    assert brought == len(batches(2)[1])
    assert len(set(losses)) == 1


@pytest.mark.parametrize(
    ("options", "failure"),
    [
        pytest.param(options, failure, id=f"{name}-{failure}", marks=[pytest.mark.deep] * (name not in hard))
        for failure, hard in (("function", ("by-layer",)), ("memory", ("shared",)))
        for name, options in {
            "whole": {}, "by-layer": {"weights": "by-layer"},
            "shared": {"cost": SimpleCost(loss=-0.5), "policy": "static"},
        }.items()
    ],
)  # fmt: skip
def test_scores_that_fail_on_one_rank_are_refused_on_all_and_the_run_goes_on(ranks, options, failure):
    model, losses = models.gpt(), []
    reports = ranks(2).run(fail_to_score, options, failure)
    kind, said = (
        ("InputError", "KeyError: 'no such reward'") if failure == "function" else ("InfeasibleError", "memory")
    )
    for errors, scores, rows, loss in reports:
        ((name, message),) = errors
        assert name == kind and said in message
        for found, row in zip(scores, rows, strict=True):
            tokens = torch.as_tensor(row)
            with torch.no_grad():
                expected = token_logps(model(tokens[None])[0][0, :-1], tokens[1:]).sum()
            np.testing.assert_allclose(found, expected, rtol=1e-10)
        losses.append(loss)
    assert len(set(losses)) == 1
    assert reports[0][0][0][1].startswith("rank 1 cannot go on")


def test_forwards_have_plans_of_their_own(ranks):
    """What a backward would keep needs two ranks for the longest items; a forward fits one."""
    options = {"cost": SimpleCost(capacity=34), "recompute": "none"}
    for of_steps, of_scores, recomputes in ranks(2).run(degrees_of_forwards, options):
        assert max(of_steps) == 2 and of_scores == {1}
        assert not recomputes


ROW = {"input_ids": [1, 2, 3]}
REFUSED = {
    "no rank brought an item": [[], []],
    "item 0 of rank 1 has 99 tokens, over 64": [[ROW], [{"input_ids": [1] * 99}]],
    "item 1 of this step has token id 900": [[ROW], [ROW, {"input_ids": [1, 900]}]],
    "item 0 has labels and item 0 of the corpus has none": [[ROW | {"labels": [1, 2, 3]}], [ROW]],
    "run.step takes a list of items": [ROW, [ROW]],
    "item 0 is a unit, and item 0 of the corpus is a single sequence": [[(ROW, ROW)], []],
}


def test_items_that_cannot_be_used_are_refused_on_every_rank(ranks):
    for message, items in REFUSED.items():
        errors = ranks(2).run(bring, items, {"step_max_length": 64})
        assert any(message in text for _, text in errors), errors
        assert all(name == "InputError" for name, _ in errors), errors


def test_brought_token_ids_that_a_model_of_transformers_does_not_embed_are_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    run = lw.prepare(
        LlamaForCausalLM(config), [ROW], tokens_per_step=64, steps=1, cost=models.mixed_cost(), memory_gib=40,
        check=False, verbose=False,
    )  # fmt: skip
    items = [ROW, {"input_ids": [999_999, 1]}]
    takes = (run.step, lambda items: next(run.steps([items])), lambda items: run.score(items, token_logps))
    for take in takes:
        with pytest.raises(
            InputError,
            match="item 1 of this step has token id 999,999, LlamaForCausalLM embeds ids up to 49; use its tokenizer",
        ):
            take(items)
    run.close()


def test_ranks_that_step_and_score_at_once_are_told_so(ranks):
    for error in ranks(2).run(score_beside_step, {"max_degree": 1, "step_max_length": 40}):
        assert "rank 0 called run.step(items) of step 0, rank 1 called run.score(items) before step 0" in error
