"""Runs of the command line: a small corpus, processes that can be killed, and what is left of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from torch import Tensor

from lengthwise.cli.main import main
from lengthwise.config.run_config import load
from lengthwise.core.json_lines import read_jsonl
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.corpus import open_corpus
from lengthwise.runtime.state.checkpoint import latest, load_weights
from lengthwise.session.trained_model import resolve_model
from tests.warm import Command

STARTS_RANKS = ("train", "profile")
SMALL_MODEL = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_size=64")


def lengthwise(*arguments: object, expected: int = 0, is_cold: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command line: where it starts ranks, in a process of its own, new down to the imports if ``is_cold``."""
    command = [sys.executable, "-m", "lengthwise", *map(str, arguments)]
    if is_cold:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    elif arguments[0] in STARTS_RANKS:
        done = _in_a_warm_process(command)
    else:
        done = _in_this_process(command)
    assert done.returncode == expected, done.stderr[-3000:]
    return done


def _in_a_warm_process(command: list[str]) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = Command(*command[1:], out=out, err=err).wait(300)
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _in_this_process(command: list[str]) -> subprocess.CompletedProcess[str]:
    out, err = StringIO(), StringIO()
    with mock.patch.object(sys, "argv", command[2:]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code: object = 0
        except SystemExit as leave:
            code = leave.code
    code = code if isinstance(code, int) else int(bool(code))
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def make_corpus(folder: Path) -> Path:
    """A byte-level index of a few small files of very different length."""
    folder.mkdir(exist_ok=True)
    for number in range(24):
        (folder / f"{number:02}.txt").write_text(f"file {number} says hello. " * (1 + number * number // 8))
    out = folder.parent / f"{folder.name}-index"
    lengthwise("index", folder, "--out", out)
    return out


def settings(corpus: Path, folder: Path, *more: str) -> list[str]:
    """Of a run with a small model and a policy that is ready at once, unless ``more`` names others."""
    sizes = ["data.max_length=600", "data.over_length=split", "data.tokens_per_step=2000", "train.checkpoint_every=2"]
    if not any(word.startswith(("model.hf=", "model.preset=")) for word in more):
        sizes += SMALL_MODEL
    return _last_of_each([f"data.index={corpus}", f"run_folder={folder}", "plan.policy=packed", *sizes, *more])


def _last_of_each(words: list[str]) -> list[str]:
    names = [word.partition("=")[0] for word in words]
    is_setting = ["=" in word and not word.startswith("-") for word in words]
    return [
        word for place, word in enumerate(words) if not (is_setting[place] and names[place] in names[place + 1 :])
    ]  # fmt: skip


def wait_until(condition: Callable[[], object], timeout_s: float = 200) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


class Run:
    """A command that trains into ``folder`` and can be killed, whole or in part."""

    def __init__(self, folder: Path, *command: object, num_ranks: int) -> None:
        self.folder, self.num_ranks = RunFolder(folder), num_ranks
        self.running: dict[int, int] = {}
        """Process ids of the ranks."""
        self.log = folder.with_suffix(".log")
        self.process = Command(*command, out=self.log)

    def steps(self) -> list[int]:
        """Of all rows so far, in the order they were written; steps trained again are there again."""
        return [row["step"] for row in read_jsonl(self.folder.metrics)]

    def wait_for(self, step: int, *, after: int = 0) -> int:
        """Wait until a row after the first ``after`` ones is of ``step`` or later; how many rows there are then."""
        wait_until(lambda: self.process.poll() is not None or self._has_come_to(step, after))
        assert self.process.poll() is None, f"it ended before step {step}:\n{self.log.read_text()[-3000:]}"
        return len(self.steps())

    def _has_come_to(self, step: int, after: int) -> bool:
        if not all(Path(f"/proc/{process}").exists() for process in self.running.values()) or not self.running:
            self.running = self._ranks()
        return max(self.steps()[after:], default=-1) >= step

    def _ranks(self) -> dict[int, int]:
        started = [tuple(map(int, path.name.split("."))) for path in self.process.ranks.iterdir()]
        found = {rank: process for rank, process in started if Path(f"/proc/{process}").exists()}
        return found if len(found) == self.num_ranks else {}

    def kill(self, *ranks: int) -> None:
        """kill -9 of these of the ranks that were running when they were waited for last."""
        for rank in ranks:
            os.kill(self.running[rank], signal.SIGKILL)

    def kill_everything(self) -> None:
        """kill -9 of the launcher and of all ranks, which are in sessions of their own."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=300)
        for path in self.process.ranks.iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(int(path.suffix[1:]), signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """Exit code and all that was printed, when it has ended."""
        code = self.process.wait(timeout=300)
        return code, self.log.read_text()

    def status(self) -> tuple[str, int | None]:
        status = self.folder.read_json("status.json")
        return status["state"], status["exit_code"]


def weights(folder: Path) -> dict[str, Tensor]:
    """Those of the latest checkpoint of a run."""
    config = load(folder / "config.yaml", [])
    return load_weights(latest(folder / "checkpoints"), resolve_model(config, open_corpus(config.data)))
