"""The loss of an evaluation, which is that of one process on any number of ranks.

transformers computes a mean over rows, each with the mean over the targets of its batch. Its batches are those of one
process, dealt to ranks in turn. But on several ranks it divides by the targets of all their batches together, and fills
the last batches with rows from the start, whose losses count in the mean of such a batch. Here each batch is divided by
its own targets, and the last is filled with rows of its own, and its loss computed without them.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

from torch.utils.data import IterableDataset

from lengthwise.core.errors import first_line
from lengthwise.integrations.hf_overrides import is_overridden
from lengthwise.runtime.wrap.preserved_state import preserve_state

try:
    from accelerate.data_loader import BatchSamplerShard  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(f"lengthwise.Trainer needs accelerate ({error}): pip install 'lengthwise[hf]'") from error

Prediction = tuple[Any, Any, Any]
_log = logging.getLogger("lengthwise")


class EvaluatedBatches:
    """The batches of an evaluation, each with the loss that one process has of it."""

    def __init__(self, trainer: Any, loader: Any, *, ours: type) -> None:
        """``loader``: of an evaluation by ``trainer``; what it does not deal in whole batches is left as it is.

        ``ours``: the class whose ``prediction_step`` has losses of whole batches; overrides have their own.
        """
        self._trainer, self._loader, self._ours = trainer, loader, ours
        dealt = getattr(loader, "batch_sampler", None)
        is_by_batch = isinstance(dealt, BatchSamplerShard) and not dealt.split_batches and dealt.batch_size
        self._dealt = dealt if is_by_batch else None
        self._num_batches, self._latest = 0, list[Any]()

    @contextmanager
    def as_on_one_process(self) -> Iterator[None]:
        """Divide losses by targets of this rank alone, and note and fill the batches that are dealt."""
        args, dealt = self._trainer.args, self._dealt
        batches = None if dealt is None else dealt.batch_sampler
        is_averaged, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        if dealt is not None:
            dealt.batch_sampler = _Filled(batches, self._note)
        try:
            yield
        finally:
            args.average_tokens_across_devices = is_averaged
            if dealt is not None:
                dealt.batch_sampler = batches

    def predict(
        self,
        step: Callable[..., Prediction],
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Prediction:
        """Loss, logits and labels of a batch by ``step``, which computes them; the loss is that of its own rows."""
        batch = None if is_overridden(self._trainer, self._ours, "prediction_step") else self._short_batch()
        if batch is None:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, _ = step(model, batch, True, ignore_keys)
        _, logits, labels = (None,) * 3 if prediction_loss_only else step(model, inputs, False, ignore_keys)
        return loss, logits, labels

    def _short_batch(self) -> Any:
        """What this rank evaluates now without the rows that fill it; None: nothing fills it, or it is all filling."""
        is_last = self._trainer.accelerator.gradient_state.end_of_dataloader
        if self._dealt is None or not is_last or len(self._latest) in (0, self._dealt.batch_size):
            return None
        args = self._trainer.args
        if (self._num_batches - 1) % args.world_size != args.process_index:
            return None
        return self._loader.collate_fn([self._loader.dataset[row] for row in self._latest])

    def _note(self, number: int, rows: list[Any]) -> None:
        self._num_batches, self._latest = number, rows


class _Filled:
    """The batches of a sampler, each told; the last is filled with its own rows, which make it no longer."""

    def __init__(self, batches: Any, tell: Callable[[int, list[Any]], None]) -> None:
        self._batches, self._tell = batches, tell

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        for number, rows in enumerate(self._batches, start=1):
            self._tell(number, list(rows))
            yield list(islice(cycle(rows), self._batches.batch_size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def begin_best_anew(trainer: Any, ours: type, *, num_ranks_before: int) -> None:
    """Forget the best loss of an evaluation and the patience spent on it, if a resumed trainer's cannot be compared.

    ``ours``: the class that a subclass overrides methods of; ``num_ranks_before``: those that saved the checkpoint.
    """
    args, state = trainer.args, trainer.state
    metric = str(args.metric_for_best_model or "")
    why = _rank_dependence(trainer, ours)
    if state.best_metric is None or num_ranks_before == args.world_size or not metric.endswith("loss") or not why:
        return
    if args.process_index == 0:
        _log.warning(
            "resumed on %d ranks from a checkpoint of %d: %s, so its loss depends on the number of ranks, and the best "
            "%s (%g, of step %s) cannot be compared with what follows. The best model and early stopping begin anew; "
            "resume on %d ranks to go on with them",
            args.world_size, num_ranks_before, why, metric, state.best_metric, state.best_global_step, num_ranks_before,
        )  # fmt: skip
    state.best_metric = state.best_model_checkpoint = None
    state.best_global_step = 0
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "early_stopping_patience_counter"):
            callback.early_stopping_patience_counter = 0


def _rank_dependence(trainer: Any, ours: type) -> str:
    """Why the loss of this trainer's evaluations may depend on the number of ranks; an empty string: it does not."""
    for name in ("prediction_step", "evaluation_loop", "get_eval_dataloader"):
        if is_overridden(trainer, ours, name):
            return f"{type(trainer).__name__}.{name} evaluates"
    data = trainer.eval_dataset
    if any(isinstance(rows, IterableDataset) for rows in (data.values() if isinstance(data, dict) else [data])):
        return "eval_dataset is a stream"
    return ""


_OWN_WAYS = ("get_eval_dataloader", "evaluate", "evaluation_loop", "prediction_step")
"""Methods by which a subclass may evaluate in another way."""


def evaluation_problem(trainer: Any, ours: type) -> str:
    """Why the first rows of an evaluation make no batch, which else shows after hours; an empty string if they do.

    ``ours``: the class whose methods evaluate as transformers does; what overrides do is not known.
    """
    data = trainer.eval_dataset
    is_asked_for = getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy) != "no"
    if not is_asked_for or data is None or any(is_overridden(trainer, ours, name) for name in _OWN_WAYS):
        return ""
    for name in list(data) if isinstance(data, dict) else [None]:
        loader = trainer.get_eval_dataloader(name)
        if isinstance(loader.dataset, IterableDataset) or not len(loader.dataset):
            continue
        try:
            with preserve_state(trainer.model):  # a collator may draw masks
                loader.collate_fn([loader.dataset[row] for row in next(iter(loader.batch_sampler))])
        except Exception as error:  # whatever other people's collators raise
            return (
                f"data_collator: it makes no batch of the first rows of eval_dataset ({type(error).__name__}: "
                f"{first_line(error)}); training packs rows and needs none, an evaluation does, such as "
                "DataCollatorWithPadding(tokenizer)"
            )
    return ""
