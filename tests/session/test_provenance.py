import json
import subprocess
import sys
from datetime import UTC, datetime

from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import cluster_preset
from lengthwise.core.version import __version__
from lengthwise.session import provenance
from lengthwise.session.provenance import add_start

CLUSTER = cluster_preset("8xA100-40GB")


def starts(folder):
    return json.loads((folder.path / "provenance.json").read_text())["starts"]


def test_a_start_says_command_version_date_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "train", "a config.yaml", "train.steps=3"])
    folder = RunFolder(tmp_path)
    add_start(folder, CLUSTER)
    (start,) = starts(folder)
    assert start["command"] == "lengthwise train 'a config.yaml' train.steps=3"
    assert start["lengthwise_version"] == __version__ and start["num_ranks"] == 8
    assert start["device_memory_bytes"] == CLUSTER.device.memory_bytes and start["host"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(start["date"])).total_seconds()) < 60


def test_starts_add_up_and_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "MOST_STARTS", 3)
    for number in range(5):
        monkeypatch.setattr(sys, "argv", ["x", str(number)])
        add_start(RunFolder(tmp_path), CLUSTER)
    assert [start["command"].split()[1] for start in starts(RunFolder(tmp_path))] == ["0", "3", "4"]


def test_a_damaged_file_begins_anew(tmp_path):
    (tmp_path / "provenance.json").write_text("{")
    add_start(RunFolder(tmp_path), CLUSTER)
    assert len(starts(RunFolder(tmp_path))) == 1


def test_the_commit_is_that_of_the_checkout_that_holds_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    assert provenance._commit(tmp_path) is None
    source = tmp_path / "provenance.py"
    source.write_text("")
    git("init", "-q")
    assert provenance._commit(tmp_path) is None, "an environment within a checkout is not of it"
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    commit = provenance._commit(tmp_path)
    assert len(commit) == 40
    source.write_text("changed")
    assert provenance._commit(tmp_path) == f"{commit}-dirty"
