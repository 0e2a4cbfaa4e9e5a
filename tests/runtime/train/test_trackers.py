"""Trackers get every number of every step; modules stand in for packages that need not be installed."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from lengthwise.cli.worker import _trackers
from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.train.trackers import LastingTracker, MLflow, TensorBoard, Trackio, WeightsAndBiases

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


@pytest.mark.parametrize("first", [2, 0])
def test_tensorboard_shows_steps_trained_again_once(tmp_path, first):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for number, steps in enumerate((range(4), range(first, 5))):
        tracker = TensorBoard(tmp_path)
        for step in steps:
            tracker.on_step({"step": step, "loss/avg": step + 10.0 * number})
        tracker.close()
    events = accumulators.EventAccumulator(str(tmp_path)).Reload().Scalars("loss/avg")
    assert [(event.step, event.value) for event in events] == [
        (step, step + 10.0 * (step >= first)) for step in range(5)
    ]


@pytest.mark.parametrize("package", ["mlflow"], indirect=True)
def test_mlflow_gets_the_numbers_of_a_step_and_goes_on_with_a_resumed_run(package, tmp_path):
    follow(MLflow, tmp_path)
    follow(MLflow, tmp_path)
    assert [call.kwargs for call in package.start_run.call_args_list] == [{"run_name": "mine"}, {"run_id": "abc"}]
    assert package.log_metrics.call_args == mock.call(SENT, step=7)
    assert package.end_run.call_count == 2


GONE = ConnectionError("the network is gone\n(a long page of the server)")


@pytest.fixture
def lasting():
    """A tracker whose package may refuse anything, and the warnings that were given."""
    warnings, package = [], mock.MagicMock()

    def begin(**refused):
        package.configure_mock(**refused)
        return LastingTracker("train.wandb", package, warn=warnings.append, must_begin=True)

    return begin, package.return_value, warnings


def test_a_tracker_that_refuses_a_step_is_one_warning_and_gets_no_more(lasting):
    begin, tracker, warnings = lasting
    lasting_tracker = begin(**{"return_value.on_step.side_effect": [None, GONE, None]})
    for step in range(4):
        lasting_tracker.on_step({"step": step})
    tracker.close.side_effect = GONE  # which follows
    lasting_tracker.close()
    assert [call.args[0]["step"] for call in tracker.on_step.call_args_list] == [0, 1]
    assert warnings == [
        "warning: train.wandb failed (ConnectionError: the network is gone): training goes on without it from step 2 "
        "on; the run's metrics.jsonl has all steps"
    ]


@pytest.mark.parametrize("error", [GONE, SystemExit(1)])
def test_a_tracker_that_fails_at_the_end_is_a_warning(lasting, error):
    begin, _, warnings = lasting
    begin(**{"return_value.close.side_effect": error}).close()
    (warning,) = warnings
    assert "the last steps may be missing there" in warning


def test_a_tracker_that_cannot_begin_is_a_wrong_setting(lasting):
    begin, *_ = lasting
    with pytest.raises(
        InputError, match=r"train\.wandb: it cannot begin \(ConnectionError: the network is gone\); .*=false"
    ):
        begin(side_effect=GONE)


def test_ranks_started_again_go_on_without_a_tracker_that_cannot_begin_again():
    warnings, package = [], mock.MagicMock(side_effect=GONE)
    tracker = LastingTracker("train.wandb", package, warn=warnings.append, must_begin=False)
    tracker.on_step(ROW)
    tracker.close()
    assert len(warnings) == 1 and package.call_count == 1


def test_every_tracker_of_a_run_ends_no_run(tmp_path, monkeypatch):
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    monkeypatch.setattr("lengthwise.runtime.train.trackers.write_text", mock.Mock())
    asked = [f"train.{name}=true" for name in ("tensorboard", "wandb", "trackio", "mlflow")]
    trackers = _trackers(load(None, [*asked, "train.steps=9"]), RunFolder(tmp_path))
    assert [type(tracker) for tracker in trackers] == [LastingTracker] * len(asked)
    for tracker in trackers:
        tracker.close()
