"""Starting ranks: torchrun on this machine, in this process, so that its end is a return value and not a traceback."""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import uuid4

from lengthwise.cli.rank_errors import is_first
from lengthwise.cli.rendezvous import meet_on_loopback
from lengthwise.cli.signals import SignalsOfRanks
from lengthwise.core.atomic_write import shown
from lengthwise.core.errors import InputError, Preempted, missing_package
from lengthwise.core.launcher_variables import has_rank, rank_and_size
from lengthwise.core.processes import check_processes
from lengthwise.core.read_file import brief
from lengthwise.session.console import stderr

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RUN_FOLDER_VARIABLE = "LENGTHWISE_RUN_FOLDER"
"""How `lengthwise train` tells the ranks it starts where to write; it reads there how they ended."""

LAUNCHER_FOLDER_VARIABLE = "LENGTHWISE_LAUNCHER_FOLDER"
"""A temporary folder of the launcher, which ranks remove if it was killed."""

LAUNCHER_VARIABLE = "LENGTHWISE_LAUNCHER"
"""How ranks know the process that started them, which may be gone before they look."""


STOPPED_AFTER_S = 30
"""After so long torchrun kills ranks that have not ended by themselves after another rank had failed."""
SAFE_PATH = "PYTHONSAFEPATH"
"""The variable by which python leaves the current folder out of where it looks for modules."""
NO_SIGNAL = "SIGSYS"
"""One that nobody sends: torchrun wants some to handle, and all others are handled here or end the launcher, without
which ranks save and end.
"""
MOST_RANKS = 1024
"""Of one machine."""


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How the ranks ended; true if all of them well."""

    well: bool
    killed: str = ""
    """Which rank a signal killed, if one did."""
    failed: str = ""
    """Which rank ended first, and how, whatever ended it."""
    was_asked: bool = False
    """Whether a signal asked the launcher to stop them."""
    is_preempted: bool = False
    """Whether they ended as they do when they were asked to stop."""

    def __bool__(self) -> bool:
        return self.well


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return has_rank()


def speaks_for_all() -> bool:
    """Whether this process says what became of a command: of ranks the first alone, and none whose launcher does."""
    return is_first() and not (is_rank() and LAUNCHER_VARIABLE in os.environ)


def check_rank_options(nproc: int | None, *, max_restarts: int = 0) -> None:
    """Raise ``InputError`` if this process counts as a rank, and is asked to start other ranks than there are.

    ``nproc``: ranks to start; None or 1: nobody asked for more. As many as torchrun started here are let pass.
    """
    if not is_rank():
        return
    asked = []
    if (nproc or 1) > 1 and str(nproc) != os.environ.get("LOCAL_WORLD_SIZE"):
        asked.append(f"--nproc {nproc}")
    if max_restarts:
        asked.append(f"--max-restarts {max_restarts}")
    if asked:
        raise InputError(
            f"{' and '.join(asked)}: RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are set, as "
            "for one of the ranks that torchrun starts, which starts none itself; leave this out (torchrun has options "
            "of the same names), or unset RANK and WORLD_SIZE"
        )


def prefer_expandable_segments() -> None:
    """Have the allocator of a GPU grow its segments, unless a variable of the environment configures it already.

    Packs differ in size from step to step; on an H100 fixed segments reserved 2 to 7 % more than a step's peak, ones
    that grow 0.2 to 0.4 % (benchmarks/gpu.md). To be called before torch is imported.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def check_torch() -> None:
    """Raise ``MissingPackage`` if torch is not installed: before anything is read or written."""
    if find_spec("torch") is None:
        raise missing_package("this command", "torch")


def check_nproc(nproc: int) -> None:
    """Raise ``InputError`` if one machine cannot run so many ranks."""
    check_processes(nproc, setting="--nproc", limit=MOST_RANKS)


