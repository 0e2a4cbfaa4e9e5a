"""Scaled losses of a user's own loop: exact at every degree, and a step that overflows leaves no trace."""

from math import inf
from unittest import mock

import pytest
import torch

from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.state.loss_scaler import LEAST_SCALE, LossScaler
from tests.runtime.loop.loops import plain_loop, train_with_overflow
from tests.runtime.loop.test_step import step_of

EXACT = 1e-12


@pytest.mark.parametrize(
    ("degree", "options"),
    [
        (3, {}),
        (1, {"by_layer": True}),
        *(pytest.param(1, options, marks=pytest.mark.deep) for options in ({}, {"stages": 3})),
    ],
)
def test_a_loop_whose_last_rank_overflows_once_ends_at_the_weights_without_that_step(ranks, degree, options):
    losses, weights = plain_loop(num_steps=2)
    for ours, our_weights, skipped in ranks(3).run(train_with_overflow, degree, **options):
        assert skipped == [False, True, False]
        assert ours == pytest.approx([losses[0], losses[1], losses[1]], rel=EXACT)
        torch.testing.assert_close(our_weights, weights, rtol=EXACT, atol=EXACT)


def test_a_step_that_overflows_is_discarded_and_done(monkeypatch):
    step = step_of(monkeypatch, {}, norm=inf, loss_scaler=LossScaler(8.0))
    result = step.update()
    assert (result.is_skipped, result.loss_scale, result.num_skipped, result.loss) == (True, 8.0, 1, 3.0)
    step.run.discard.assert_called_once_with()
    step.run.finish.assert_called_once_with(step)
    step.run.state.step.assert_not_called()
    step.run.pull_weights.assert_not_called()


@pytest.mark.parametrize(("norm", "loss", "scale"), [(inf, 30.0, LEAST_SCALE), (inf, inf, 8.0), (2.0, inf, 8.0)])
def test_a_loss_that_is_not_finite_and_a_scale_that_cannot_fall_are_errors(monkeypatch, norm, loss, scale):
    scaler = LossScaler(scale)
    step = step_of(monkeypatch, {}, norm=norm, loss=loss, loss_scaler=scaler)
    with pytest.raises(LengthwiseError, match="not both finite"):
        step.update()
    assert (scaler.scale, scaler.num_skipped) == (scale, 0)


def test_the_norm_and_the_clip_are_those_of_the_gradient_without_its_scale(monkeypatch):
    step = step_of(monkeypatch, {}, norm=16.0, clip_norm=0.5, loss_scaler=LossScaler(8.0))
    assert step.update().grad_norm == 2.0
    assert step.run.state.step.call_args == mock.call(lr=0.125, clip=pytest.approx(0.5 / (2.0 + 1e-6) / 8.0))
