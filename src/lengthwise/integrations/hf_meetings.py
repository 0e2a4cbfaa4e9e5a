"""Where ranks of transformers' Trainer wait for each other, and hear instead that one of them has left the training.

A rank whose callback, metric or file fails closes the run, and says so in the all-gather with which each operation of a
run begins. Collectives of transformers and accelerate have none: others would get what is said as values, and abort. So
ranks meet before each of those.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import transformers

from lengthwise.runtime.loop.call_order import RankOperation
from lengthwise.runtime.loop.run import Run

try:
    from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(f"lengthwise.Trainer needs accelerate ({error}): pip install 'lengthwise[hf]'") from error

_GATHERING = ("gather", "gather_for_metrics", "pad_across_processes", "reduce", "wait_for_everyone")
"""Methods by which accelerate communicates."""


class MeetingTrainer(transformers.Trainer):
    """A trainer whose ranks meet before they communicate while it trains."""

    run: Run | None = None
    """While it trains."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as transformers does; of a checkpoint, all ranks wait until it is written."""
        super().save_model(output_dir, _internal_call)
        if _internal_call:
            meet(self, RankOperation.WRITE)

    def store_flos(self) -> None:
        """Sum what the ranks have computed."""
        meet(self, RankOperation.GATHER)
        super().store_flos()


def meet(trainer: MeetingTrainer, operation: RankOperation) -> None:
    """Wait until all ranks are at ``operation``, while they train, or raise as :meth:`Run.meet` does."""
    if trainer.run is not None:
        trainer.run.meet(operation)


@contextmanager
def meeting_before_gathers(trainer: MeetingTrainer) -> Iterator[None]:
    """Let ranks meet before each collective of accelerate."""
    accelerator: Any = trainer.accelerator
    before, gather_function, meetings = dict(vars(accelerator)), trainer.gather_function, _Meetings(trainer)
    for name in _GATHERING:
        setattr(accelerator, name, meetings.before(getattr(accelerator, name)))
    trainer.gather_function = meetings.before(gather_function)
    try:
        yield
    finally:
        for name in _GATHERING:
            delattr(accelerator, name)
            if name in before:
                setattr(accelerator, name, before[name])
        trainer.gather_function = gather_function


@contextmanager
def stopping_at_bad_reads(loader: Any) -> Iterator[None]:
    """Let an error of the first rank, where it reads a stream for all, end the batches of all before it is raised."""
    errors = list[Exception]()
    if (fetch := getattr(loader, "_fetch_batches", None)) is not None:  # a DataLoaderDispatcher

        def fetch_or_stop(iterator: Any) -> tuple[Any, list[Any]]:
            try:
                return cast(tuple[Any, list[Any]], fetch(iterator))
            except Exception as error:
                if loader.state.process_index:
                    raise  # a broadcast failed: only the first rank reads
                errors.append(error)
            has_remainder = not (loader.split_batches or loader._drop_last)
            for _ in range(has_remainder + (not loader._stop_iteration)):
                broadcast_object_list([None, True])
            loader._stop_iteration = True
            return None, [None, True]

        loader._fetch_batches = fetch_or_stop
    try:
        yield
    finally:
        if fetch is not None:
            del loader._fetch_batches
        if errors:
            raise errors[0]


class _Meetings:
    """Meetings before calls of which some make others."""

    def __init__(self, trainer: MeetingTrainer) -> None:
        self._trainer, self._is_within = trainer, False

    def before(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """``gather`` behind a meeting, unless it is called within another one."""

        @wraps(gather.func if isinstance(gather, partial) else gather)
        def gather_together(*args: Any, **options: Any) -> Any:
            if self._is_within:
                return gather(*args, **options)
            meet(self._trainer, RankOperation.GATHER)
            self._is_within = True
            try:
                return gather(*args, **options)
            finally:
                self._is_within = False

        return gather_together
