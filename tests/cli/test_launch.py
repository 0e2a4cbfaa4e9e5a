"""What ranks get from their environment before they start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lengthwise.cli import train_config
from lengthwise.cli.launch import (
    SAFE_PATH,
    _only_installed_modules,
    are_preempted,
    prefer_expandable_segments,
    split_arguments,
)
from lengthwise.cli.restart import CRASHED, DONE, read_status, write_status
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def _no_settings(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_no_settings")
def test_the_allocator_of_a_gpu_grows_its_segments():
    prefer_expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("_no_settings")
@pytest.mark.parametrize("name", VARIABLES)
def test_an_allocator_that_a_user_configured_is_left_as_it_is(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    prefer_expandable_segments()
    assert {key: os.environ[key] for key in VARIABLES if key in os.environ} == {name: "max_split_size_mb:512"}


def test_no_file_of_the_current_folder_stands_for_a_module_in_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv(SAFE_PATH, raising=False)
    (tmp_path / "statistics.py").write_text("raise SystemExit(7)")
    command = [sys.executable, "-m", "statistics"]

    def code():
        return subprocess.run(command, cwd=tmp_path, capture_output=True).returncode

    assert code() == 7
    with _only_installed_modules():
        assert code() == 0
    assert SAFE_PATH not in os.environ


@pytest.mark.parametrize("state", [DONE, "running"])
def test_an_interrupt_that_comes_when_all_is_trained_ends_a_run_well(tmp_path, monkeypatch, capsys, state):
    folder = RunFolder(tmp_path / "run")

    def torchrun(*arguments, **options):
        write_status(folder, state, exit_code=0 if state == DONE else None)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_config, "torchrun", torchrun)
    if state == DONE:
        train_config.launch(folder, [], nproc=1)
        assert "done; next: lengthwise report" in capsys.readouterr().err
    else:
        with pytest.raises(KeyboardInterrupt):
            train_config.launch(folder, [], nproc=1)
    assert read_status(folder)["state"] == (state if state == DONE else CRASHED)


def test_a_setting_that_is_given_again_is_told_of_once(capsys, monkeypatch):
    given = Path("train.steps=5"), ["seed=1", "train.steps=6"]
    assert split_arguments(*given) == (None, ["train.steps=5", "seed=1", "train.steps=6"])
    assert capsys.readouterr().err.split() == [
        "train.steps",
        "is",
        "given",
        "2",
        "times;",
        "the",
        "last",
        "counts,",
        "train.steps=6",
    ]
    assert split_arguments(Path("run.yaml"), None) == (Path("run.yaml"), [])
    monkeypatch.setenv("RANK", "1")
    split_arguments(*given)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["sw/lr=0.1/run.yaml", "a=b.yaml", "lr=0.1/plans.jsonl", "lr=0.1/run"])
def test_a_file_that_is_there_is_read_though_its_path_holds_an_equals_sign(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).touch()
    assert split_arguments(Path(name), ["seed=1"]) == (Path(name), ["seed=1"])


def test_what_is_neither_a_file_nor_a_setting_is_refused_as_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sw/lr=0.1/run.yaml", "lr=0.1.yaml"):
        with pytest.raises(InputError, match=r"lr=0.1.*is no file that is there, and as an override '\S*lr' it"):
            split_arguments(Path(name), [])
    for change in ("data.index=a/b.yaml", "run_folder=" + "x" * 5000, "lr=0.1"):
        assert split_arguments(Path(change), []) == (None, [change])


@pytest.mark.parametrize(
    ("exit_codes", "expected"), [((75, 75), True), ((75, -15), True), ((-15,), False), ((75, 1), False), ((), False)]
)
def test_ranks_that_were_asked_to_stop_are_told_by_their_exit_codes(exit_codes, expected):
    assert are_preempted(exit_codes) == expected
