"""Starting ranks: torchrun on this machine, in this process, so that its end is a return value and not a traceback."""

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from lengthwise.core.errors import InputError

RUN_FOLDER_VARIABLE = "LENGTHWISE_RUN_FOLDER"
"""How `lengthwise train` tells the ranks it starts where to write; it reads there how they ended."""


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun(
    arguments: list[str],
    *,
    nproc: int,
    variables: dict[str, str] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> bool:
    """Run ``lengthwise ARGUMENTS`` as ``nproc`` ranks of one machine; returns whether all ended well.

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
    os.environ.update(variables or {})
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    command = ["--standalone", "--nproc-per-node", str(nproc), "-m", "lengthwise", *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    received: list[int] = []
    if on_stop is not None and "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        command = ["--signals-to-handle", "SIGHUP,SIGQUIT", *command]
        for number in handlers:
            signal.signal(number, partial(_note_stop, received, on_stop))
    try:
        torch_run.run(torch_run.parse_args(command))
        ended_well = True
    except ChildFailedError:
        ended_well = False
    except SignalException as stopped:
        received.append(stopped.sigval)
        ended_well = False
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return ended_well


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
