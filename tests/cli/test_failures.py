"""How commands end: any text is printed as it is, any exception becomes one sentence and an exit code."""

import errno
import json
import subprocess
import sys
from io import StringIO

import pytest

from lengthwise.cli import train_config
from lengthwise.cli.failures import explain, failures_of_run
from lengthwise.cli.launch import LaunchOutcome
from lengthwise.cli.signals import Terminated
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import emit_json, printable, progress, stderr, stdout

NASTY = "[/] [/b] [bold]exp[lr=3][/bold] :smile: [link=x]"


def failing(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("lengthwise.cli.commands.config.load", fail)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(15), 143, "stopped by SIGTERM; run the same command again"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a[/b]"), 2, "a[/b]: No such file"),
        (PermissionError(errno.EACCES, "Permission denied", "secret"), 2, "secret: Permission denied"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), 2, "x/y: Not a directory"),
        (OSError(errno.ENOSPC, "No space left on device", "out"), 1, "out: No space left"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "link"), 2, "link: Too many levels"),
        (MemoryError(), 1, "not enough memory"),
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"), 2, "pip install 'lengthwise[data]'"),
        (InputError(NASTY), 2, NASTY),
        (InputError("a\x1b[2Jb\x00c\u202ed\ud800"), 2, "a\\x1b[2Jb\\x00c\\u202ed\\ud800"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exceptions_reach_the_user_as_one_sentence(cli, monkeypatch, error, code, words):
    failing(monkeypatch, error)
    found, out, err = cli("config", "--json")
    assert found == code and words in err and "Traceback" not in err
    assert json.loads(out)["exit_code"] == code
    assert len(err.splitlines()) == 1


def test_a_fault_of_ours_names_a_file_with_its_traceback(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    failing(monkeypatch, ZeroDivisionError("oops [/]"))
    code, _, err = cli("config")
    (file,) = tmp_path.glob("lengthwise-*.traceback")
    assert code == 1 and "oops [/]" in err and str(file) in err and "Traceback" not in err
    assert "ZeroDivisionError" in file.read_text()
    monkeypatch.setenv("LENGTHWISE_DEBUG", "1")
    code, _, err = cli("config")
    assert code == 1 and "Traceback" in err and len(list(tmp_path.glob("*.traceback"))) == 1


def test_text_of_others_is_printed_as_it_is(capsys):
    from rich.table import Table

    table = Table(NASTY, title=NASTY)
    table.add_row(NASTY + "\x1b[31m")
    for console in (stdout(), stderr()):
        console.width = 200
        console.print(NASTY, soft_wrap=True)
        console.print(table)
    written = capsys.readouterr()
    for text in (written.out, written.err):
        assert text.count(NASTY) == 4 and "\x1b" not in text and "\\x1b[31m" in text


def test_progress_bars_show_brackets(monkeypatch):
    bar = progress()
    bar.console.file, bar.console.width = StringIO(), 200
    bar.add_task(NASTY, total=1)
    bar.console.print(bar.get_renderable())
    assert NASTY in bar.console.file.getvalue()


def test_printable_keeps_text_and_spells_out_what_steers_terminals():
    assert printable("é 漢 \u00a0 \n\t") == "é 漢 \u00a0 \n\t"
    assert printable("\x1b\x07\u202e\x85") == "\\x1b\\x07\\u202e\\x85"


def test_json_names_the_folder_of_a_run_that_failed_while_it_is_there(tmp_path):
    for folder, named in ((tmp_path, {"run_folder": str(tmp_path)}), (tmp_path / "removed", {})):
        with pytest.raises(InputError) as failure, failures_of_run(folder):
            raise InputError("no")
        assert explain(failure.value).to_json() == {"error": "no", "exit_code": 2, **named}
    assert explain(InputError("no")).to_json() == {"error": "no", "exit_code": 2}


def test_a_run_whose_ranks_die_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(train_config, "torchrun", lambda *arguments, **options: LaunchOutcome(well=False))
    with pytest.raises(LengthwiseError) as failure:
        train_config.launch(RunFolder(tmp_path / "run"), ["--quiet"], nproc=1)
    assert explain(failure.value).to_json()["run_folder"] == str(tmp_path / "run")


def test_json_on_stdout_is_json_whatever_the_numbers(capsys):
    emit_json({"a": [float("nan"), 1.5], "b": float("inf")})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "a": [None, 1.5], "b": None}


@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        ("| head -1", 0),
        (">&-", 0),
        pytest.param("2>&- >/dev/null", 0, marks=pytest.mark.deep),
        (">/dev/full", 1),
        ("--help >/dev/full", 1),
        *(
            pytest.param(redirection, code, marks=pytest.mark.deep)
            for redirection, code in (("--json >/dev/full", 1), ("--json train.steps=-1 >/dev/full", 2))
        ),
        ("train.steps=-1 2>/dev/full", 2),
    ],
)
def test_readers_that_leave_and_streams_that_are_closed_or_full(redirection, code):
    command = f"set -o pipefail; {sys.executable} -m lengthwise config {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) <= 1
