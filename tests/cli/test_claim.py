"""Run folders that are in use, or that several runs would make in the same second."""

import os
from contextlib import ExitStack

from lengthwise.cli.claim import claimed, claimed_with_free_name
from lengthwise.core.run_folder import RunFolder
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
