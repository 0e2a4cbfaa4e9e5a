"""lengthwise.Trainer is transformers' Trainer with steps planned by length."""

import numpy as np
import pytest

from tests.api import trainers
from tests.api.test_prepare import EXACT, assert_equal_weights
from tests.api.trainers import log_and_weights, train

LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")


def assert_equal_logs(found, expected, tolerance=EXACT):
    """Rounded losses and norms of transformers' own are float32 sums."""
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        for name in LOGGED:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (name, ours, theirs)
        assert ours["step"] == theirs["step"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    options = {"num_train_epochs": 2, "max_steps": -1, "weight_decay": 0.1}
    trainer = train(tmp_path_factory.mktemp("stock"), options, stock=True)
    return options, trainer.state.log_history, trainers.weights_of(trainer.model)


def test_one_process_trains_what_transformers_trains(stock, tmp_path):
    options, log, weights = stock
    found = train(tmp_path, options)
    assert_equal_weights(trainers.weights_of(found.model), weights)
    assert_equal_logs(found.state.log_history, log, 1e-6)
    assert found.state.log_history[-1].keys() == log[-1].keys()
    assert found.state.log_history[-1]["train_loss"] == pytest.approx(log[-1]["train_loss"], rel=1e-6)
    assert found.state.log_history[-1]["total_flos"] == log[-1]["total_flos"]
    assert "forward" not in vars(found.model), "the model is given back"


def test_two_ranks_train_what_transformers_trains_on_one(ranks, stock, tmp_path):
    options, log, weights = stock
    options = options | {"gradient_accumulation_steps": 2}
    for found_log, found in ranks(2).run(log_and_weights, tmp_path, options, lengthwise=trainers.planned(recompute="none")):
        assert_equal_weights(found, weights)
        assert_equal_logs(found_log, log, 1e-6)
