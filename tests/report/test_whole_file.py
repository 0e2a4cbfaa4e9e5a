"""Outputs go where the user points: the file behind a link is replaced, and a device or FIFO is written to."""

import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from lengthwise.core.atomic_write import write_text
from lengthwise.core.errors import InputError
from lengthwise.report.whole_file import check_place, write_whole


def write_page(path, text):
    check_place(path, "--html")
    write_whole({path: text.encode()})


both_writers = pytest.mark.parametrize("write", [write_page, write_text])


@both_writers
def test_the_file_behind_a_link_is_replaced(tmp_path, write):
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    link.symlink_to("folder/target")
    for text in ("made", "replaced"):
        write(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "target"]


def test_a_hyphen_names_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--html - names no file, and this is not written to stdout"):
        check_place(Path("-"), "--html")
    assert not [*tmp_path.iterdir()]


@both_writers
def test_a_fifo_is_written_to(tmp_path, write):
    fifo, texts = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = Thread(target=lambda: texts.append(fifo.read_text()), daemon=True)
    reader.start()
    write(fifo, "text " * 50_000)
    reader.join(60)
    assert texts == ["text " * 50_000]
    assert stat.S_ISFIFO(fifo.stat().st_mode) and list(tmp_path.iterdir()) == [fifo]


@both_writers
def test_a_device_is_written_to(tmp_path, write):
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.read_bytes()
    except PermissionError:
        pytest.skip("devices are made by root alone")
    write(device, "text")
    assert stat.S_ISCHR(device.stat().st_mode) and list(tmp_path.iterdir()) == [device]


@both_writers
def test_where_stdout_goes_is_written_in_its_place(tmp_path, write, capfd):
    os.write(1, b"before ")
    path = tmp_path / "stdout"
    path.symlink_to("/dev/fd/1")
    write(path, "text")
    os.write(1, b" after")
    assert capfd.readouterr().out == "before text after"


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    circle, lost = tmp_path / "circle", tmp_path / "lost"
    circle.symlink_to("circle")
    lost.symlink_to(tmp_path / "missing" / "page.html")
    for link, words in ((circle, "[Ss]ymbolic links"), (lost, f"there is no folder {tmp_path / 'missing'}")):
        with pytest.raises(InputError, match=words):
            check_place(link, "--html")
        with pytest.raises(InputError, match="cannot write"):
            write_whole({link: b"page"})
        assert link.is_symlink()


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        check_place(tmp_path, "--html")
