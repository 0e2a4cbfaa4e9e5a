"""Whether the loss of a batch is what a step trains: the mean of its sequences' losses, weighted by their targets.

It is another one where a loss has a divisor of its own, such as the weights of its classes, the targets of a second
head or a least number of them. Sequence by sequence nothing else shows that: one sequence has its own loss either way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import CommunicationError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import (
    FEWEST,
    has_kinds_of_ids,
    synthetic,
    synthetic_of_all_kinds,
    traced_lengths,
)
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.stock_call import pack_of, shard_for, stock_loss
from lengthwise.runtime.verify.summed_losses import check_loss_is_no_sum, is_close, takes_ignored
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.label_convention import loss_in

SEQUENCES, MOST_SLOTS = 6, 32
"""How many sequences are computed at once, and slots of each at most."""


def check_loss_of_sequences(run: PreparedModel) -> None:
    """Note of a model that is computed sequence by sequence whether its loss of a batch is the mean of theirs.

    Every rank calls this; raises ``CheckError`` if the loss of a sequence is a sum over its targets. What cannot be
    called with several sequences of equal lengths is not judged.
    """
    check_loss_is_no_sum(run)
    if run.wrapped_model.has_own_loss or run.wrapped_model.by_sequence is None:
        return
    lengths = (_slots(run.collator),) * SEQUENCES
    shown_as = synthetic_of_all_kinds if has_kinds_of_ids(run.collator) else synthetic
    with noise_free(run), shown_as(run, lengths), torch.no_grad():
        shown = run.collator
        labels_of = partial(_labels, shown.labels or shown.source.tokens, shown.ignore_index)
        leaves_out = takes_ignored(run) and not run.wrapped_model.labels_sequences
        run.collator = replace(shown, labels=labels_of) if leaves_out else shown
        try:
            losses = on_every_rank(run, partial(_losses, run, lengths), is_stock=True)
        finally:
            run.collator = shown
    together, mean = gather_rows(torch.tensor(losses, dtype=torch.float64, device=run.world.device)).tolist()[0]
    if np.isfinite([together, mean]).all() and not is_close(together, mean, run.state.compute_dtype):
        run.wrapped_model.by_sequence.is_mean = False


def _slots(collator: PackCollator) -> int:
    """Slots of each sequence; not more than the corpus has."""
    if collator.compared_lengths:
        return collator.compared_lengths[0]
    return traced_lengths(collator)[0] if collator.longest is None else max(FEWEST, min(MOST_SLOTS, collator.longest))


def _labels(labels_of: Callable[[int], np.ndarray], ignored: int, sequence: int, /) -> np.ndarray:
    """The last labels of a sequence, of each one more: few of the first, all of the last."""
    labels = np.asarray(labels_of(sequence))
    is_left_out = SEQUENCES * np.arange(len(labels)) < len(labels) * (SEQUENCES - 1 - sequence)
    return np.where(is_left_out.reshape(-1, *[1] * (labels.ndim - 1)), ignored, labels)


def _losses(run: PreparedModel, lengths: tuple[int, ...]) -> tuple[float, float]:
    """The loss of the stock model of all sequences at once, and the mean of theirs; not numbers if it is not known."""
    unknown = float("nan"), float("nan")
    with run.gathered():
        try:
            alone = [stock_loss(run, lengths, sequence) for sequence in range(SEQUENCES)]
            joined = _joined([_stock_inputs(run, lengths, sequence) for sequence in range(SEQUENCES)])
            if joined is None or any(loss is None for loss, _ in alone):
                return unknown
            with run.wrapped_model.plain():
                together = loss_in(run.model(**joined))
        except CommunicationError:
            raise
        except Exception:  # such as a model that takes one sequence at a time
            return unknown
    mean = sum(float(loss) * number for loss, number in alone if loss is not None) / sum(n for _, n in alone)
    return unknown if together is None or together.numel() != 1 else (float(together), mean)


def _stock_inputs(run: PreparedModel, lengths: tuple[int, ...], sequence: int) -> dict[str, Any]:
    shard = shard_for(run, pack := pack_of(run, lengths, (sequence,)), run.alone)
    micro_batch = run.make(shard, pack)
    with active(shard):
        return run.wrapped_model.stock_inputs_of(micro_batch)


def _joined(inputs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The arguments of sequences, of equal shapes, as those of a batch; None: they are not to be joined."""
    joined = dict[str, Any]()
    for name, value in inputs[0].items():
        values: list[Any] = [of_sequence.get(name) for of_sequence in inputs]
        if isinstance(value, Tensor) and value.shape[:1] == (1,):
            if any(not isinstance(other, Tensor) or other.shape != value.shape for other in values):
                return None
            joined[name] = torch.cat(values)
        elif isinstance(value, str | bool | int | float | None) and all(other == value for other in values):
            joined[name] = value
        else:
            return None
    return joined
