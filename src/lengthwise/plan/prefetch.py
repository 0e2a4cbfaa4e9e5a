"""Plans made ahead of training, in other processes; the same plans in the same order whatever their number."""

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.processes import follow_parent
from lengthwise.core.step_plan import StepPlan

Plan = Callable[[GlobalBatch], StepPlan]

PATIENCE_S = 900.0


class PlanAhead:
    """A stream of batches and the planner of each: ``batch = next(ahead); plan = ahead(batch)``.

    Up to ``depth`` batches are drawn and planned before they are asked for. The stream's state is that of the batch
    handed out last, so a checkpoint never skips what was drawn ahead. With no workers, plans are made when asked for.

    What goes wrong in planning does not stop training. Where a worker dies or hangs, this process plans in its stead:
    planners are pure, so the plan is the one all other ranks have. Where the planner itself fails, it fails on every
    rank, and the step is planned by ``fallback``, with a warning. A sequence that fits nowhere
    still raises, and so does a policy of another package that is wrong.
    """

    def __init__(
        self,
        stream: BatchStream,
        planner: Plan,
        *,
        fallback: Plan,
        workers: int,
        depth: int = 4,
        patience_s: float = PATIENCE_S,
        warn: bool = True,
    ) -> None:
        """``patience_s``: how long a worker is waited for; then this process plans, and the workers are killed."""
        self._stream, self._planner, self._fallback, self._warn = stream, planner, fallback, warn
        self._depth, self._patience_s, self._workers = depth if workers else 0, patience_s, workers
        self._pool = _start_pool(planner, workers) if workers else None
        self._queue: deque[tuple[GlobalBatch, dict[str, Any], Future[StepPlan]]] = deque()
        self._state = stream.state_dict()
        self._due: tuple[GlobalBatch, Future[StepPlan]] | None = None

    def __iter__(self) -> "PlanAhead":
        return self

    def __next__(self) -> GlobalBatch:
        if self._pool is None:
            batch = next(self._stream)
            self._state = self._stream.state_dict()
            return batch
        while len(self._queue) <= self._depth:
            drawn = next(self._stream)
            self._queue.append((drawn, self._stream.state_dict(), self._submit(drawn)))
        batch, self._state, future = self._queue.popleft()
        self._due = (batch, future)
        return batch

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan of the batch handed out last."""
        try:
            return self._planner(batch) if self._pool is None else self._from_worker(batch)
        except (InfeasibleError, InputError):
            raise
        except Exception as error:  # whatever it is, training goes on
            if self._warn:
                sys.stderr.write(
                    f"warning: planning step {batch.step} failed ({type(error).__name__}: {error}); "
                    "it is planned by policy static instead\n"
                )
            return self._fallback(batch)

    def plan_with(self, planner: Plan, *, fallback: Plan) -> None:
        """Plan with another planner from now on, what was planned ahead and the batch handed out last as well."""
        self._planner, self._fallback = planner, fallback
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = _start_pool(planner, self._workers)
            self._queue = deque((batch, state, self._submit(batch)) for batch, state, _ in self._queue)
            self._due = (self._due[0], self._submit(self._due[0])) if self._due is not None else None

    def peek(self) -> StepPlan | None:
        """The plan of the batch that is handed out next, if a worker has made it."""
        future = self._queue[0][2] if self._queue else None
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def state_dict(self) -> dict[str, Any]:
        """The stream's state after the batch handed out last."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; what was drawn ahead is forgotten."""
        self._queue.clear()
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _from_worker(self, batch: GlobalBatch) -> StepPlan:
        assert self._due is not None and self._due[0] == batch, "plans are asked for in the order of the batches"
        try:
            return self._due[1].result(self._patience_s)
        except BrokenExecutor:
            return self._planner(batch)
        except TimeoutError:
            if not self._due[1].done():  # else it is the planner's own
                self._give_up_workers()
            return self._planner(batch)

    def _give_up_workers(self) -> None:
        """Kill workers that are stopped or stuck; the process plans in their stead from now on."""
        assert self._pool is not None
        if self._warn:
            sys.stderr.write(
                f"warning: a planning process was silent for {self._patience_s:g} s; plans are made here\n"
            )
        for process in list((self._pool._processes or {}).values()):
            process.kill()

    def _submit(self, batch: GlobalBatch) -> "Future[StepPlan]":
        assert self._pool is not None
        try:
            return self._pool.submit(_Worker.plan, batch)
        except BrokenExecutor as error:  # a worker died and the pool with it
            broken: Future[StepPlan] = Future()
            broken.set_exception(error)
            return broken


class _Worker:
    """What a worker process holds: the planner, prepared once."""

    planner: Plan

    @classmethod
    def install(cls, planner: Plan) -> None:
        follow_parent()
        cls.planner = planner

    @classmethod
    def plan(cls, batch: GlobalBatch) -> StepPlan:
        return cls.planner(batch)


def _start_pool(planner: Plan, workers: int) -> ProcessPoolExecutor:
    """Spawned processes: a fork would copy torch's threads half-way."""
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=_Worker.install, initargs=(planner,))
