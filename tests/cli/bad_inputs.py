"""What the command line is handed by mistake or by malice, and what must come of it: one sentence, in bounded time."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lengthwise.cli.main import main
from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.specs import model_preset
from tests.report.fake_run import make_run

LIMIT_S = 60
"""A guard against hangs on a busy machine, not a measurement."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command, what is done to good inputs before, and how it must end."""

    name: str
    arguments: tuple[str, ...]
    """``GOOD`` stands for the folder of good inputs, which is also the working folder."""
    words: tuple[str, ...]
    """All of them are in what is printed on stderr."""
    spoil: Callable[[Path], object] = field(default=lambda folder: None)
    code: int = 2


def few_of_each(cases: Sequence[Case]) -> list[Any]:
    """Cases as parameters: two values of each setting or column, and all others in deep runs."""
    seen: Counter[str] = Counter()
    parameters = []
    for case in cases:
        of, is_value, _ = case.name.partition("=")
        seen[of] += bool(is_value)
        parameters.append(pytest.param(case, marks=[pytest.mark.deep] * (seen[of] > 2)))
    return parameters


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail instead of hanging."""

    def stop(number, frame):
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def good_inputs(base: Path) -> Path:
    """A small index, plans, a profile, a run and lengths, all in order."""
    folder = base / "good"
    (folder / "texts").mkdir(parents=True)
    for number in range(12):
        (folder / "texts" / f"{number:02}.txt").write_text(f"text {number} " * (1 + number))
    _run_quietly("index", folder / "texts", "--out", folder / "index")
    shutil.rmtree(folder / "texts")
    settings = [f"data.index={folder / 'index'}", "data.sequences_per_step=4", "train.steps=3", "cluster.name=1xcpu"]
    _run_quietly("plan", *settings, "--out", folder / "plans.jsonl")
    np.save(folder / "lengths.npy", np.arange(1, 400))
    (folder / "config.yaml").write_text("name: run\ntrain: {steps: 3}\n")
    save_profile(folder / "profile.json")
    make_run(folder / "run", num_steps=3, num_ranks=2)
    return folder


def save_profile(path: Path) -> None:
    """A profile that a run of the smallest model on CPUs takes."""
    rows = tuple(
        ProfileRow(lengths=(length,), time_s=1e-4 * length + 1e-3, spread_s=1e-5, kept_bytes=1000 * length)
        for length in (32, 64, 128, 256)
    )
    spec = model_preset("llama-tiny")
    ProfileTable(
        model_digest=spec.digest, model_name=spec.name, device="cpu, 1 thread(s)", dtype="float32", recompute=False,
        num_ranks=1, update_s=0.01, rows=rows,
    ).save(path)  # fmt: skip


def _run_quietly(*arguments: object) -> None:
    before, sys.argv = sys.argv, ["lengthwise", *map(str, arguments)]
    try:
        main()
    except SystemExit as leave:
        assert not leave.code, arguments
    finally:
        sys.argv = before


def listing(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of everything below ``folder``."""
    return sorted(
        (os.path.relpath(os.path.join(at, name), folder), os.lstat(os.path.join(at, name)).st_size)
        for at, folders, names in os.walk(folder)
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(at, one))))
    )


def check(case: Case, cli: Callable[..., tuple[int, str, str]], folder: Path, monkeypatch) -> None:
    """Run a case in a copy of the good inputs, and assert all that a refusal must be."""
    case.spoil(folder)
    monkeypatch.chdir(folder)
    before = listing(folder)
    with time_limit(LIMIT_S):
        code, out, err = cli(*(argument.replace("GOOD", str(folder)) for argument in case.arguments))
    assert code == case.code, (code, out[-500:], err[-2000:])
    for word in case.words:
        assert word.replace("GOOD", str(folder)) in err, err[-2000:]
    for trace in ("Traceback", "fault of lengthwise", "Error:", "Warning:"):
        assert trace not in err.replace("Error: Invalid value", "").replace("Error: No such", ""), err[-2000:]
    assert len(err) < 4000, err[-2000:]
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in err), ascii(err[-2000:])
    assert listing(folder) == before


def edit_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change a JSON document in place."""

    def spoil(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return spoil


def setting(*keys: object, to: object) -> Callable[[dict], None]:
    """Set the value at ``keys`` of a tree."""

    def change(document) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def without(*keys: object) -> Callable[[dict], None]:
    """Take the value at ``keys`` of a tree away."""

    def change(document) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


def writing(name: str, content: bytes | str) -> Callable[[Path], None]:
    """Replace a file's content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _absent(path: Path) -> None:
    path.unlink(missing_ok=True)


def no_document(name: str) -> dict[str, tuple[Callable[[Path], object], str]]:
    """What may stand where a file of text should: what to do, and a word of the refusal."""
    return {
        "fifo": (lambda folder: _fifo(folder / name), "is a pipe"),
        "folder": (lambda folder: _folder(folder / name), ""),
        "loop of links": (lambda folder: _loop(folder / name), ""),
        "one terabyte": (lambda folder: _sparse(folder / name), "bytes"),
        "binary": (writing(name, bytes(range(256))), ""),
        "UTF-16": (writing(name, "name: x".encode("utf-16")), ""),
        "NUL": (writing(name, "\0" * 100), ""),
        "deep": (writing(name, "[" * 100_000), ""),
        "deep objects": (writing(name, '{"a":' * 100_000), ""),
        "5,000 digits": (writing(name, '{"a": ' + "9" * 5000 + "}"), ""),
        "missing": (lambda folder: _absent(folder / name), ""),
    }
