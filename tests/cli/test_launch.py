"""What ranks get from their environment before they start."""

import os
import subprocess
import sys

import pytest

from lengthwise.cli.launch import SAFE_PATH, _only_installed_modules, prefer_expandable_segments

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
