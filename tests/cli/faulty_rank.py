"""A rank of `lengthwise train` that torchrun starts: with arguments of its own, and a fault at some step.

faulty_rank.py COMMON... [--rank-1 ARGUMENTS...]; FAULT=rank:step:what in the environment
"""

import os
import signal
import sys
import time
from typing import Any

from lengthwise.cli.main import main
from lengthwise.core.errors import CheckError
from lengthwise.runtime.train import training_engine

RANK = int(os.environ["RANK"])
SLOW_S = 60.0


def fail(what: str) -> None:
    """Do what a broken rank does; does not return in time."""
    if what == "loops":
        while True:
            pass
    if what == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises":
        raise ZeroDivisionError("something is wrong")
    if what == "refuses":
        raise CheckError("the data is not what it was")
    if what == "exits":
        sys.exit(0)
    if what == "exits at once":
        os._exit(0)
    time.sleep(SLOW_S)


def inject(rank: str, step: str, what: str) -> None:
    """Have this rank fail at ``step``; -1: before it meets the others."""
    if int(rank) != RANK:
        return
    if int(step) < 0:
        fail(what)
    run_step = training_engine.run_step

    def run_or_fail(plan: Any, *arguments: Any, **options: Any) -> Any:
        if plan.step == int(step):
            fail(what)
        return run_step(plan, *arguments, **options)

    training_engine.run_step = run_or_fail


if __name__ == "__main__":
    own = sys.argv.index("--rank-1") if "--rank-1" in sys.argv else len(sys.argv)
    sys.argv = ["lengthwise", "train", *sys.argv[1:own], *(sys.argv[own + 1 :] if RANK == 1 else [])]
    if "FAULT" in os.environ:
        inject(*os.environ["FAULT"].split(":"))
    main()
