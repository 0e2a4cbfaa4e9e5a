"""Which checkpoints stay when there is a new one, and which of them a run goes on from."""

import json
import shutil

import pytest

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.checkpoint_files import (
    CHECKPOINT_SCHEMA_VERSION,
    STATE_FILE,
    RetentionPolicy,
    begin,
    candidates,
    check_files,
    damage,
    damaged,
    digest_of,
    latest,
    point_to,
    publish,
    read_state,
    step_back,
    step_name,
    steps_up_to,
)


def save(folder, step, *, keep=RetentionPolicy(newest=100), schema=CHECKPOINT_SCHEMA_VERSION, lost=0):  # noqa: B008 - a value
    partial = begin(folder, step_name(step))
    (partial / "data").write_text("weights")
    document = {"files": {"data": digest_of(partial / "data")}, "schema_version": schema, "step": step}
    (partial / "data").write_text("weights"[lost:])
    return publish(partial, document, keep=keep)


def steps_in(folder):
    return [int(path.name.removeprefix("step_")) for path in candidates(folder)]


def test_the_newest_and_the_last_good_one_stay_and_those_of_later_steps_are_left_alone(tmp_path):
    for step in (10, 20, 30, 40, 90):
        save(tmp_path, step)
    save(tmp_path, 50, keep=RetentionPolicy(newest=2, good_step=20))
    assert steps_in(tmp_path) == [90, 50, 40, 20]
    save(tmp_path, 60, keep=RetentionPolicy(newest=1, good_step=45))
    assert steps_in(tmp_path) == [90, 60, 40]
    save(tmp_path, 70, keep=RetentionPolicy(newest=1))
    assert steps_in(tmp_path) == [90, 70]
    assert latest(tmp_path).name == step_name(70)


def test_those_that_did_not_lead_to_the_newest_neither_count_nor_go_and_it_names_those_that_did(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    newest = save(tmp_path, 50, keep=RetentionPolicy(newest=2, good_step=45, steps=frozenset({10, 20})))
    assert steps_in(tmp_path) == [50, 40, 30, 20], "the weights after 30 and 40 steps are not known to be good"
    document = read_state(newest)
    assert document["earlier_steps"] == [20, 10]
    assert steps_up_to(newest, document) == {10, 20, 50}
    older_version = {name: value for name, value in document.items() if name != "earlier_steps"}
    assert steps_up_to(tmp_path / step_name(30), {**older_version, "step": 30}) == {20, 30}
    renamed = newest.rename(tmp_path / "copied")
    assert steps_up_to(renamed, document) == {10, 20, 50}


def test_only_checkpoints_with_files_of_the_right_sizes_are_named_beside_a_damaged_one(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / step_name(20) / "data").unlink()
    (tmp_path / step_name(30) / "data").write_text("w")
    error = damaged(tmp_path / step_name(40) / "data", "is missing")
    assert str(error).endswith(
        "data is missing; go on from a checkpoint beside it that has files of the right sizes: step_00000010"
    )
    shutil.rmtree(tmp_path / step_name(10))
    error = damaged(tmp_path / step_name(40) / "data", "is missing")
    assert "no other checkpoint with all of its files lies beside it: start the run anew" in str(error)


def test_the_pointer_says_which_is_the_latest_and_may_go_one_back(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    point_to(tmp_path, step_name(20))
    assert latest(tmp_path).name == step_name(20)
    assert "step_00000030 holds the weights of that loss, so the latest" in step_back(tmp_path, 30)
    assert latest(tmp_path).name == step_name(20)
    point_to(tmp_path, step_name(30))
    step_back(tmp_path, 30)
    assert latest(tmp_path).name == step_name(20)
    assert "the only checkpoint" in step_back(tmp_path, 10)
    with pytest.raises(InputError, match="which is no complete checkpoint"):
        point_to(tmp_path, step_name(25))
        latest(tmp_path)


def test_a_file_that_is_not_as_it_was_written_makes_no_checkpoint(tmp_path):
    with pytest.raises(OSError, match="data has 5 bytes of 7"):
        save(tmp_path, 10, lost=2)
    assert candidates(tmp_path) == []
    checkpoint = save(tmp_path, 20)
    expected = read_state(checkpoint)["files"]
    check_files(checkpoint, expected)
    for content, words in (("weighty", "has changed since it was written"), ("weight", "has 6 bytes of 7")):
        (checkpoint / "data").write_text(content)
        assert damage(checkpoint / "data", expected["data"]) == words
        with pytest.raises(OSError, match=words):
            check_files(checkpoint, expected)
    assert damage(checkpoint / "gone", expected["data"]) == "is missing"


def test_what_a_crash_left_of_a_replaced_checkpoint_is_the_checkpoint_again(tmp_path):
    save(tmp_path, 10).rename(tmp_path / "step_00000010.replaced")
    assert [path.name for path in candidates(tmp_path)] == ["step_00000010.replaced"]
    begin(tmp_path, step_name(20))
    assert [path.name for path in candidates(tmp_path)] == ["step_00000010"]


def test_a_state_of_another_schema_is_told_from_a_damaged_one(tmp_path):
    checkpoint = save(tmp_path, 10, schema=CHECKPOINT_SCHEMA_VERSION + 1)
    with pytest.raises(InputError, match=f"has checkpoint schema {CHECKPOINT_SCHEMA_VERSION + 1}, this version"):
        read_state(checkpoint)
    checkpoint = save(tmp_path, 20)
    document = json.loads((checkpoint / STATE_FILE).read_text())
    for changed in (document | {"step": 21}, document | {"schema_version": 99}):
        (checkpoint / STATE_FILE).write_text(json.dumps(changed) + "\n")
        with pytest.raises(InputError, match="has changed since it was written"):
            read_state(checkpoint)


@pytest.mark.parametrize(("left", "is_refused"), [("data", True), (".nfs00ab", False)])
def test_a_new_checkpoint_begins_beside_files_that_others_hold_open_alone(tmp_path, monkeypatch, left, is_refused):
    partial = tmp_path / "step_00000010.partial"
    partial.mkdir()
    (partial / left).touch()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as a network file system keeps what is open
    if is_refused:
        with pytest.raises(OSError, match="data of an earlier save cannot be removed"):
            begin(tmp_path, step_name(10))
    else:
        assert begin(tmp_path, step_name(10)) == partial
