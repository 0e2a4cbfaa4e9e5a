"""A loss of all sequences of a step, whatever ranks and micro-batches they lie in, is that of a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.session import models
from tests.session.coupled_runs import (
    KEPT,
    refused_reads,
    score_pairs,
    steps_with_dropout,
    train_coupled_dpo,
    train_dpo_with_fsdp2,
    train_on_branches,
    train_tempered,
    train_tempered_alone,
    troubled_steps,
)
from tests.session.pairs import SGD, log_probability
from tests.session.test_pairs import EXACT, dpo_plainly
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def alone():
    return dpo_plainly()


WAYS = (
    {"policy": "dcp-intra", "keep": "all"},
    {"policy": "packed", "keep": "some"},
    {"policy": "static", "keep": "none", "optimizer": replace(SGD["optimizer"], loss_scale=256.0)},
    {"policy": "dcp-intra", "weights": "by-layer"},
)


SOME_WAYS = WAYS[1::2]
"""Forwards that keep all or nothing, scaled and static, are those of a loss that reads parameters, below."""


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(2, SOME_WAYS), *(pytest.param(n, WAYS, marks=pytest.mark.deep) for n in (1, 2, 3))],
)
def test_dpo_with_members_of_pairs_on_different_ranks_trains_what_a_plain_loop_trains(ranks, alone, num_ranks, ways):
    for trained in ranks(num_ranks).run(train_coupled_dpo, ways):
        for way, (losses, is_apart, weights) in zip(ways, trained, strict=True):
            np.testing.assert_allclose(losses, alone[0], rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, alone[1])
            assert is_apart == (num_ranks > 1), (way, "pairs are split over ranks")


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_parameters_that_the_loss_itself_reads_get_its_gradient_once(ranks, num_ranks):
    losses, weights = train_tempered_alone()
    scaled = replace(SGD["optimizer"], loss_scale=256.0)
    ways = ({"keep": "all"}, {"keep": "none", "policy": "static", "optimizer": scaled})
    for trained in ranks(num_ranks).run(train_tempered, ways):
        for found, trained_weights in trained:
            np.testing.assert_allclose(found, losses, rtol=EXACT)
            assert_equal_weights(trained_weights, weights)


def test_tensors_that_would_get_no_gradient_from_the_loss_are_refused_by_name(ranks):
    for foreign, sharded in ranks(2).run(refused_reads):
        assert "coupled_loss reads a tensor [] that requires a gradient and is no parameter of the model" in foreign
        assert "norm.weight cannot be read or written here: weights are gathered by layer" in sharded


def test_dpo_of_a_model_that_fsdp2_shards_trains_what_a_plain_loop_trains(ranks, alone):
    for losses, kept, weights in ranks(2).run(train_dpo_with_fsdp2):
        np.testing.assert_allclose(losses, alone[0], rtol=EXACT)
        assert_equal_weights(weights, alone[1])
        assert not any(kept), "FSDP2 computes a backward right after its forward"


def test_scores_of_pairs_that_are_planned_apart_are_those_of_each_member(ranks):
    model = models.gpt()
    for scores, own in ranks(2).run(score_pairs):
        for values, pair in zip(scores, own, strict=True):
            expected = [float(log_probability(model, member).detach()) for member in pair]
            np.testing.assert_allclose(np.array(values, dtype=float), expected, rtol=EXACT)


@pytest.mark.deep  # by default: test_shared_prefixes, and coupled losses above
def test_a_loss_that_couples_groups_is_the_same_where_their_prefixes_are_shared(ranks):
    for results in zip(ranks(2).run(train_on_branches, True), ranks(2).run(train_on_branches, False)):
        (loss, weights), (expected, others) = results
        assert loss == pytest.approx(expected, rel=EXACT)
        assert_equal_weights(weights, others)


def test_a_second_forward_draws_the_dropout_of_the_first(ranks):
    for gradients in ranks(2).run(steps_with_dropout, list(KEPT)):
        assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-12)


SAID = {
    "an error in a first forward": ("_LoopError", "rank 0: left it before the loss"),
    "an error in a second forward": ("_LoopError", "of its 2 micro-batches, by an error"),
    "a break": ("update after 0 of 2", "rank 0: left it before the loss"),
    "no call": ("got no step.couple(values)", "rank 0: left it before the loss"),
    "a loss instead": ("prepared with coupled_loss=", "rank 0: left it before the loss"),
    "no tensor": ("takes one value, or one array, for each of the 2 sequences", "rank 0: left it before the loss"),
    "a wrong number of values": (
        "takes one value, or one array, for each of the 2 sequences",
        "rank 0: left it before the loss",
    ),
    "another shape later": ("got values [1] in torch.float64", "rank 0: left it before the loss"),
    "another shape here": ("[s, 1] in float64 on rank 0", "of [s] in float64 on rank 1"),
    "an infinite value": ("are not both finite",) * 2,
    "a loss that fails": ("coupled_loss failed on values [3, 2]: IndexError",) * 2,
    "a loss that fails here": ("rank 0: coupled_loss failed",) * 2,
    "a loss that differs": ("on ranks 0 to 1 of the same values",) * 2,
    "a loss of each unit": ("returns one number made of them; got float64 of shape [3]",) * 2,
    "a loss without a gradient": ("got a number that does not depend on them",) * 2,
    "a loss that is a float": ("got float",) * 2,
    "a loss that is no number": ("are not both finite",) * 2,
    "no memory in the forward": ("None",) * 2,
    "no memory in the backward": ("None",) * 2,
}


LIKE_OTHERS = ("a break", "a wrong number of values", "an infinite value")
"""What steps of any loss say, or other troubles here; in deep runs."""


@pytest.mark.parametrize("keep", ["some", *(pytest.param(keep, marks=pytest.mark.deep) for keep in ("all", "none"))])
def test_what_goes_wrong_on_one_rank_is_told_on_all_and_the_step_comes_again(ranks, keep):
    troubles = [trouble for trouble in SAID if keep != "some" or trouble not in LIKE_OTHERS]
    of_ranks = ranks(2).run(troubled_steps, troubles, keep)
    (_, _, expected), *_ = of_ranks[0]
    for rank, told in enumerate(of_ranks):
        for trouble, said, loss in told[1:]:
            has_trouble = (trouble, keep) != ("an error in a second forward", "all")
            assert len(said) == has_trouble and all(SAID[trouble][rank] in words for words in said), (
                trouble,
                rank,
                said,
            )
            assert loss == pytest.approx(expected, rel=EXACT)
