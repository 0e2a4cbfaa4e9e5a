"""Whether the loss of a batch is what a step trains: the mean of its sequences' losses, weighted by their targets.

It is another one where a loss has a divisor of its own, such as the weights of its classes, the targets of a second
head or the number of rows, and where it has a term across sequences, such as negatives from the batch. Nothing else
shows that: one sequence has its own loss either way, and so has a pack. A term may be zero in value and not in
gradient, so the gradients are compared too.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import CommunicationError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import (
    FEWEST,
    has_kinds_of_ids,
    synthetic_of_all_kinds,
    traced_lengths,
    varied,
)
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.precision import dtypes_of, tolerance_of
from lengthwise.runtime.verify.stock_call import (
    GradientResult,
    gradients_alone,
    gradients_of_loss,
    gradients_of_pack,
    is_summed_over_ranks,
    pack_of,
    shard_for,
    stock_output,
    taken_gradients,
)
from lengthwise.runtime.verify.summed_losses import is_close, is_mean_over_kept, takes_ignored
from lengthwise.runtime.verify.worst_difference import worst_difference
from lengthwise.runtime.verify.zero_weights import Fill
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.label_convention import loss_in
from lengthwise.runtime.wrap.micro_batch import MicroBatch

SEQUENCES, MOST_SLOTS = 6, 32
"""How many sequences are computed at once, and slots of each at most."""


def check_loss_of_sequences(run: PreparedModel, fill: Fill) -> None:
    """Note of a model whether its loss of a batch is the mean of its sequences', unless that is known.

    Every rank calls this, once packs or micro-batches were compared with single sequences. What cannot be called with
    several sequences of equal lengths is not judged. ``fill``: what weights of zero are replaced by.
    """
    if run.wrapped_model.is_mean is not None:
        return
    most_slots, slots = run.wrapped_model.most_slots, _slots(run.collator)
    if most_slots is not None:
        slots = max(1, min(slots, most_slots // SEQUENCES))
    lengths = (slots,) * SEQUENCES
    for dtype, filled in dict.fromkeys([(dtypes_of(run)[0], fill), (None, Fill.NOTHING)]):
        shown_as = synthetic_of_all_kinds if has_kinds_of_ids(run.collator) else varied
        with noise_free(run, dtype, filled), shown_as(run, lengths), torch.enable_grad():
            run.wrapped_model.is_mean = _is_mean_of_rows(run, lengths, dtype)
        if run.wrapped_model.is_mean is not None:
            break
    if run.wrapped_model.is_mean and _weighs_by_slots(run):
        run.wrapped_model.is_mean = None


def _is_mean_of_rows(run: PreparedModel, lengths: tuple[int, ...], dtype: torch.dtype | None) -> bool | None:
    """Whether the loss of rows is the mean of theirs by their targets, of which they have different numbers.

    Labels of which the corpus leaves out none are tried with some left out, as rows with equally many weigh alike.
    """
    shown, leaves_out = run.collator, takes_ignored(run)
    if run.wrapped_model.labels_sequences or not (leaves_out or shown.labels is not None):
        return _is_mean(run, lengths, dtype)
    labels_of = partial(_labels, shown.labels or shown.source.tokens, shown.ignore_index)
    run.collator = replace(shown, labels=labels_of)
    try:
        is_mean = _is_mean(run, lengths, dtype)
    finally:
        run.collator = shown
    if leaves_out or is_mean or (is_mean is False and is_mean_over_kept(run)):
        return is_mean
    return False if _is_mean(run, lengths, dtype) is False else None


def _weighs_by_slots(run: PreparedModel) -> bool:
    """Whether slots are the weight of sequences whose loss may be of one label: six of one length weigh alike."""
    is_seen = run.wrapped_model.by_sequence is None or run.wrapped_model.has_own_loss
    return run.collator.has_all_targets and not is_seen


def _slots(collator: PackCollator) -> int:
    """Slots of each sequence; not more than the corpus has."""
    if collator.compared_lengths:
        return _most_common(collator)
    return traced_lengths(collator)[0] if collator.longest is None else max(FEWEST, min(MOST_SLOTS, collator.longest))


def _most_common(collator: PackCollator) -> int:
    """The slots that most sequences of the corpus have, so that there are several, among lengths to compare."""
    longest, shortest, _ = collator.compared_lengths
    if collator.slots_of_corpus is None:
        return longest
    slots, counts = np.unique(collator.slots_of_corpus, return_counts=True)
    counts[(slots < shortest) | (slots > longest)] = 0
    return int(slots[counts == counts.max()].max())


def _labels(labels_of: Callable[[int], np.ndarray], ignored: int, sequence: int, /) -> np.ndarray:
    """The last labels of a sequence, of each one more: few of the first, all of the last."""
    labels = np.asarray(labels_of(sequence))
    is_left_out = SEQUENCES * np.arange(len(labels)) < len(labels) * (SEQUENCES - 1 - sequence)
    is_left_out[-1:] = False
    return np.where(is_left_out.reshape(-1, *[1] * (labels.ndim - 1)), ignored, labels)


def _is_mean(run: PreparedModel, lengths: tuple[int, ...], dtype: torch.dtype | None) -> bool | None:
    """Whether all sequences at once give the loss and gradients of each; None: that is not known."""
    at_once = partial(_of_all_ranks, run, partial(_gradients_at_once, run, lengths))
    together = at_once()
    if together is None:
        return None
    one_by_one = gradients_of_pack if run.wrapped_model.by_sequence is None else gradients_alone
    apart = _of_all_ranks(run, partial(one_by_one, run, lengths))
    if apart is None:
        return None
    if _is_same(run, together, apart, dtype):
        return True
    del apart
    again = at_once()  # which differs if random numbers are drawn
    is_other = again is not None and _is_same(run, again, together, dtype)
    return False if is_other and not _takes_one(run, lengths, together.loss or 0.0) else None


def _takes_one(run: PreparedModel, lengths: tuple[int, ...], loss: float) -> bool:
    """Whether the model takes one sequence at a time: of an argument of several it reads the first row alone.

    ``loss``: that of all sequences at once.
    """

    def is_loss(change: Callable[[Tensor], Tensor], name: str) -> bool:
        changed = _of_all_ranks(run, partial(_gradients_at_once, run, lengths, {name: change}))
        return changed is not None and _is_on_all_ranks(
            run, is_close(changed.loss or 0.0, loss, run.state.coarsest_dtype)
        )

    names = _stock_inputs(run, _micro_batch(run, lengths, 0))
    return any(is_loss(_as_first, name) and not is_loss(_without_first, name) for name in names)


def _as_first(rows: Tensor) -> Tensor:
    return rows[:1].expand_as(rows).contiguous()


def _without_first(rows: Tensor) -> Tensor:
    return torch.cat([rows[1:], rows[-1:]])


def _is_same(run: PreparedModel, some: GradientResult, other: GradientResult, dtype: torch.dtype | None) -> bool:
    worst = worst_difference(run, some, other, tolerance_of(dtype, run.state.coarsest_dtype))
    is_same = worst.ratio <= 1.0 and is_close(some.loss or 0.0, other.loss or 0.0, run.state.coarsest_dtype)
    return _is_on_all_ranks(run, is_same)


def _is_on_all_ranks(run: PreparedModel, is_so: bool) -> bool:
    """Whether something is so on every rank, which all call this."""
    return bool(gather_rows(torch.tensor([int(is_so)], device=run.world.device)).all())


def _of_all_ranks(run: PreparedModel, compute: Callable[[], GradientResult | None]) -> GradientResult | None:
    """Loss and gradients that are finite on every rank, else None."""
    try:
        result = compute()
    except CommunicationError:
        raise
    except Exception:  # such as of a model that takes one sequence at a time
        result = None
    is_known = result is not None and np.isfinite(result.loss or 0.0)
    is_known = is_known and result is not None and all(bool(part.isfinite().all()) for part in result.gradients)
    return result if _is_on_all_ranks(run, is_known) else None


def _gradients_at_once(
    run: PreparedModel, lengths: tuple[int, ...], changes: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> GradientResult | None:
    """Loss and gradients of the stock model, called with all sequences at once; None: it cannot be.

    ``changes``: by the name of an argument, how its rows are changed.
    """
    template = None
    with run.gathered():
        if run.wrapped_model.has_own_loss:
            with torch.no_grad():
                template, _ = stock_output(run, lengths, 0)
    with run.gathered():
        micro_batches = [_micro_batch(run, lengths, sequence) for sequence in range(len(lengths))]
        joined = _joined([_stock_inputs(run, micro_batch) for micro_batch in micro_batches])
        if joined is None:
            return None
        for name, change in (changes or {}).items():
            joined[name] = change(joined[name]) if isinstance(joined[name], Tensor) else joined[name]
        counts = [_num_targets(run, micro_batch) for micro_batch in micro_batches]
        with run.wrapped_model.plain():
            output = run.model(**joined)
        if template is None:
            loss = loss_in(output)
        else:
            loss = _loss_of_rows(run, _rows(output, template, len(lengths)), micro_batches, counts)
        if loss is None or loss.dim() or not sum(counts):
            return None
        value = float(loss.detach().double()) * sum(counts)
        is_summed = is_summed_over_ranks(run)
        computed = gradients_of_loss(run, loss, sum(counts) / (run.world.size if is_summed else 1))
    return GradientResult(loss=value, gradients=taken_gradients(run) if is_summed else computed)


def _micro_batch(run: PreparedModel, lengths: tuple[int, ...], sequence: int) -> MicroBatch:
    pack = pack_of(run, lengths, (sequence,))
    return run.make(shard_for(run, pack, run.alone), pack)


def _stock_inputs(run: PreparedModel, micro_batch: MicroBatch) -> dict[str, Any]:
    with active(micro_batch.shard):
        return run.wrapped_model.stock_inputs_of(micro_batch)


def _num_targets(run: PreparedModel, micro_batch: MicroBatch) -> int:
    with active(micro_batch.shard):
        return run.wrapped_model.targets_of(micro_batch)


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


def _rows(output: Any, alone: Any, num_rows: int) -> list[Any]:
    """The output of a batch as one for each of its rows, of the shapes that one sequence ``alone`` has; empty: it has
    other shapes."""
    leaves, form = pytree.tree_flatten(output)
    leaves_alone, form_alone = pytree.tree_flatten(alone)
    if len(leaves) != len(leaves_alone) or form != form_alone:
        return []
    rows = list[list[Any]]([] for _ in range(num_rows))
    is_cut = False
    for leaf, of_one in zip(leaves, leaves_alone):
        if not isinstance(leaf, Tensor) or leaf.shape == of_one.shape:
            parts = [leaf] * num_rows
        elif leaf.shape == (num_rows * of_one.shape[0], *of_one.shape[1:]):
            parts, is_cut = list(leaf.chunk(num_rows)), True
        else:
            return []
        for row, part in zip(rows, parts):
            row.append(part)
    return [pytree.tree_unflatten(row, form) for row in rows] if is_cut else []


def _loss_of_rows(
    run: PreparedModel, rows: list[Any], micro_batches: list[MicroBatch], counts: list[int]
) -> Tensor | None:
    """The mean of what the user's function makes of each row, weighted by their targets."""
    losses = list[Tensor]()
    for row, micro_batch, count in zip(rows, micro_batches, counts):
        if count:
            with active(micro_batch.shard):
                losses.append(run.wrapped_model.loss_of(row, micro_batch) * (count / sum(counts)))
    return torch.stack(losses).sum() if losses else None
