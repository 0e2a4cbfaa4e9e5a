"""Batches that ranks bring, read and planned a step ahead: the same steps, and nothing lost when a loop is left."""

import numpy as np
import pytest

from tests.session.planned_ahead import (
    fail_ahead,
    fail_to_read,
    replan_ahead,
    resume_ahead,
    score_ahead,
    train_ahead,
)
from tests.session.rollouts import batches, train_grpo_alone
from tests.session.test_own_batches import EXACT
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")


def test_steps_that_are_planned_ahead_are_the_same_and_none_is_lost_where_a_loop_is_left(ranks):
    losses, weights = train_grpo_alone("tokens")
    items = [item for of_step in batches() for item in of_step]
    for of_rank, threads, ledger, theirs in ranks(2).run(train_ahead):
        np.testing.assert_allclose(of_rank, losses, rtol=EXACT)
        assert_equal_weights(theirs, weights)
        assert threads == [(0, True), (1, False), (2, False)], "a thread plans all steps but the first, each once"
        assert (ledger["updates"], ledger["sequences"]) == (3, len(items))
        assert ledger["tokens"] == sum(len(item["input_ids"]) for item in items)


def test_a_batch_is_planned_again_where_costs_have_changed(ranks):
    for losses, threads in ranks(2).run(replan_ahead):
        np.testing.assert_allclose(losses, train_grpo_alone("tokens")[0], rtol=EXACT)
        assert [number for number, is_main in threads if is_main] == [0, 1, 2]


def test_a_run_that_was_saved_goes_on_with_the_batch_that_it_had_read(ranks, tmp_path):
    for losses in ranks(2).run(resume_ahead, str(tmp_path)):
        np.testing.assert_allclose(losses, train_grpo_alone("tokens")[0], rtol=EXACT)


def test_a_batch_that_cannot_be_used_is_refused_when_its_step_comes(ranks):
    for losses, said in ranks(2).run(fail_ahead):
        np.testing.assert_allclose(losses, train_grpo_alone("tokens")[0][:1], rtol=EXACT)
        assert "has 99 tokens, over 48" in said


@pytest.mark.parametrize("plan_ahead", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_source_of_batches_that_fails_on_one_rank_ends_the_loop_of_all_when_its_step_comes(ranks, plan_ahead):
    for losses, said in ranks(2).run(fail_to_read, plan_ahead):
        np.testing.assert_allclose(losses, train_grpo_alone("tokens")[0][:1], rtol=EXACT)
        assert "ConnectionError: server gone" in said


def test_a_source_that_computes_with_the_model_while_it_is_read_ahead_is_told_where_to_do_so(ranks):
    for losses, said in ranks(2).run(score_ahead):
        np.testing.assert_allclose(losses, train_grpo_alone("tokens")[0][:1], rtol=EXACT)
        assert "run.score()" in said and "plan_ahead" in said
