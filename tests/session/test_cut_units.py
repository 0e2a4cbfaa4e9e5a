"""Units of sequences with shared prefixes that are cut over ranks: what is learned is what each by itself teaches."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InputError
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.branches import COLUMNS, MEMBERS, brought, groups, train_alone
from tests.session.coupled_runs import spread
from tests.session.cut_units import (
    gradients_with_dropout,
    refused_in_cut_steps,
    score_cut,
    spread_alone,
    tight_options,
    train_cut,
    train_for_balance,
)
from tests.session.pairs import prepared, train_plainly
from tests.session.test_prepare import assert_equal_weights
from tests.session.test_shared_prefixes import EXACT, batches_of_corpus, unique_tokens

WAYS = (
    {"kind": "clipped"},
    {"kind": "weighted", "policy": "auto"},
    {"kind": "sequences", "via": "step"},
    {"coupled_loss": spread, "cut_units": None},
    {"coupled_loss": spread, "cut_units": None, "via": "step"},
    {"kind": "tokens"},
    {"kind": "targets", "via": "step"},
    {"kind": "clipped", "methods": ("ring",), "policy": "static"},
    {"kind": "clipped", "weights": "by-layer"},
)


def alone(way, batches):
    """Losses and weights of a plain loop with every sequence by itself."""
    return train_plainly(spread_alone, batches) if "coupled_loss" in way else train_alone(way["kind"], batches)


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(2, WAYS[:1]), pytest.param(2, WAYS[1:], marks=pytest.mark.deep), pytest.param(3, WAYS, marks=pytest.mark.deep)],
)
def test_groups_that_fit_no_rank_train_what_every_sequence_by_itself_trains(ranks, num_ranks, ways):
    ways = [way | tight_options(num_ranks, brings="via" in way) for way in ways]
    for trained in ranks(num_ranks).run(train_cut, ways):
        for way, (losses, computed, repeated, ledger, weights) in zip(ways, trained, strict=True):
            batches = brought() if "via" in way else batches_of_corpus()
            expected_losses, expected_weights = alone(way, batches)
            np.testing.assert_allclose(losses, expected_losses, rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, expected_weights)
            units = [unit for of_step in batches for unit in of_step]
            assert repeated > 0 and computed == repeated + sum(map(unique_tokens, units)), way
            tokens = sum(len(member["input_ids"]) for unit in units for member in unit)
            assert ledger == (MEMBERS * len(units), tokens, repeated)


@pytest.mark.deep  # by default: groups that fit no rank, above
def test_a_group_is_cut_over_ranks_where_that_is_faster_than_to_share_it(ranks):
    losses, weights = train_alone("clipped", [[unit] for unit in groups()[3:6]])
    for of_rank, ranks_of_parts, theirs in ranks(2).run(train_for_balance):
        np.testing.assert_allclose(of_rank, losses, rtol=EXACT)
        assert_equal_weights(theirs, weights)
        assert [set(of_step) for of_step in ranks_of_parts] == [{(0,), (1,)}] * 3


@pytest.mark.deep  # by default: test_two_calls, and cut groups above
def test_dropout_does_not_depend_on_how_groups_are_cut(ranks):
    for (whole, none), (cut, repeated) in ranks(2).run(gradients_with_dropout):
        assert repeated and not none and float(whole.abs().max()) > 1e-3
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("per", ["sequence", pytest.param("token", marks=pytest.mark.deep)])
def test_scores_of_groups_that_are_cut_come_back_for_every_sequence(ranks, per):
    model = models.gpt()
    for scores, units, num_parts in ranks(2).run(score_cut, per):
        assert num_parts
        for of_unit, unit in zip(scores, units, strict=True):
            for value, member in zip(of_unit, unit, strict=True):
                with torch.no_grad():
                    expected = model(torch.as_tensor(member["input_ids"])[None])[0][0, :, 0].numpy()
                np.testing.assert_allclose(value, expected if per == "token" else expected.sum(), rtol=1e-10)


def test_losses_of_whole_units_are_refused_where_units_are_cut(ranks):
    for of_rank in ranks(2).run(refused_in_cut_steps):
        assert len(of_rank) == 2
        assert all("parts in different micro-batches" in said and "coupled_loss=" in said for said in of_rank), of_rank


def test_units_that_do_not_fit_are_refused_with_the_ways_out_where_they_may_not_be_cut():
    options = {"cost": SimpleCost(capacity=60), "recompute": "none", "loss_columns": COLUMNS, "sequences_per_step": 4}
    with pytest.raises(Exception, match="share_prefixes=True, cut_units=True cuts units"):
        prepared(groups(), share_prefixes=True, **options)
    with pytest.raises(InputError, match="cut_units=True cuts units whose sequences share prefixes"):
        prepared(groups(), cut_units=True, loss_columns=COLUMNS)
