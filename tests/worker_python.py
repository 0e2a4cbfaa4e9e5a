"""What xdist starts in place of ``python -u -c CODE`` for a worker: a process forked from one that has imported torch.

Each of several workers would spend six seconds of processor time on the same imports.
"""

import multiprocessing
import os
import sys
from typing import Any

from tests.warm import context


def _be(code: str, environment: dict[str, str], starter: int) -> None:
    """Be the interpreter that the process ``starter`` is not: with its streams and variables, until ``code`` ends."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        opened = os.open(f"/proc/{starter}/fd/{descriptor}", flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    multiprocessing.set_start_method(None, force=True)  # a new interpreter would have the default of its platform
    os.environ.clear()
    os.environ.update(environment)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code, namespace)


if __name__ == "__main__":
    worker = context().Process(target=_be, args=(sys.argv[-1], dict(os.environ), os.getpid()))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
