"""Which stream each operation of a step is on, what it waits for, and whether what it needs is over by then.

Work of one stream runs in the order in which it was issued, work of two in any order that events do not forbid. Every
stream has a vector clock: how much of each stream is over for certain when its next operation begins. An operation that
reads what another stream wrote, or writes what one reads or wrote, without having waited for it, is a race: on a GPU it
may find other numbers. The host is a stream as well: it issues the work of all others, and waits for some.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

HOST = "host"
KERNELS = "kernels"


@dataclass(frozen=True)
class StreamPoint:
    """A point of a stream, as events hold it: what is over once the stream comes to it."""

    stream: Hashable
    clock: Mapping[Hashable, int]
    """By stream, how many of its operations."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Bytes of one storage that an operation reads or writes."""

    storage: int
    start: int
    end: int
    is_write: bool


@dataclass(frozen=True, kw_only=True)
class SideOperation:
    """An operation on another stream than that of kernels, or one of kernels that waits for another stream."""

    operation: str
    """What the rank was doing, such as ``forward 0``."""
    stream: str
    kind: str
    num_bytes: int
    waits_for: tuple[str, ...]
    """The streams that this one has waited for since its last operation."""


@dataclass(eq=False)
class StreamOrder:
    """The order of one rank's operations by stream, and the races in it."""

    place: Callable[[], str] = lambda: ""
    """The line of code that is responsible for what is issued."""
    operations: list[SideOperation] = field(default_factory=list)
    races: Counter[str] = field(default_factory=Counter)
    _clocks: dict[Hashable, dict[Hashable, int]] = field(default_factory=dict)
    _names: dict[Hashable, str] = field(default_factory=dict)
    _uses: dict[int, dict[Hashable, dict[tuple[int, int, bool], int]]] = field(default_factory=dict)
    """By storage, stream, and first and last byte and whether it is written: when last."""
    _waits: dict[Hashable, list[str]] = field(default_factory=dict)

    def name(self, stream: Hashable) -> str:
        """The name of a stream: those of copies and exchanges are numbered as they come."""
        if stream not in self._names:
            kind = stream[0] if isinstance(stream, tuple) else "stream"
            number = sum(name.startswith(kind) for name in self._names.values()) + 1
            self._names[stream] = stream if isinstance(stream, str) else f"{kind} #{number}"
        return self._names[stream]

    def point(self, stream: Hashable) -> StreamPoint:
        """The point after all that was issued to ``stream``."""
        return StreamPoint(stream, dict(self._clocks.get(stream, {})))

    def wait(self, stream: Hashable, point: StreamPoint) -> None:
        """Let the next operation of ``stream`` begin when another stream, or the host, has come to ``point``."""
        clock, is_news = self._clocks.setdefault(stream, {}), False
        for other, time in point.clock.items():
            if time > clock.get(other, 0):
                clock[other], is_news = time, True
        if is_news and HOST not in (stream, point.stream) and point.stream != stream:
            self._waits.setdefault(stream, []).append(self.name(point.stream))

    def wait_for_all(self, stream: Hashable) -> None:
        """Let the next operation of ``stream`` begin when all that was issued is over."""
        for other in list(self._clocks):
            self.wait(stream, self.point(other))

    def issue(
        self, stream: Hashable, kind: str, accesses: Iterable[Access], *, operation: str = "", num_bytes: int = 0
    ) -> None:
        """Record an operation of ``stream`` and whether what it needs is over."""
        clock = self._clocks.setdefault(stream, {})
        if stream != HOST:
            for other, time in self._clocks.get(HOST, {}).items():
                clock[other] = max(clock.get(other, 0), time)
        clock[stream] = now = clock.get(stream, 0) + 1
        accesses = list(accesses)
        for access in accesses:
            self._check(stream, kind, access, clock, operation)
        for access in accesses:
            uses = self._uses.setdefault(access.storage, {}).setdefault(stream, {})
            uses[access.start, access.end, access.is_write] = now
        waits = tuple(dict.fromkeys(self._waits.pop(stream, ())))
        if stream != HOST and (stream != KERNELS or waits):
            self.operations.append(
                SideOperation(
                    operation=operation, stream=self.name(stream), kind=kind, num_bytes=num_bytes, waits_for=waits
                )
            )

    def free(self, storage: int) -> None:
        """Forget a storage that is gone."""
        self._uses.pop(storage, None)

    def restart(self) -> None:
        """Forget what was recorded; what is over stays so."""
        self.operations, self.races = [], Counter()

    def _check(self, stream: Hashable, kind: str, access: Access, clock: dict[Hashable, int], operation: str) -> None:
        for other, uses in self._uses.get(access.storage, {}).items():
            if other == stream:
                continue
            is_over = clock.get(other, 0)
            for (start, end, is_write), time in uses.items():
                if time > is_over and start < access.end and access.start < end and (is_write or access.is_write):
                    verbs = [("reads", "writes")[access.is_write], ("reads", "writes")[is_write]]
                    self.races[
                        f"{operation or 'between passes'}: {kind} on {self.name(stream)} {verbs[0]} what "
                        f"{self.name(other)} {verbs[1]}, without waiting for it ({self.place()})"
                    ] += 1
                    break

    @property
    def document(self) -> dict[str, Any]:
        """Operations by stream with what they wait for, and races, as plain values."""
        streams: dict[str, Counter[str]] = {}
        waits: dict[str, Counter[str]] = {}
        for done in self.operations:
            streams.setdefault(done.stream, Counter())[done.kind] += 1
            waits.setdefault(done.stream, Counter()).update(done.waits_for)
        return {
            "streams": [
                {"stream": name, "operations": dict(kinds), "waits_for": dict(waits[name])}
                for name, kinds in streams.items()
            ],
            "stream_order": [vars(done) for done in self.operations],
            "races": [{"race": text, "count": number} for text, number in self.races.items()],
        }
