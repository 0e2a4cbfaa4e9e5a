"""`lengthwise.train`: a configuration as an object trains as the command does with a file of it."""

import pytest

import lengthwise
from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from tests.cli import runs
from tests.warm import Command

SCRIPT = """
import sys

import lengthwise
from lengthwise.config.run_config import load

config = load(None, sys.argv[1:])
sys.argv = ["a script", "--of", "the user"]  # ranks get none of it
print(lengthwise.train(config, ["train.steps=2"], nproc=1, quiet=True))
"""


def test_a_configuration_object_trains_as_the_command_does(tmp_path):
    corpus = runs.make_corpus(tmp_path / "corpus")
    folder = tmp_path / "by function"
    (tmp_path / "script.py").write_text(SCRIPT)
    words = runs.settings(corpus, folder, "train.steps=5", "train.dtype=float64")
    out, err = tmp_path / "out", tmp_path / "err"
    assert Command(tmp_path / "script.py", *words, out=out, err=err).wait(300) == 0, err.read_text()
    assert out.read_text() == f"{folder}\n"
    assert load(folder / "config.yaml", []) == load(None, [
        *runs.settings(corpus, folder, "train.steps=2", "train.dtype=float64")
    ])  # fmt: skip
    more = runs.settings(corpus, tmp_path / "by command", "train.steps=2", "train.dtype=float64")
    runs.lengthwise("train", *more, "--nproc", 1)
    by_function, by_command = (RunFolder(run).read_metrics() for run in (folder, tmp_path / "by command"))
    assert [row["loss/avg"] for row in by_function] == [row["loss/avg"] for row in by_command]
    assert len(by_function) == 2


@pytest.mark.deep
def test_a_run_is_resumed_by_its_folder_with_other_settings(tmp_path):
    corpus = runs.make_corpus(tmp_path / "corpus")
    folder = tmp_path / "run"
    lengthwise.train(load(None, runs.settings(corpus, folder, "train.steps=2")), nproc=2, quiet=True)
    assert lengthwise.train(resume=folder, overrides=["train.steps=3"], nproc=1, quiet=True) == folder
    assert [row["step"] for row in RunFolder(folder).read_metrics()] == [0, 1, 2]


def test_a_resumed_run_takes_overrides_and_no_other_configuration(tmp_path):
    with pytest.raises(InputError, match="give overrides, not another config"):
        lengthwise.train("run.yaml", resume=tmp_path)