def torchrun(
    arguments: list[str],
    *,
    nproc: int,
    variables: dict[str, str] | None = None,
    on_stop: Callable[[int], None] | None = None,
    max_restarts: int = 0,
) -> LaunchOutcome:
    """Run ``lengthwise ARGUMENTS`` as ``nproc`` ranks of one machine, again up to ``max_restarts`` times if one dies.

    One thread a rank unless OMP_NUM_THREADS says otherwise. Ranks listen on the loopback interface alone. The first
    SIGTERM, SIGHUP or SIGINT calls ``on_stop`` with its number, by which the ranks are to end by themselves, however
    long their step takes; a second SIGINT kills them. Without ``on_stop`` all ranks are killed at the first.

    Raises:
        InputError: torch is not installed, or there are more ranks than this machine may run.
        Preempted: SIGTERM or SIGHUP came, and there is no ``on_stop``.
        KeyboardInterrupt: SIGINT came; the ranks have ended.
    """
    rank_and_size()
    check_nproc(nproc)
    check_torch()
    from torch.distributed import run as torch_run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1" if nproc > 1 else str(os.cpu_count() or 1))
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks say what went wrong
    with TemporaryDirectory(prefix="lengthwise-", ignore_cleanup_errors=True) as folder:
        os.environ.update({LAUNCHER_VARIABLE: str(os.getpid()), LAUNCHER_FOLDER_VARIABLE: folder, **(variables or {})})
        command = ["--rdzv-backend", meet_on_loopback(), "--rdzv-id", uuid4().hex, "--log-dir", folder]
        command += ["--signals-to-handle", NO_SIGNAL, "--max-restarts", str(max_restarts)]
        command += ["--nnodes", "1", "--nproc-per-node", str(nproc), "-m", "lengthwise", *arguments]
        with _only_installed_modules(), SignalsOfRanks(on_stop) as signals:
            try:
                torch_run.run(torch_run.parse_args(command))
                ended = LaunchOutcome(well=True, was_asked=bool(signals.received))
            except ChildFailedError as failed:
                ended = LaunchOutcome(
                    well=False,
                    killed=killed_first(failed.failures),
                    failed=failed_first(failed.failures),
                    was_asked=bool(signals.received),
                    is_preempted=are_preempted(failure.exitcode for failure in failed.failures.values()),
                )
            except KeyboardInterrupt:  # raised below torchrun when the ranks were killed, so that it starts none again
                ended = LaunchOutcome(well=False, was_asked=True)
    signals.raise_again(has_on_stop=on_stop is not None)
    return ended


@contextmanager
def _only_installed_modules() -> Iterator[None]:
    """Within, python processes that start import nothing from the current folder in place of an installed module."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        os.environ.update({} if before is None else {SAFE_PATH: before})


def killed_first(failures: "Mapping[int, ProcessFailure]") -> str:
    """The rank that a signal killed first, in words; ranks that torchrun ended because of another do not count."""
    by_signal = [
        failure for failure in failures.values() if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
    ]
    if not by_signal:
        return ""
    first = min(by_signal, key=lambda failure: failure.timestamp)
    begun = min(failure.timestamp for failure in failures.values())
    if first.timestamp - begun > STOPPED_AFTER_S / 2:
        return ""  # by torchrun; those that lose a rank end within seconds
    hint = ", as the system does where memory runs out" if -first.exitcode == signal.SIGKILL else ""
    return f"rank {first.local_rank} was killed by {first.signal_name()}{hint}"


def are_preempted(exit_codes: Iterable[int]) -> bool:
    """Whether ranks ended as one does that was asked to stop, or by the signal that torchrun ends the others with."""
    codes = set(exit_codes)
    return Preempted.exit_code in codes and codes <= {Preempted.exit_code, -signal.SIGTERM}


def failed_first(failures: "Mapping[int, ProcessFailure]") -> str:
    """The rank that ended first, in words; torchrun ended the others because of it."""
    if not failures:
        return ""
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    how = f"exit code {first.exitcode}" if first.exitcode >= 0 else first.signal_name()
    return f"rank {first.local_rank} ended with {how}, and said nothing"


def split_arguments(config: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides; one that is repeated is told of.

    Raises:
        InputError: the first argument is neither a file nor an override, and might have been meant as either.
    """
    is_file = config is not None and ("=" not in str(config) or _is_there(config))
    if config is not None and not is_file:
        _check_override(config)
    changes = [*([] if config is None or is_file else [str(config)]), *(overrides or [])]
    last = {change.partition("=")[0]: change for change in changes}
    for key, number in Counter(change.partition("=")[0] for change in changes).items():
        if number > 1 and is_first():
            stderr().print(f"{key} is given {number:,} times; the last counts, {last[key]}", soft_wrap=True)
    return config if is_file else None, changes


def _is_there(path: Path) -> bool:
    """Whether ``path`` is a file; False where no path can be so long or have such characters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _check_override(given: Path) -> None:
    """Raise ``InputError`` if an argument with ``=`` in it looks like a file, names none, and no setting either."""
    from lengthwise.config.run_config import type_of

    key = str(given).partition("=")[0]
    looks_like_file = "/" in key or given.suffix in (".yaml", ".yml", ".jsonl")
    if looks_like_file and type_of(key) is None:
        raise InputError(
            f"{shown(given)} is no file that is there, and as an override {brief(key)} it names no "
            "setting; check the path, or give section.key=value"
        )
