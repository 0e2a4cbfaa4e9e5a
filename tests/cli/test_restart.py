"""What a rank does that torchrun started again, without ranks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lengthwise.cli import worker
from lengthwise.cli.claim import RanksClaim
from lengthwise.cli.restart import (
    CRASHED,
    DONE,
    FAILED,
    PREEMPTED,
    RUNNING,
    earlier_end,
    report_error,
    settings_of,
    write_status,
)
from lengthwise.cli.train_config import _note_interrupted
from lengthwise.config.run_config import check, load
from lengthwise.core.errors import (
    CheckError,
    CommunicationError,
    InfeasibleError,
    InputError,
    LengthwiseError,
    Preempted,
)
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.train.stop import StopCause
from lengthwise.session import own_run

CONFIG = check({"seed": 7, "optim": {"betas": [0.9, 0.99], "eps": 1e-8}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("time.sleep", lambda _: None)
    return RunFolder(tmp_path)


@pytest.fixture
def restarted(monkeypatch):
    def restart(count):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))

    return restart


@pytest.mark.parametrize(
    ("error", "state", "exit_code"),
    [
        (InputError("no index"), FAILED, 2),
        (InfeasibleError("too long"), FAILED, 3),
        (CheckError("digests differ"), FAILED, 4),
        (LengthwiseError("not finite"), FAILED, 1),
        (Preempted("saved"), PREEMPTED, 75),
        (RuntimeError("Connection closed by peer"), CRASHED, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_would_fail_again_ends_the_run_and_what_may_go_well_is_tried_again(
    folder, restarted, error, state, exit_code
):
    assert earlier_end(folder) is None
    assert report_error(folder, error)
    status = folder.read_json("status.json")
    assert (status["state"], status["exit_code"]) == (state, exit_code)
    restarted(1)
    assert earlier_end(folder) == (None if state == CRASHED else exit_code)


@pytest.mark.parametrize(("cause", "ends"), [(OSError("disk full"), True), (RuntimeError("peer is gone"), False)])
def test_a_checkpoint_that_failed_because_a_rank_died_is_tried_again(folder, restarted, cause, ends):
    try:
        raise LengthwiseError("the checkpoint of step 4 could not be written") from cause
    except LengthwiseError as error:
        report_error(folder, error)
    restarted(1)
    assert (earlier_end(folder) is not None) == ends


def test_a_run_that_is_done_or_still_runs_is_told_apart(folder, restarted):
    write_status(folder, RUNNING)
    restarted(1)
    assert earlier_end(folder) is None
    restarted(0)
    write_status(folder, DONE, exit_code=0)
    restarted(2)
    assert earlier_end(folder) == 0


def test_ranks_that_torchrun_stops_because_a_machine_joins_go_on(folder, restarted):
    restarted(1)
    report_error(folder, Preempted("saved"))
    assert earlier_end(folder) is None  # the same attempt: it was not the user who stopped them
    restarted(2)
    assert earlier_end(folder) == 75


def test_ranks_go_on_without_a_machine_whose_processes_were_signalled_to_stop(folder, restarted, monkeypatch):
    """torchrun starts ranks again only where it was not signalled itself."""
    report_error(folder, Preempted("saved", by_signal=True))
    restarted(1)
    assert earlier_end(folder) is None
    monkeypatch.setenv("LENGTHWISE_LAUNCHER", "1")
    assert earlier_end(folder) == 75, "the launcher asks all ranks, and starts none again"


class Ended(BaseException):
    """Of a process, with its exit code."""


@pytest.fixture
def end_start(folder, monkeypatch):
    """The exit code of a rank that ends before the first step."""

    def leave(code):
        raise Ended(code)

    def end(cause):
        monkeypatch.setattr("os._exit", leave)
        monkeypatch.setattr(worker, "ASKED_WITHIN_S", 0.0)
        claim = RanksClaim(folder)
        claim.take(is_restarted=False)
        with pytest.raises(Ended) as ended:
            worker._end_start(folder, claim, cause)
        assert not claim.is_taken
        return ended.value.args[0]

    return end


def test_ranks_that_torchrun_ends_before_the_first_step_blame_nobody_under_the_launcher(
    folder, end_start, restarted, monkeypatch, capfd
):
    """Another rank was killed: the launcher names it, or starts all again."""
    monkeypatch.setenv("LENGTHWISE_LAUNCHER", "1")
    write_status(folder, RUNNING)
    assert end_start(StopCause.SIGNAL) == 1
    assert folder.read_json("status.json")["state"] == RUNNING and not capfd.readouterr().err
    restarted(1)
    assert earlier_end(folder) is None


def test_ranks_that_the_launcher_was_asked_to_stop_before_the_first_step_are_not_tried_again(
    folder, end_start, restarted, monkeypatch
):
    """The signal of a scheduler and the file of the launcher are one request."""
    monkeypatch.setenv("LENGTHWISE_LAUNCHER", "1")
    folder.stop.touch()
    assert end_start(StopCause.SIGNAL) == 75
    restarted(1)
    assert earlier_end(folder) == 75 and "asked to stop" in folder.read_json("status.json")["error"]


def test_ranks_that_a_torchrun_ends_before_the_first_step_say_what_it_may_mean(folder, end_start, restarted):
    assert end_start(StopCause.SIGNAL) == 75
    assert (
        "as torchrun sends where it is asked to stop or has lost another rank"
        in folder.read_json("status.json")["error"]
    )
    restarted(1)
    assert earlier_end(folder) is None


def test_ctrl_c_before_ranks_have_met_leaves_nothing_behind(folder, capfd):
    """It may come while torchrun is still imported."""
    _note_interrupted(folder)
    assert not list(folder.path.iterdir()) and not capfd.readouterr().err
    write_status(folder, RUNNING)
    _note_interrupted(folder)
    assert "ended at once by a second Ctrl-C" in capfd.readouterr().err


def test_a_rank_whose_launcher_is_gone_is_tried_again(folder, restarted):
    report_error(folder, CommunicationError("the process that started some ranks is gone"))
    restarted(1)
    assert earlier_end(folder) is None and folder.read_json("status.json")["state"] == CRASHED


def test_the_reason_outlives_what_follows_from_it(folder, monkeypatch, capfd):
    assert report_error(folder, RuntimeError("Connection closed by peer"))
    monkeypatch.setenv("RANK", "1")
    assert report_error(folder, InputError("no index"))
    assert not report_error(folder, RuntimeError("Connection closed by peer"))
    assert not report_error(folder, InputError("another rank met it too"))
    assert folder.read_json("status.json")["error"] == "no index"
    assert "no index" in capfd.readouterr().err


def test_ranks_started_again_train_with_the_settings_the_run_began_with(folder, restarted):
    edited = check({"seed": 8})
    assert settings_of(CONFIG, folder, resume=False) is CONFIG
    CONFIG.save(folder.config)
    assert load(folder.config, []) == CONFIG
    assert settings_of(CONFIG, folder, resume=False) == CONFIG  # the same command again
    with pytest.raises(InputError, match="already holds a run"):
        settings_of(edited, folder, resume=False)
    assert settings_of(edited, folder, resume=True) is edited  # overrides
    restarted(1)
    assert settings_of(edited, folder, resume=False) == CONFIG


def test_the_status_names_the_step_of_the_checkpoint_to_go_on_from(folder):
    write_status(folder, FAILED, exit_code=1)
    assert folder.read_json("status.json")["safe_step"] is None
    for step in (3, 6):
        checkpoint = folder.checkpoints / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
    write_status(folder, FAILED, exit_code=1)
    assert folder.read_json("status.json")["safe_step"] == 6
    (folder.checkpoints / "latest").write_text("step_00000003\n")  # the weights of the newest diverged
    write_status(folder, FAILED, exit_code=1)
    assert folder.read_json("status.json")["safe_step"] == 3


def test_on_a_full_disk_the_end_of_a_run_is_written_over_the_room_that_status_json_has(folder, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    write_status(folder, RUNNING)
    size = (folder.path / "status.json").stat().st_size
    monkeypatch.setattr("lengthwise.cli.restart.write_text", refuse)
    assert report_error(folder, LengthwiseError("the disk is full " * 1000))
    status = folder.read_json("status.json")
    assert (status["state"], status["exit_code"]) == (FAILED, 1) and status["error"].startswith("the disk is full")
    assert (folder.path / "status.json").stat().st_size == size


def _follows_from_a_full_disk() -> RuntimeError:
    try:
        try:
            raise OSError(28, "No space left on device", "/disk/step_3.partial")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 704 vs 598")  # noqa: B904 - as torch does
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "/disk/step_3.partial"), _follows_from_a_full_disk()]
)
def test_what_follows_from_a_full_disk_is_a_sentence_and_no_traceback(folder, monkeypatch, capfd, error):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    worker._end(folder, RanksClaim(folder), error)
    printed = capfd.readouterr().err
    assert ended == [1] and "Traceback" not in printed
    assert "the run cannot go on (No space left on device: /disk/step_3.partial); no checkpoint is complete" in printed
    assert folder.read_json("status.json")["state"] == FAILED


def test_a_fault_of_ours_keeps_its_traceback_whatever_files_it_looked_for(folder, monkeypatch, capfd):
    monkeypatch.setattr("os._exit", lambda code: None)
    try:
        try:
            raise FileNotFoundError(2, "No such file or directory", "/cache")
        except FileNotFoundError:
            raise KeyError("a key that we misspelled")  # noqa: B904
    except KeyError as error:
        worker._end(folder, RanksClaim(folder), error)
    assert "Traceback" in capfd.readouterr().err


PARENT = """
import os, subprocess, sys
if sys.argv[2] == "names itself":
    os.environ["LENGTHWISE_LAUNCHER"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stderr=sys.stdout)
