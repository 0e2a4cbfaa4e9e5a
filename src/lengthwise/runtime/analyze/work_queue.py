"""Work queue over ranks: a rank that is free takes the next block, and all know how far they are."""

import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import uuid4

import torch.distributed as dist

from lengthwise.core.errors import CommunicationError, LengthwiseError
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.objects import broadcast_json, gather_json
from lengthwise.runtime.comm.world import DistContext

T = TypeVar("T")

KEPT = "finished blocks are kept: run the same command again to go on"
_STOP = 1 << 40
"""Beyond every number of a block."""
_LOOK_EVERY_S = 0.1


class WorkQueue:
    """Numbers from 0 dealt to the ranks of a world, each to one of them. Making one is collective."""

    def __init__(self, world: DistContext) -> None:
        name = from_first(world, lambda: uuid4().hex)
        self._size = world.size
        self._store = dist.PrefixStore(f"analyze/{name}", dist.distributed_c10d._get_default_store())
        self._timeout_s = world.timeout_s
        self._processes = [tuple(place) for place in gather_json(world, [socket.gethostname(), os.getpid()])]

    def take(self) -> int:
        """The next number that nobody has taken; a very large one after :meth:`stop`."""
        return self._store.add("taken", 1) - 1

    def stop(self) -> None:
        """Let nobody take a number any more."""
        self._store.add("taken", _STOP)

    def add(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Sequences and tokens that all ranks together have scored, with these."""
        return self._store.add("sequences", sequences), self._store.add("tokens", tokens)

    def end(self) -> None:
        """Tell that this rank takes no more."""
        self._store.add("ended", 1)

    def wait(self, look: Callable[[], None]) -> None:
        """Until all ranks have ended, as long as they get on; ``look`` is called meanwhile.

        Raises:
            CommunicationError: a rank of this machine is gone, or nothing was scored for ``world.timeout_s``.
        """
        progress, since_s = (0, 0), time.monotonic()
        while (ended := self._store.add("ended", 0)) < self._size:
            look()
            if progress != (progress := (ended, self._store.add("sequences", 0))):
                since_s = time.monotonic()
            self._check_alive(time.monotonic() - since_s)
            time.sleep(_LOOK_EVERY_S)
        look()

    def _check_alive(self, waited_s: float) -> None:
        gone = [rank for rank, (host, process) in enumerate(self._processes) if self._is_gone(host, process)]
        if gone and self._store.add("ended", 0) < self._size:
            raise CommunicationError(f"{ranks_text(gone)} left before all sequences were scored; {KEPT}")
        if waited_s > self._timeout_s:
            raise CommunicationError(f"no rank has scored a sequence for {self._timeout_s:g} s; {KEPT}")

    @staticmethod
    def _is_gone(host: str, process: int) -> bool:
        if host != socket.gethostname():
            return False  # nobody here can tell
        try:
            os.kill(process, 0)  # no signal: only looks
        except ProcessLookupError:
            return True
        return False


def from_first(world: DistContext, step: Callable[[], T]) -> T:
    """Run ``step`` on the first rank alone and return its result on all. Every rank calls this.

    Raises:
        LengthwiseError: on all ranks, what it raised.
    """
    value, failure = broadcast_json(world, _try(step) if world.is_first else None)
    _raise(failure)
    return value


def on_all(world: DistContext, step: Callable[[], T]) -> T:
    """Run ``step`` on all ranks, and fail on all if it fails on one. Every rank calls this.

    Raises:
        LengthwiseError: on all ranks, what the first one that failed raised.
    """
    value, failure = _try(step)
    failures = gather_json(world, failure)
    _raise(next((failed for failed in failures if failed is not None), None))
    return value  # type: ignore[return-value]


def _try(step: Callable[[], T]) -> tuple[T | None, tuple[str, int] | None]:
    try:
        return step(), None
    except CommunicationError:
        raise  # ranks are gone, and nothing can be shared with the others
    except LengthwiseError as error:
        return None, (str(error), error.exit_code)
    except OSError as error:
        hint = KEPT
        return None, (f"the analysis failed: {error}; {hint}", LengthwiseError.exit_code)


def _raise(failure: tuple[str, int] | None) -> None:
    if failure is not None:
        error = LengthwiseError(failure[0])
        error.exit_code = failure[1]
        raise error
