"""Run folders that are in use, or that several runs would make in the same second."""

import os
from contextlib import ExitStack
from signal import SIGTERM

from lengthwise.cli import claim
from lengthwise.cli.claim import RanksClaim, claimed, claimed_with_free_name
from lengthwise.cli.ending import ask_to_stop, error_of
from lengthwise.cli.restart import FAILED, PREEMPTED, RUNNING, report_error, write_status
from lengthwise.core.lock import STALE_S
from lengthwise.core.run_folder import LAUNCHER_LOCK, RANKS_LOCK, RunFolder
from tests.cli.runs import lengthwise


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: exists(path) and "20260101" not in str(path))  # not made yet
    with ExitStack() as stack:
        folders = [stack.enter_context(claimed_with_free_name(tmp_path / "run" / "20260101-000000")) for _ in range(3)]
        assert [folder.path.name for folder in folders] == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_not_saved_yet_is_in_use_and_not_to_be_removed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with claimed(folder, is_new=True):
        folder.config.write_text("train: {steps: 2}\n")
        error = lengthwise("train", "--resume", folder.path, expected=2).stderr
        assert "is in use by a run: process " in error and "remove" not in error
    error = lengthwise("train", "--resume", folder.path, expected=2).stderr
    assert "no complete checkpoint" in error and "is in use" not in error


def test_a_run_that_starts_is_in_use_before_it_has_settings_and_names_the_way_on_once_it_ended(tmp_path, cli):
    folder = RunFolder(tmp_path / "run")
    with claimed(folder, is_new=True):
        code, _, error = cli("train", "--resume", folder.path)
        assert code == 2 and f"{folder.path} is in use by a run: process {os.getpid()} on " in error
        code, _, error = cli("report", folder.path)
        assert code == 2 and "has no config.yaml yet: a run is starting in it; try again in a moment" in error
        write_status(folder, PREEMPTED, exit_code=75)
    for command in (("train", "--resume"), ("report",)):
        code, _, error = cli(*command, folder.path)
        assert code == 2
        assert f"{folder.path} has no config.yaml: the run in it ended before it began; the same command" in error
    with claimed(folder, is_new=True):
        pass  # as that command does
    folder.metrics.touch()
    assert "it has no config.yaml; give the folder" in cli("report", folder.path)[2]


def test_a_run_that_was_replaced_while_it_slept_says_nothing_in_the_folder(tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path / "run")
    with claimed(folder, is_new=True):
        write_status(folder, RUNNING)
        folder.lock(LAUNCHER_LOCK).file.unlink()  # as of a machine that gave no sign of life
        with folder.lock(RANKS_LOCK).held():
            write_status(folder, FAILED, exit_code=1, error="of a run that is over")
            assert not report_error(folder, OSError("of a run that is over"))
            ask_to_stop(folder, by=SIGTERM)
            assert folder.read_json("status.json")["state"] == RUNNING and not folder.stop.exists()
            assert "another run has taken it over" in capsys.readouterr().err
            assert "another run has taken it over" in str(error_of(folder, killed=""))


def test_a_rank_without_a_lock_looks_for_another_run_after_it_slept(tmp_path, monkeypatch):
    folder, now_s, ended = RunFolder(tmp_path), [0.0], []
    monkeypatch.setattr(claim, "_clock_s", lambda: now_s[0])
    monkeypatch.setattr(claim, "_end_lost", ended.append)
    monkeypatch.setattr(claim, "_tokens", {"of its first rank"})
    rank = RanksClaim(folder)
    with folder.lock(RANKS_LOCK).held():
        rank.check()
        assert not ended, "it cannot have been replaced within a moment"
        now_s[0] += STALE_S
        rank.check()
        assert ended == [tmp_path]
