"""Messages on stderr, whoever reads them."""

import errno
import io
import os
import pty
import subprocess
import sys

import pytest
from rich.table import Table

from lengthwise.core.errors import LengthwiseError
from lengthwise.session import console


def test_messages_go_on_where_their_reader_has_gone(monkeypatch):
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), "ascii")  # as python keeps it in sys.__stderr__
    monkeypatch.setattr(sys, "stderr", stream)
    console.prepare_streams()
    console.stderr().print("first", soft_wrap=True)
    console.print_error("\N{SNOWMAN}")
    assert os.read(reader, 99) == b"first\nerror: \\u2603\n"
    os.close(reader)
    for _ in range(3):
        console.stderr().print("nobody reads this", soft_wrap=True)
        console.print_error("nor this")
        sys.stderr.write("nor" * 10_000)
    sys.stderr.flush()
    stream.close()


def _stream_to(monkeypatch, number, name="stderr"):
    """Have python's stream of that name write to a file descriptor; returns python's own, which holds it open."""
    stream = io.TextIOWrapper(os.fdopen(number, "wb"), "ascii", line_buffering=True)
    monkeypatch.setattr(sys, name, stream)
    console.prepare_streams()
    return stream


def _say_much():
    console.stderr().print("a step", soft_wrap=True)
    console.print_error("an error")
    sys.stderr.write("nor" * 10_000)
    sys.stderr.flush()


def test_messages_to_a_full_disk_end_nothing_and_later_ones_are_written(monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    stream = _stream_to(monkeypatch, full)
    _say_much()
    reader, writer = os.pipe()  # as if the disk had room again
    os.dup2(writer, full)
    os.close(writer)
    console.print_error("later")
    assert os.read(reader, 99) == b"error: later\n"
    os.close(reader)
    stream.close()


@pytest.mark.parametrize(("name", "rank"), [("stderr", ""), ("stdout", "0")])
def test_messages_to_a_terminal_that_was_closed_end_nothing(monkeypatch, name, rank):
    """Nor does what a rank prints, whose answer nobody waits for."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(variable, rank) if rank else monkeypatch.delenv(variable, raising=False)
    terminal, number = pty.openpty()
    stream = _stream_to(monkeypatch, number, name)
    os.close(terminal)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.write(number, b"x")
    _say_much()
    print("what a model prints", file=getattr(sys, name), flush=True)
    assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
    stream.close()


class Refusing(io.StringIO):
    """A stream of somebody else that cannot be written."""

    def write(self, text=""):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


def test_messages_to_the_stream_of_a_calling_program_end_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Refusing())
    console.stderr().print("a step", soft_wrap=True)


def test_tables_are_spelt_plainly_where_a_stream_has_no_other_letters(monkeypatch):
    reader, writer = os.pipe()
    stream = _stream_to(monkeypatch, writer, "stdout")
    table = Table("0.5\u00a0%", "3 µs \N{MULTIPLICATION SIGN} 2", "\N{SNOWMAN}…", box=None, pad_edge=False)
    console.stdout().print(table)
    assert os.read(reader, 99) == b"0.5 %  3 us x 2  \\u2603...\n"
    os.close(reader)
    stream.close()


def test_tables_wider_than_the_terminal_are_not_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    names = ["dcp-inter-node", "tokens per second", "feed-forward", "idle"]
    table = Table(*names, box=None)
    table.add_row("a name of many words", "12,345,678", "1.25 MiB", "0.5 %")
    console.stdout().print(table)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [names, ["a name of many words", "12,345,678", "1.25 MiB", "0.5 %"]]


def test_a_table_whose_reader_has_gone_ends_its_command_as_the_reader_wants(monkeypatch):
    reader, writer = os.pipe()
    stream = _stream_to(monkeypatch, writer, "stdout")
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        console.stdout().print(Table("policy", "tokens/s"))
    console.discard_stdout()
    stream.close()


def test_a_table_that_cannot_be_written_says_that_it_is_stdout(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(LengthwiseError, match=r"stdout cannot be written \(No space left on device\); the command"):
            console.stdout().print("an answer")


def test_an_answer_that_cannot_be_written_is_one_error(monkeypatch):
    with open("/dev/full", "w") as full:  # flushes what is left
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(LengthwiseError, match=r"stdout cannot be written \(No space left on device\)"):
            console.emit_json({"text": "x" * 100_000})


CLOSED = """
import os, sys
from lengthwise.session.console import prepare_streams
prepare_streams()
with open(sys.argv[1], "wb") as file:
    sys.stderr.write("a message")
    print("an answer", flush=True)
    assert file.fileno() > 2
    for number in range(3):
        assert os.get_inheritable(number)
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_is_written_to_a_closed_stream_goes_into_no_other_file(tmp_path, closed):
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    subprocess.run(["bash", "-c", f'exec "$@" {closed}', "bash", *command], check=True, capture_output=True, timeout=60)
    assert (tmp_path / "file").read_bytes() == b""
