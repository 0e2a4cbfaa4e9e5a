"""Check that all ranks are at the same operation of a run before any of them communicates for it.

A user's loop may take ranks apart: ``if rank == 0: run.save(...)``, a ``break`` or a caught error on one rank. Ranks
that go on to different operations would wait for each other for ever, or mix up what they send. So each operation
begins with one all-gather of rows of one size, whichever it is: where the operations differ, every rank knows at once.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch

from lengthwise.core.errors import CheckError, InfeasibleError, InputError, LengthwiseError
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.objects import gather_json
from lengthwise.runtime.comm.world import DistContext

Result = TypeVar("Result")
NUM_VALUES = 17
"""Integers that a rank sends beside the operation, the step and the length of its note."""


class RankOperation(IntEnum):
    """The operations of a run in which all ranks take part."""

    BEGIN = 1
    UPDATE = 2
    LEAVE = 3
    SKIP = 4
    SAVE = 5
    RESUME = 6
    ITEMS = 7
    SCORE = 8
    COUPLE = 9
    CLOSE = 10
    COMPARE = 11
    CALLBACKS = 12
    GATHER = 13
    WRITE = 14
    MODE = 15

    @property
    def call(self) -> str:
        """The call that a user's loop makes, such as ``step.update()``, for messages."""
        calls = {RankOperation.BEGIN: "begin of a step", RankOperation.LEAVE: "end of a step that was left"}
        method = {
            RankOperation.UPDATE: "step.update()",
            RankOperation.SKIP: "step.skip()",
            RankOperation.SAVE: "run.save()",
            RankOperation.ITEMS: "run.step(items)",
            RankOperation.SCORE: "run.score(items)",
            RankOperation.COUPLE: "end of the forwards of a step",
            RankOperation.CLOSE: "run.close()",
            RankOperation.COMPARE: "run.compare()",
            RankOperation.MODE: "optimizer.eval() or train()",
            RankOperation.CALLBACKS: "end of the callbacks",
            RankOperation.GATHER: "gathering of values",
            RankOperation.WRITE: "save of the model",
        }
        return (calls | method).get(self, "run.resume()")

    def described(self, step: int) -> str:
        """Describe the operation at a step, in the past tense, for messages."""
        return {
            RankOperation.BEGIN: f"began step {step}",
            RankOperation.UPDATE: f"called step.update() of step {step}",
            RankOperation.LEAVE: f"left step {step} without step.update()",
            RankOperation.SKIP: f"called step.skip() of step {step}",
            RankOperation.SAVE: f"called run.save() before step {step}",
            RankOperation.RESUME: "called run.resume()",
            RankOperation.ITEMS: f"called run.step(items) of step {step}",
            RankOperation.SCORE: f"called run.score(items) before step {step}",
            RankOperation.COUPLE: f"computed the forwards of step {step}",
            RankOperation.CLOSE: f"called run.close() in step {step}",
            RankOperation.COMPARE: f"called run.compare() before step {step}",
            RankOperation.CALLBACKS: f"ended its callbacks before step {step}",
            RankOperation.GATHER: f"gathered values before step {step}",
            RankOperation.WRITE: f"saved the model before step {step}",
            RankOperation.MODE: f"called eval() or train() of the optimizer before step {step}",
        }[self]


@dataclass(frozen=True, kw_only=True)
class RankReports:
    """The operation, step, values and note that every rank reported, by rank."""

    operations: tuple[RankOperation, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    """Empty strings where a rank has nothing to say."""

    def column(self, number: int) -> tuple[int, ...]:
        """The values numbered ``number``, by rank."""
        return tuple(row[number] for row in self.values)

    def check_same(self, *also: RankOperation) -> None:
        """Raise ``CheckError`` unless all ranks are at one operation, or at one of ``also``, of one step."""
        if len(set(zip(self.operations, self.steps))) == 1:
            return
        if set(self.operations) <= set(also) and len(set(self.steps)) == 1:
            return
        done = [f"{ranks_text(ranks)} {place}" for place, ranks in self._ranks_by_place().items()]
        raise CheckError(
            f"{', '.join(done)}: all ranks have to make the same calls of a run in the same order; take them out of "
            "`if rank == ...`, and let no rank leave the loop alone"
        )

    def _ranks_by_place(self) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for rank, (operation, step) in enumerate(zip(self.operations, self.steps)):
            places.setdefault(operation.described(step), []).append(rank)
        return places

    def departure_text(self) -> str:
        """Which rank closed the run, where and why."""
        rank = self.operations.index(RankOperation.CLOSE)
        return (
            f"step {self.steps[rank]}: rank {rank} closed the run {self.notes[rank]}, and no other rank can go on "
            "without it; mend what ended it there, close the run on every rank, and prepare it again"
        )

    def notes_text(self) -> str:
        """The notes with the ranks that have them; equal ones once."""
        ranks: dict[str, list[int]] = {}
        for rank, note in enumerate(self.notes):
            if note:
                ranks.setdefault(note, []).append(rank)
        if len(self.notes) == 1:
            return next(iter(ranks))
        return "; ".join(f"{ranks_text(those)}: {note}" for note, those in ranks.items())


def sync_ranks(
    world: DistContext, operation: RankOperation, step: int, *, values: Sequence[int] = (), note: str = ""
) -> RankReports:
    """Report this rank's operation to all others and get theirs: one all-gather, and a second one if any has a note.

    Raises:
        CommunicationError: some rank does not come within the time limit, or is gone.
        CheckError: another rank has closed the run, which this one goes on with.
    """
    if world.departures:
        raise CheckError(world.departures[0])
    assert len(values) <= NUM_VALUES, "rows of all operations have one size"
    ACTIVITY.begin(operation.call, step=step)
    said = [int(operation), step, len(note), *values, *[0] * (NUM_VALUES - len(values))]
    rows = gather_rows(torch.tensor(said, dtype=torch.int64, device=world.device)).tolist()
    notes = gather_json(world, note) if any(row[2] for row in rows) else [""] * len(rows)
    reports = RankReports(
        operations=tuple(RankOperation(row[0]) for row in rows),
        steps=tuple(row[1] for row in rows),
        values=tuple(tuple(row[3:]) for row in rows),
        notes=tuple(notes),
    )
    if operation is not RankOperation.CLOSE and RankOperation.CLOSE in reports.operations:
        world.departures.append(reports.departure_text())
        raise CheckError(world.departures[0])
    return reports


def bits_of(value: float) -> int:
    """The int64 with the bits of a float64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(bits: int) -> float:
    """The float64 with the bits of an int64."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def all_succeed(world: DistContext, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns; where it fails on any rank, raise on all of them. ``work`` may not communicate.

    Raises:
        InputError: it failed on another rank; where it failed here, its own error.
        InfeasibleError: it did not fit on another rank.
    """
    result, own_error = None, None
    try:
        result = work()
    except LengthwiseError as error:
        own_error = error
    errors = gather_json(world, None if own_error is None else (own_error.marked, own_error.exit_code))
    if own_error is not None:
        raise own_error
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if failed:
        message, exit_code = errors[failed[0]]
        kind = InfeasibleError if exit_code == InfeasibleError.exit_code else InputError
        raise kind(f"{ranks_text(failed)} cannot go on: {message}")
    return result  # type: ignore[return-value]
