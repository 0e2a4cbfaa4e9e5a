"""Tensors of a rank's next micro-batches, made in a thread while it computes: it seldom waits for its data."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

import torch

from lengthwise.core.batch import Pack
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.train.micro_batch_tensors import CPU, MicroBatchTensors, TokenSource, feed

CLOSING_S = 1.0
"""Most seconds that closing waits for what is being read; the thread dies with the process."""

Packs = Sequence[Pack]


def packs_of(plan: StepPlan, rank: int) -> list[Pack]:
    """Packs that ``rank`` computes in a step, in their order."""
    ordered = sorted(plan.pipelines, key=lambda pipeline: pipeline.phase)
    return [m.pack for pipeline in ordered if rank in pipeline.ranks for m in pipeline.micro_batches]


class Prefetcher:
    """Makes up to ``depth`` micro-batches ahead of the one that is computed; the same tensors as :func:`feed` makes.

    They are on the host, for a GPU in pinned memory, from where they are copied while it computes.
    """

    def __init__(
        self, source: TokenSource, device: torch.device, *, masking: TokenMasking | None = None, depth: int = 2
    ) -> None:
        self._source, self._device, self._masking, self._depth = source, device, masking, depth
        self._made: deque[tuple[Pack, Future[MicroBatchTensors]]] = deque()
        self._wanted: deque[Pack] = deque()
        self._following: Callable[[], Packs] | None = None
        self._jobs: SimpleQueue[tuple[Pack, Future[MicroBatchTensors]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="prefetch", daemon=True)
        self._thread.start()

    def start(self, packs: Packs, *, following: Callable[[], Packs] | None = None) -> None:
        """Begin a step of these micro-batches. What was made for others is thrown away.

        ``following`` is asked, when all of them are made or being made, for those of the step after; none: not known.
        """
        if [pack for pack, _ in self._made] + list(self._wanted) != list(packs):
            self._forget()
            self._wanted.extend(packs)
        self._following = following
        self._make_ahead()

    def take(self, pack: Pack) -> MicroBatchTensors:
        """The tensors of the next micro-batch, which is of ``pack``.

        Raises:
            LengthwiseError: one of its sequences could not be read.
        """
        self._make_ahead(more=1)
        made, future = self._made.popleft()
        assert made == pack, "micro-batches are taken in the order of the plan"
        return future.result()

    def close(self) -> None:
        """End the thread, after what it reads at the moment or without."""
        self._forget()
        self._jobs.put(None)
        self._thread.join(CLOSING_S)

    def _forget(self) -> None:
        for _, future in self._made:
            future.cancel()
        self._made.clear()
        self._wanted.clear()

    def _make_ahead(self, *, more: int = 0) -> None:
        while len(self._made) < self._depth + more:
            if not self._wanted and self._following is not None:
                self._wanted.extend(self._following())
                self._following = None if self._wanted else self._following
            if not self._wanted:
                return
            self._made.append((self._wanted.popleft(), Future()))
            self._jobs.put(self._made[-1])

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            pack, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._make(pack))
            except BaseException as error:  # whatever it is, it is raised where the micro-batch is computed
                future.set_exception(error)

    def _make(self, pack: Pack) -> MicroBatchTensors:
        made = feed(self._source, pack, CPU, masking=self._masking)
        if self._device.type != "cuda":
            return made
        torch.cuda.set_device(self._device)  # this thread's; else pinning starts a context on the first GPU
        return made.pinned()
