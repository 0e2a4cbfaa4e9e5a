"""Names of files in messages and in commands to copy; what a killed process leaves is no obstacle and does not stay."""

import os
import subprocess
import sys

import pytest

from lengthwise.core import atomic_write
from lengthwise.core.atomic_write import new_folder, partial_of, shell_word, write_text


def test_words_of_commands_are_on_one_printable_line_and_lead_to_the_file_in_a_shell():
    names = ["plain", "a b", "it's", "Папка", os.fsdecode(b"o_bad\xff"), "it's\\\n\x1b[2J \u2028 Ж \xa0\x7f1"]
    words = [shell_word(name) for name in names]
    assert " ".join(words).isprintable() and words[0] == "plain" and words[4] == r"$'o_bad\xff'"
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], stdout=subprocess.PIPE, check=True
    ).stdout
    assert echoed.split(b"\0")[:-1] == [os.fsencode(name) for name in names]


@pytest.mark.parametrize("where", ["probe", "folder", "file"])
def test_what_a_killed_process_left_is_swept_up_by_the_next_one(tmp_path, where):
    killed = """
import os, sys, tempfile
from pathlib import Path
from lengthwise.core.atomic_write import new_folder, write_text
place, where = Path(sys.argv[1]), sys.argv[2]
if where == "probe":  # on a file system where each file has a name
    tempfile.TemporaryFile = lambda **names: [tempfile.mkstemp(**names), os._exit(9)]
if where == "file":
    Path.replace = lambda *_: os._exit(9)
    write_text(place, "x")
with new_folder(place, setting="--out") as partial:
    (partial / "weights").touch()
    os._exit(9)
"""
    place = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", killed, str(place), where], check=False).returncode == 9
    assert len([*tmp_path.rglob("*")]) >= 1
    if where == "file":
        write_text(place, "y")
        assert place.read_text() == "y"
    else:
        with new_folder(place, setting="--out") as partial:
            (partial / "config").touch()
        assert [path.name for path in place.iterdir()] == ["config"]
    assert list(tmp_path.iterdir()) == [place]


def test_what_a_process_that_runs_or_one_of_another_machine_writes_is_left_alone(tmp_path, monkeypatch):
    place = tmp_path / "out"
    own = partial_of(place)
    here = own.with_name(own.name.replace(str(os.getpid()), str(os.getppid())))
    monkeypatch.setattr(atomic_write, "machine", lambda: "another")
    elsewhere = partial_of(place)
    for path in (here, elsewhere):
        path.mkdir()
    monkeypatch.undo()
    write_text(place, "y")
    assert {*tmp_path.iterdir()} == {here, elsewhere, place}
    os.utime(elsewhere, (0, 0))
    atomic_write.remove_stale(place)
    assert {*tmp_path.iterdir()} == {here, place}


def test_an_interrupt_while_a_folder_is_looked_at_leaves_none(tmp_path, monkeypatch):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_write.tempfile, "TemporaryFile", interrupt)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a" / "b", setting="--out"):
        pass
    assert not list(tmp_path.iterdir())
