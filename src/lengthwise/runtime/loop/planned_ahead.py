"""Batches that ranks bring, read and planned a step ahead: while one step computes, a thread plans the next.

Items are gathered between steps, by all ranks in one order, so that the thread only plans: arithmetic on lengths. Under
costs that have changed since, as they may after a step, the batch is planned again, on every rank.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cut_plan import CutPlan, TreeOf
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.runtime.loop.brought_items import BroughtBatch

_NO_PLAN: tuple[object, Future[CutPlan] | None] = (None, None)
Gather = Callable[[Iterable[Any] | None, int], BroughtBatch | None]
"""Makes one batch of the items of all ranks for a step; None: no rank has any more."""


class PlannedAhead:
    """The batch of the step after the one that is computed, and its plan."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._source: Iterator[Any] | None = None
        """What the batch was read from."""
        self._next: BroughtBatch | LengthwiseError | None = None
        """The batch, or why there is none."""
        self._plan = self._due = _NO_PLAN
        """Planner and plan of the batch that was read ahead, and of the one that was taken."""
        self.is_reading = False
        """Whether a batch is being read ahead: the step before it has begun."""

    def take(self, source: Iterator[Any], gather: Gather, step: int) -> BroughtBatch | None:
        """The next batch of ``source``: the one that was read ahead, if it was read from there.

        Raises:
            LengthwiseError: it could not be read or gathered.
        """
        batch, is_ahead = self._next, self._source is source
        self._due, self._plan, self._next, self._source = self._plan, _NO_PLAN, None, None
        if batch is None or not is_ahead:
            self._due = _NO_PLAN
            return gather(_next_batch(source), step)
        if isinstance(batch, LengthwiseError):
            raise batch
        if batch.batch.step == step:
            return batch
        self._due = _NO_PLAN  # other steps came between
        return replace(batch, batch=replace(batch.batch, step=step))

    def read(self, source: Iterator[Any], gather: Gather, step: int) -> None:
        """Read the batch after the one that was taken, once; what is wrong with it is told when it is taken."""
        if self._next is not None and self._source is source:
            return
        self.forget()
        self._source = source
        self.is_reading = True
        try:
            self._next = gather(_next_batch(source), step)
        except LengthwiseError as error:
            self._next = error
        finally:
            self.is_reading = False

    def check_not_reading(self, call: str) -> None:
        """Raise ``CheckError`` if what makes a batch that is read ahead makes ``call``, which belongs between steps."""
        if self.is_reading:
            raise CheckError(
                f"{call} by what makes the batches: with plan_ahead=True a batch is read when the step before it has "
                "begun; make the call in the loop after step.update(), or leave plan_ahead out"
            )

    def start(self, planner: Any, plan: Callable[[Any, GlobalBatch, TreeOf], CutPlan]) -> None:
        """Let the thread plan the batch that was read, by ``plan`` with ``planner``, unless it has."""
        if isinstance(self._next, BroughtBatch) and self._plan[1] is None:
            self._thread = self._thread or ThreadPoolExecutor(1, "lengthwise-plan")
            trees = self._next.trees
            self._plan = planner, self._thread.submit(plan, planner, self._next.batch, trees.__getitem__)

    def plan_of_taken(self, planner: object) -> CutPlan | None:
        """The plan of the batch that was taken, once; None: there is none, or not by ``planner``.

        Raises:
            LengthwiseError: it could not be planned.
        """
        (by, future), self._due = self._due, _NO_PLAN
        return future.result() if future is not None and by is planner else None

    def wait(self) -> None:
        """Wait until the thread plans no more, as before costs change."""
        for _, future in (self._due, self._plan):
            if future is not None:
                future.exception()

    def forget(self) -> None:
        """Forget what was read, as before a checkpoint is gone on from."""
        self._source, self._next, self._plan, self._due = None, None, _NO_PLAN, _NO_PLAN

    def close(self) -> None:
        """End the thread."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _next_batch(source: Iterator[Any]) -> Iterable[Any] | None:
    """The next batch; None: there is none. If ``source`` raises an error, so does whoever reads the batch's items."""
    try:
        return next(source, None)
    except Exception as error:  # of a source of the user's own; the other ranks have to be told
        return _failing(error)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def present_planner(planner: Any) -> Any:
    """The planner under costs as they are known now, of one that follows what steps take.

    Raises:
        InputError: it cannot be called.
    """
    if not callable(planner):
        raise InputError(f"run.planner is {planner!r}; a planner is called with a batch and returns its StepPlan")
    return getattr(planner, "planner", planner)
