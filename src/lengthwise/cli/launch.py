"""Starting ranks: torchrun on this machine, in this process, so that its end is a return value and not a traceback."""

import logging
import os
import signal
from pathlib import Path

from lengthwise.core.errors import InputError

RUN_FOLDER_VARIABLE = "LENGTHWISE_RUN_FOLDER"
"""How `lengthwise train` tells the ranks it starts where to write; it reads there how they ended."""


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun(arguments: list[str], *, nproc: int, variables: dict[str, str] | None = None) -> bool:
    """Run ``lengthwise ARGUMENTS`` as ``nproc`` ranks of one machine; returns whether all ended well.

    One thread a rank unless OMP_NUM_THREADS says otherwise. SIGTERM and SIGINT are passed on to the ranks, which have
    30 seconds (torchrun's limit) to save themselves.

    Raises:
        InputError: torch is not installed.
    """
    try:
        from torch.distributed import run as torch_run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError:
        raise InputError("this verb needs torch: pip install 'lengthwise[train]'") from None
    os.environ.setdefault("OMP_NUM_THREADS", "1" if nproc > 1 else str(os.cpu_count() or 1))
    os.environ.update(variables or {})
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    command = ["--standalone", "--nproc-per-node", str(nproc), "-m", "lengthwise", *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        torch_run.run(torch_run.parse_args(command))
    except ChildFailedError:
        return False
    except SignalException as stopped:
        if stopped.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        return False
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def split_arguments(config: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides."""
    if config is not None and "=" in str(config):
        return None, [str(config), *(overrides or [])]
    return config, overrides or []
