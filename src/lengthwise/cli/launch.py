"""Starting ranks: torchrun on this machine, in this process, so that its end is a return value and not a traceback."""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lengthwise.core.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RUN_FOLDER_VARIABLE = "LENGTHWISE_RUN_FOLDER"
"""How `lengthwise train` tells the ranks it starts where to write; it reads there how they ended."""

LAUNCHER_VARIABLE = "LENGTHWISE_LAUNCHER"
"""How ranks know the process that started them, which may be gone before they look."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended; true if all of them well."""

    well: bool
    killed: str = ""
    """Which rank a signal killed, if one did."""

    def __bool__(self) -> bool:
        return self.well


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun(
    arguments: list[str],
    *,
    nproc: int,
    variables: dict[str, str] | None = None,
    on_stop: Callable[[], None] | None = None,
    max_restarts: int = 0,
) -> Ended:
    """Run ``lengthwise ARGUMENTS`` as ``nproc`` ranks of one machine, again up to ``max_restarts`` times if one dies.

    One thread a rank unless OMP_NUM_THREADS says otherwise. The first SIGTERM or SIGINT calls ``on_stop``, by which the
    ranks are to end by themselves, however long their step takes; a second one ends them. Without ``on_stop``, and with
    a torch that cannot leave these signals alone, torchrun passes them on and gives the ranks 30 seconds.

    Raises:
        InputError: torch is not installed.
        KeyboardInterrupt: SIGINT came; the ranks have ended.
    """
    try:
        from torch.distributed import run as torch_run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig
    except ImportError:
        raise InputError("this verb needs torch: pip install 'lengthwise[train]'") from None
    os.environ.setdefault("OMP_NUM_THREADS", "1" if nproc > 1 else str(os.cpu_count() or 1))
    os.environ.update({LAUNCHER_VARIABLE: str(os.getpid()), **(variables or {})})
    if max_restarts:  # else ranks started again meet at the addresses of dead ones
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    command = ["--standalone", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
    command += ["-m", "lengthwise", *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    received: list[int] = []
    if on_stop is not None and "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        command = ["--signals-to-handle", "SIGHUP,SIGQUIT", *command]
        for number in handlers:
            signal.signal(number, partial(_note_stop, received, on_stop))
    try:
        torch_run.run(torch_run.parse_args(command))
        ended = Ended(well=True)
    except ChildFailedError as failed:
        ended = Ended(well=False, killed=_killed(failed.failures))
    except SignalException as stopped:
        received.append(stopped.sigval)
        ended = Ended(well=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return ended


def _killed(failures: "Mapping[int, ProcessFailure]") -> str:
    """The rank that a signal killed first; ranks that torchrun ended because of it do not count."""
    by_signal = [
        failure for failure in failures.values() if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
    ]
    if not by_signal:
        return ""
    first = min(by_signal, key=lambda failure: failure.timestamp)
    return f"rank {first.local_rank} was killed by {first.signal_name()}"


def _note_stop(received: list[int], on_stop: Callable[[], None], number: int, frame: FrameType | None) -> None:
    received.append(number)
    if len(received) > 1:
        raise KeyboardInterrupt
    on_stop()


def split_arguments(config: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides."""
    if config is not None and "=" in str(config):
        return None, [str(config), *(overrides or [])]
    return config, overrides or []
