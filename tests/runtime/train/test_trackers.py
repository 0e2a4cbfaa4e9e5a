"""Trackers get every number of every step; modules stand in for packages that need not be installed."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from lengthwise.config.run_config import load
from lengthwise.runtime.train.trackers import MLflow, Trackio, WeightsAndBiases

ROW = {"step": 7, "loss/avg": 2.5, "perf/mfu": None, "plan/id": "3f", "data/num_tokens": 100}
SENT = {"loss/avg": 2.5, "data/num_tokens": 100}


@pytest.fixture
def package(request, monkeypatch):
    """A package that remembers its calls."""
    package = mock.MagicMock()
    package.start_run.return_value = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    monkeypatch.setitem(sys.modules, request.param, package)
    return package


def follow(tracker_class, folder):
    tracker = tracker_class(folder, load(None, ["name=mine", "train.steps=9"]))
    tracker.on_step(ROW)
    tracker.close()


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_weights_and_biases_gets_the_numbers_of_a_step(package, tmp_path):
    follow(WeightsAndBiases, tmp_path)
    package.init.return_value.log.assert_called_once_with(SENT, step=7)
    package.init.return_value.finish.assert_called_once_with()


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
def test_trackio_gets_the_numbers_of_a_step_and_goes_on_with_a_resumed_run(package, tmp_path):
    follow(Trackio, tmp_path)
    follow(Trackio, tmp_path)
    first, second = (call.kwargs for call in package.init.call_args_list)
    assert first == second and first["resume"] == "allow" and first["config"]["train"]["steps"] == 9
    assert package.log.call_args == mock.call(SENT, step=7)
    assert package.finish.call_count == 2


@pytest.mark.parametrize("package", ["mlflow"], indirect=True)
def test_mlflow_gets_the_numbers_of_a_step_and_goes_on_with_a_resumed_run(package, tmp_path):
    follow(MLflow, tmp_path)
    follow(MLflow, tmp_path)
    assert [call.kwargs for call in package.start_run.call_args_list] == [{"run_name": "mine"}, {"run_id": "abc"}]
    assert package.log_metrics.call_args == mock.call(SENT, step=7)
    assert package.end_run.call_count == 2
