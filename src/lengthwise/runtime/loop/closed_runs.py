"""Tell the other ranks that this one closes a run before its end, where they would wait for it.

A loop that an error ends, which somebody catches, leaves pushes of gradients and exchanges without their counterpart
on the other ranks: they would wait, and the next run of this process would get what belongs to the last one.
"""

import logging
import sys
from typing import Protocol

from lengthwise.core.errors import CheckError, CommunicationError
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankOperation, sync_ranks
from lengthwise.runtime.loop.step import Step

_log = logging.getLogger("lengthwise")


class ClosedRun(Protocol):
    """What is asked of a run that is closed."""

    world: DistContext
    next_step: int
    num_steps: int
    meets_after_steps: bool


def close_together(run: ClosedRun, step: Step | None) -> bool | None:
    """Take part in the rest of the exchanges of ``step`` and say why this rank leaves; None: nobody waits for it.

    Returns whether all ranks close the run here, so that they may go on to close it by collectives.
    """
    world, is_awaited = run.world, run.meets_after_steps or run.next_step < run.num_steps
    error = sys.exc_info()[1]
    is_under_way = step is not None and not step.is_over
    if world.departures or isinstance(error, CommunicationError):
        return False
    if error is not None and not isinstance(error, Exception):
        return None  # the program is ending, as by Ctrl-C in the midst of an exchange
    if not is_under_way and (error is None or not is_awaited):
        return None
    place = "between two steps"
    try:
        if step is not None and is_under_way:
            place = step.place()
            step.finish_exchanges()
            step.is_over = True
        reason = "" if error is None else f" ({type(error).__name__}: {error})"
        reports = sync_ranks(world, RankOperation.CLOSE, run.next_step, note=place + reason)
    except (CommunicationError, CheckError) as refused:  # the latter: it cannot stand in for the rest of its step
        _log.warning("run.close() cannot tell the other ranks of it: %s", refused)
        return False
    return set(reports.operations) == {RankOperation.CLOSE}
