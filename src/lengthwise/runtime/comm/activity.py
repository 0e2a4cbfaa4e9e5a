"""The current activity of a rank, for errors of collectives that name the missing ranks and what they are doing.

One activity per process, as torch has one default process group per process. Noting one takes a few assignments.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from lengthwise.core.errors import CommunicationError, LengthwiseError
from lengthwise.runtime.comm.differences import ranks_text

_TIMEOUT_WORDS = ("timed out", "timeout")
_LOST_WORDS = ("gloo", "connection", "closed by peer", "reset by peer", "broken pipe", "pair closure", "nccl", "socket")


class PeerProbe(Protocol):
    """Asks the other ranks why a collective failed; :class:`lengthwise.runtime.comm.liveness.Liveness` is one."""

    def explain(self, operation: str, error: BaseException) -> CommunicationError:
        """The error to raise where ``operation`` failed with ``error``."""
        ...

    def say_failed(self, reason: str) -> None:
        """Say to ranks that ask why this one ends."""
        ...

    def wait_until_heard(self) -> None:
        """Wait a while for the others to hear it, if they could not once this process has ended."""
        ...

    def close(self) -> None:
        """Stop answering other ranks."""
        ...


@dataclass
class Activity:
    """The step, the operation within it, and since when; written by one thread, read by any."""

    step: int | None = None
    name: str = "start-up"
    since_s: float = field(default_factory=time.monotonic)
    waits_for: str = ""
    """The collective that the thread is in; empty while it computes."""
    peers: PeerProbe | None = None
    """Whom to ask why a collective failed; None where there is nobody."""

    def begin(self, name: str, *, step: int | None = None) -> None:
        """Note that something else begins; ``step`` stays as it is where none is given."""
        self.name, self.since_s = name, time.monotonic()
        if step is not None:
            self.step = step

    @property
    def place(self) -> str:
        """Step and operation of the thread, such as ``step 5, forward 0``."""
        return ", ".join(part for part in ("" if self.step is None else f"step {self.step}", self.name) if part)

    def to_json(self) -> dict[str, Any]:
        """Plain values that answer other ranks."""
        return {"place": self.place, "since_s": time.monotonic() - self.since_s, "waits_for": self.waits_for}


ACTIVITY = Activity()
"""That of this process' main thread."""


class CollectiveWait:
    """Context of a wait for other ranks: turns transport errors into ones that name the operation and missing ranks.

    Raises:
        CommunicationError: instead of what Gloo or NCCL raise where a rank is too late or gone.
    """

    __slots__ = ("_activity", "_operation", "_ranks")

    def __init__(self, operation: str, ranks: Sequence[int] = (), *, activity: Activity = ACTIVITY) -> None:
        """``ranks``: those of the group, if it is not the world."""
        self._operation, self._ranks, self._activity = operation, ranks, activity

    def __enter__(self) -> None:
        self._activity.waits_for = self._operation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lost(error):
            among = f" of {ranks_text(self._ranks)}" if self._ranks else ""
            raise explained(self._operation + among, error, self._activity) from error
        self._activity.waits_for = ""


def explained(operation: str, error: BaseException, activity: Activity = ACTIVITY) -> CommunicationError:
    """The error to raise where ``operation`` failed with one for which :func:`is_lost` is true."""
    if ACTIVITY.peers is not None:
        return ACTIVITY.peers.explain(operation, error)
    reason = "was not over within its time limit" if is_timeout(error) else f"failed: {first_line(error)}"
    return CommunicationError(f"{activity.place}: {operation} {reason}")


@contextmanager
def told_to_peers() -> Iterator[None]:
    """Say to ranks that wait for this one why it ends, if it does with an error of its own."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        if is_lost(error):
            raise explained("a collective of torch", error) from error
        if ACTIVITY.peers is not None:
            ACTIVITY.peers.say_failed(error.marked if isinstance(error, LengthwiseError) else repr(error))
        raise


def is_lost(error: BaseException) -> bool:
    """Whether this is what torch raises where a rank is too late or gone."""
    if isinstance(error, dist.DistError):
        return True
    words = str(error).lower()
    return type(error) is RuntimeError and any(word in words for word in (*_TIMEOUT_WORDS, *_LOST_WORDS))


def is_timeout(error: BaseException) -> bool:
    """Whether a time limit ran out, rather than that a rank is gone."""
    return any(word in str(error).lower() for word in _TIMEOUT_WORDS)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