if sys.argv[2] == "waits":
    child.stdout.readline()
"""
CHILD = """
import os, sys, time
from pathlib import Path
from lengthwise.cli.restart import end_with_parent
from lengthwise.runtime.train.stop import StopRequest
def note(cause):
    sys.stderr.write(f"to stop: {cause.name}")
    sys.stderr.flush()
    os._exit(0)
stop = StopRequest(Path("nowhere"), end_start=note)
stop.heed_launcher(end_with_parent(stop.look))
try:
    os.write(1, b"ready\\n")
except BrokenPipeError:
    pass
while True:
    time.sleep(0.05)
"""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("parent", ["waits", "names itself"])
def test_a_rank_whose_parent_ends_is_asked_to_stop(parent):
    """Also if the parent ended before the rank could look, where the parent said who it is."""
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "any"}
    command = [sys.executable, "-c", PARENT, CHILD, parent]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.stdout == "to stop: LAUNCHER_GONE"  # it returns when the rank has ended


def test_planning_processes_are_as_many_as_the_cores_can_run(monkeypatch, capsys):
    monkeypatch.setattr(own_run, "num_cores", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world = SimpleNamespace(is_first=True, device=SimpleNamespace(type="cuda"))
    assert own_run._workers(check({}), world) == 1, "of two cores of a rank"
    assert own_run._workers(check({"plan": {"workers": 4}}), world) == 4 and not capsys.readouterr().err
    assert own_run._workers(check({"plan": {"workers": 64}}), world) == 4
    assert "plan.workers=64 for each of 2 ranks is more than the 4 cores" in capsys.readouterr().err
    monkeypatch.setattr(own_run, "num_cores", lambda: 64)
    assert own_run._workers(check({}), world) == 4
    world.device.type = "cpu"
    assert own_run._workers(check({}), world) == 0
