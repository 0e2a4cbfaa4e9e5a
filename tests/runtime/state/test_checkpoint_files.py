"""Killed between any two operations on files, a save leaves the newest complete checkpoint where it is found."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.checkpoint_files import (
    STATE_FILE,
    RetentionPolicy,
    begin,
    candidates,
    digest_of,
    latest,
    outlook,
    point_to_best,
    publish,
    read_state,
)

OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
"""Of ``os``: all that changes names, and the end of every write."""


class Killed(BaseException):
    """Ends a save on the spot: nothing in it catches this, so no more is done than after a SIGKILL."""


class Killer:
    """Lets a number of operations on files happen and no more."""

    def __init__(self, patch: pytest.MonkeyPatch, allowed: int) -> None:
        self.left = allowed
        patch.setattr(os, "fsync", _at_once)  # counted, not done: it changes nothing that a kill could show
        for name in OPERATIONS:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation):
        def count_and_do(*arguments, **options):
            if not self.left:
                raise Killed
            self.left -= 1
            return operation(*arguments, **options)

        return count_and_do


def _at_once(handle: int) -> None:
    pass


def save(folder: Path, step: int, content: str, *, keep: int, best_step: int | None = None) -> None:
    """As :mod:`lengthwise.runtime.state.saver` does, with text for tensors; the validation loss was lowest after
    ``best_step``."""
    partial = begin(folder, f"step_{step:08d}")
    for rank in range(2):
        (partial / f"__{rank}_0.distcp").write_text(content)
    document = {"schema_version": 2, "step": step, "content": content, "validation": {"best_step": best_step}}
    listed = {path.name: digest_of(path) for path in partial.iterdir()}
    publish(partial, {**document, "files": listed}, keep=RetentionPolicy(newest=keep))


def content_of(checkpoint: Path) -> str:
    """What was saved, after a look at every file."""
    document = read_state(checkpoint)
    for name, expected in document["files"].items():
        assert digest_of(checkpoint / name) == expected
        assert (checkpoint / name).read_text() == document["content"]
    return document["content"]


def save_killed(folder: Path, step: int, content: str, *, keep: int, after: int) -> bool:
    """Whether the save was killed; if so, ``after`` so many operations."""
    with pytest.MonkeyPatch.context() as patch:
        Killer(patch, after)
        try:
            save(folder, step, content, keep=keep)
        except Killed:
            return True
    return False


SCENES = {
    "the first": [],
    "one more": [2],
    "one too many": [1, 2, 3],
    "the same step again": [2, 3, 4],
    "the only one again": [4],
    "a step before others, after falling back": [3, 5, 6],
}


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("earlier", SCENES.values(), ids=SCENES)
def test_a_save_killed_at_any_operation_leaves_the_newest_complete_checkpoint_loadable(tmp_path, earlier, keep):
    scene = tmp_path / "scene"
    for step in earlier:
        save(scene, step, f"old {step}", keep=5)
    num_kills = 0
    while save_killed(fresh(scene, tmp_path / "once"), 4, "new", keep=keep, after=num_kills):
        check_after_kill(tmp_path / "once", earlier, keep)
        num_kills += 1
    assert num_kills > 10, "any save is more operations than this"
    check_complete(tmp_path / "once", earlier, keep)


@pytest.mark.deep
@pytest.mark.parametrize(
    "earlier",
    [pytest.param([2, 3, 4], marks=pytest.mark.deep), [4]],
    ids=["the same step again", "the only one again"],
)
def test_a_second_save_killed_at_any_operation_after_a_first_still_leaves_it_loadable(tmp_path, earlier):
    scene, first, second = (tmp_path / name for name in ("scene", "first", "second"))
    for step in earlier:
        save(scene, step, f"old {step}", keep=5)
    num_kills = 0
    while save_killed(fresh(scene, first), 4, "new", keep=2, after=num_kills):
        again = 0
        while save_killed(fresh(first, second), 4, "newer", keep=2, after=again):
            assert content_of(latest(second)) in {f"old {earlier[-1]}", "new", "newer"}
            if content_of(latest(first)) == "new":
                assert content_of(latest(second)) != f"old {earlier[-1]}"
            again += 1
        assert content_of(latest(second)) == "newer"
        assert not [path for path in second.iterdir() if path.suffix]
        num_kills += 1


def fresh(scene: Path, copy: Path) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    if scene.exists():
        shutil.copytree(scene, copy)
    return copy


def check_after_kill(folder: Path, earlier: list[int], keep: int) -> None:
    """Whatever is found is whole, and the newest of before is found until the new one is there."""
    found = {path.name.removesuffix(".replaced"): content_of(path) for path in candidates(folder)}
    is_there = found.get("step_00000004") == "new"
    for step in earlier:
        expected = {f"old {step}", "new"} if step == 4 else {f"old {step}"}
        may_be_gone = is_there and step < 4
        assert found.get(f"step_{step:08d}") in (expected | {None} if may_be_gone else expected)
    if not earlier and not is_there:
        with pytest.raises(InputError, match=r"no complete checkpoint in .* before its first one"):
            latest(folder)
        return
    pointed = content_of(latest(folder))
    assert pointed in ({f"old {earlier[-1]}", "new"} if earlier else {"new"})
    save(folder, 4, "new", keep=keep)  # the run is started again
    check_complete(folder, earlier, keep)


def check_complete(folder: Path, earlier: list[int], keep: int) -> None:
    """The new one is the latest; as many as wanted are kept, later ones left alone, and nothing else is there."""
    assert latest(folder).name == "step_00000004"
    assert content_of(latest(folder)) == "new"
    older = [step for step in earlier if step < 4]
    steps = [*older[max(0, len(older) - keep + 1) :], 4, *(step for step in earlier if step > 4)]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step_{step:08d}" for step in steps)]
    assert [path.name for path in candidates(folder)] == [f"step_{step:08d}" for step in reversed(steps)]


def test_a_pointer_to_a_checkpoint_that_is_not_there_is_refused_and_others_named(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, "x", keep=2)
    (tmp_path / "latest").write_text("step_00000003\n")
    with pytest.raises(InputError, match=r"latest names 'step_00000003', .*step_00000002, step_00000001.*--fall-back"):
        latest(tmp_path)


@pytest.mark.parametrize("is_of_run", [True, False])
def test_where_no_checkpoint_is_complete_that_is_said_and_nothing_is_to_be_removed(tmp_path, is_of_run):
    save(tmp_path / "a", 4, "x", keep=2)
    (tmp_path / "a" / "step_00000004" / STATE_FILE).unlink()
    cases = {
        "typo": "stopped before its first one" if is_of_run else "there is nothing of that name; name the folder",
        ".": "stopped before its first one" if is_of_run else "it has no folder of a step that was saved; name",
        "a": r"a/step_00000004 has no state\.json; copy state\.json from where",
        "a/step_00000004": r"step_00000004 has no state\.json; copy",
    }
    for name, reason in cases.items():
        with pytest.raises(InputError, match=rf"no complete checkpoint in .*: .*{reason}") as refused:
            latest(tmp_path / name, is_of_run=is_of_run)
        assert "remove" not in str(refused.value) and "delete" not in str(refused.value)
    save(tmp_path / "a", 3, "x", keep=2)
    (tmp_path / "a" / "step_00000004").mkdir()
    (tmp_path / "a" / "latest").write_text("step_00000004\n")
    way_on = "--fall-back" if is_of_run else r"run\.resume\('.*step_00000003'\)"
    with pytest.raises(InputError, match=rf"no complete checkpoint: it has no state\.json; .*{way_on}"):
        latest(tmp_path / "a", is_of_run=is_of_run)


def test_only_complete_checkpoints_are_candidates(tmp_path):
    for step in (7, 30, 100_000_000):
        save(tmp_path, step, "x", keep=9)
    for name in ("step_00000040.partial", "step_00000050", "step_00000030.replaced", "step_00000060.replaced", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("x")
    for name in ("step_00000040.partial", "step_00000030.replaced", "other"):
        shutil.copy(tmp_path / "step_00000007" / "state.json", tmp_path / name)
    assert [path.name for path in candidates(tmp_path)] == ["step_100000000", "step_00000030", "step_00000007"]
    assert candidates(tmp_path / "nowhere") == []


def test_file_systems_that_cannot_put_names_on_disk_are_trusted_and_broken_disks_are_not(tmp_path, monkeypatch):
    refusal = {"errno": errno.EINVAL}

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(refusal["errno"], "refused")

    monkeypatch.setattr(os, "fsync", refuse_folders)
    save(tmp_path, 1, "x", keep=1)
    assert content_of(latest(tmp_path)) == "x"
    refusal["errno"] = errno.EIO
    with pytest.raises(OSError, match="refused"):
        save(tmp_path, 2, "y", keep=1)
    assert content_of(latest(tmp_path)) == "x"


def test_what_cannot_be_removed_of_an_earlier_save_is_named_unless_a_network_file_system_keeps_it(
    tmp_path, monkeypatch
):
    partial = tmp_path / "step_00000001.partial"
    partial.mkdir()
    (partial / ".nfs0001").write_text("still open somewhere")
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    save_into = begin(tmp_path, "step_00000001")
    assert save_into == partial
    (partial / "__0_0.distcp").write_text("x")
    with pytest.raises(OSError, match=r"__0_0\.distcp of an earlier save cannot be removed"):
        begin(tmp_path, "step_00000001")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "is no JSON object"),
        (b"7", "is no JSON object"),
        (b"", "is no JSON document"),
        (b"\xff\xfe", "is no JSON document"),
        (b"[" * 100_000, "is no JSON document"),
    ],
)
def test_a_state_that_is_something_else_is_refused_in_words(tmp_path, content, words):
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    (checkpoint / STATE_FILE).write_bytes(content)
    with pytest.raises(InputError, match=words) as refused:
        read_state(checkpoint)
    assert "Error" not in str(refused.value)


def best_of(folder: Path) -> str | None:
    pointer = folder / "best"
    return pointer.read_text().strip() if pointer.exists() else None


def test_best_names_the_checkpoint_of_the_lowest_loss_whatever_it_named_before(tmp_path):
    save(tmp_path, 2, "two", keep=2, best_step=2)
    save(tmp_path, 4, "four", keep=2, best_step=4)
    assert best_of(tmp_path) == "step_00000004"
    save(tmp_path, 3, "three", keep=3, best_step=2)  # a run that went on from before its lowest loss
    assert best_of(tmp_path) == "step_00000002"
    (tmp_path / "best").write_text("step_00000001\n")  # of a run that was killed between two names
    save(tmp_path, 5, "five", keep=1, best_step=4)
    assert best_of(tmp_path) == "step_00000004" and (tmp_path / "step_00000004").is_dir()
    point_to_best(tmp_path, 2)
    assert best_of(tmp_path) is None, "its checkpoint is gone, and no other is the best"
    point_to_best(tmp_path, None)
    assert best_of(tmp_path) is None


def test_a_file_in_the_place_of_a_folder_is_told_of(tmp_path):
    (tmp_path / "run").touch()
    assert outlook(tmp_path / "run" / "checkpoints") == f"{tmp_path / 'run'} is no folder, but a file"
    assert outlook(tmp_path / "gone" / "checkpoints").endswith("gone is gone, and its checkpoints with it")
