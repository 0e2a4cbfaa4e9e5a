"""Ranks to kill: they train and save at every step, forked from a process that has imported all they need."""

import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.warm import context

LIMIT_S = 60.0
"""A rank that is still there after so long is taken for hung."""
GRACE_S = 1.0
"""Ranks that are still there so long after one was killed wait in vain for it: they are killed too, as by torchrun."""
STARTED, TRAINS, SAVES = "the ranks are started", "the first rank trains", "a checkpoint is being written"
OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
"""Of ``os``: all that changes names, and the end of every write."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run, and how it is to end."""

    folder: Path
    settings: dict[str, Any]
    num_ranks: int = 2
    victims: tuple[int, ...] = ()
    """Ranks that get a SIGKILL."""
    after: str = STARTED
    num_saves: int = 1
    """The checkpoint that is then being written, counted from the start."""
    delay_s: float = 0.0
    """Until then, from that on."""
    dies_before: int | None = None
    """The first rank kills itself before this operation on files, counted from when it trains."""


class Nursery:
    """The process that starts ranks, kills them and buries them."""

    def __init__(self) -> None:
        warm = context()
        self._pipe, theirs = warm.Pipe()
        self._process = warm.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, attempt: Attempt) -> list[int]:
        """What became of each rank: its exit code, or minus the signal that ended it."""
        self._pipe.send(attempt)
        if not self._pipe.poll(2 * LIMIT_S):
            raise AssertionError(f"no news of {attempt}")
        return self._pipe.recv()

    def close(self) -> None:
        """End it; its ranks have ended."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    for name in ("lengthwise.runtime.state.checkpoint", "tests.runtime.train.test_trainer"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "modules"
        settings = {"steps": 2, "checkpoint_every": 1}
        _run(Attempt(folder=Path(folder) / "run", settings=settings, num_ranks=1), names)
        for name in names.read_text().split():  # what a first run imports on its way, for all to come
            importlib.import_module(name)
    while True:
        try:
            pipe.send(_run(pipe.recv()))
        except EOFError:
            return


def _run(attempt: Attempt, list_modules: Path | None = None) -> list[int]:
    attempt.folder.mkdir(exist_ok=True)
    stale = unfinished_saves(attempt.folder)
    with tempfile.TemporaryDirectory() as folder:
        trains, says_so = os.pipe()
        pids = []
        for rank in range(attempt.num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(lambda: _train(attempt, rank, Path(folder) / "store", says_so), attempt, rank, list_modules)  # noqa: B023
            pids.append(pid)
        os.close(says_so)
        if attempt.victims:
            _wait_for(attempt, pids[0], trains, stale)
            time.sleep(attempt.delay_s)
            for victim in attempt.victims:
                os.kill(pids[victim], signal.SIGKILL)  # nobody else waits for them, so it is still this process
        os.close(trains)
        return _bury(pids)


def _wait_for(attempt: Attempt, first: int, trains: int, stale: set[tuple[str, int]]) -> None:
    if attempt.after != STARTED:
        select.select([trains], [], [], LIMIT_S)
    seen: set[str] = set()
    while attempt.after == SAVES and len(seen) < attempt.num_saves and not _has_ended(first):
        seen |= {name for name, _ in unfinished_saves(attempt.folder) - stale}
        time.sleep(0.001)


def _has_ended(pid: int) -> bool:
    """Whether a rank is there to be buried."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def unfinished_saves(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints of a run that are being written or were when it ended, and when they were begun or added to."""
    found = set()
    for path in (folder / "checkpoints").glob("*.partial"):
        with suppress(FileNotFoundError):  # it has got its name meanwhile
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _be_rank(train: Callable[[], None], attempt: Attempt, rank: int, list_modules: Path | None) -> None:
    code = 1
    try:
        before = set(sys.modules)
        train()
        if list_modules is not None:
            list_modules.write_text("\n".join(set(sys.modules) - before))
        code = 0
    except BaseException:
        (attempt.folder / f"error_of_rank_{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _train(attempt: Attempt, rank: int, store: Path, says_so: int) -> None:
    import torch.distributed as dist

    from lengthwise.runtime.state import checkpoint
    from tests.runtime.train.test_trainer import make_trainer

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), attempt.num_ranks),
        rank=rank,
        world_size=attempt.num_ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    trainer = make_trainer(str(attempt.folder), **attempt.settings)
    if checkpoint.candidates(trainer.folder.checkpoints):
        trainer.resume(checkpoint.latest(trainer.folder.checkpoints))
    if rank == 0:
        if attempt.dies_before is not None:
            _die_before(attempt.dies_before)
        os.write(says_so, b".")
    trainer.fit()


def _die_before(number: int) -> None:
    left = number

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_do(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return operation(*arguments, **options)

        return count_and_do

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def _bury(pids: list[int]) -> list[int]:
    """Wait for all. Hung ones are killed, and told of as ended by SIGALRM."""
    ends: dict[int, int] = {}
    until, hung = time.monotonic() + LIMIT_S, -signal.SIGALRM
    while len(ends) < len(pids):
        for pid in set(pids) - set(ends):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[pid] = os.waitstatus_to_exitcode(status)
                if ends[pid] == -signal.SIGKILL and hung != ends[pid]:
                    until, hung = time.monotonic() + GRACE_S, ends[pid]
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ends[pid] = hung
        time.sleep(0.002)
    return [ends[pid] for pid in pids]
