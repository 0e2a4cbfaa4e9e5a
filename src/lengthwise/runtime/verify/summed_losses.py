"""Refuse losses that are sums over targets, which a step would weigh as means.

In packs the comparison with single sequences shows it. Sequence by sequence nothing else does: one sequence has the
loss of its user's call either way. So a sequence is called with all of its labels, and with either half of them: of a
mean, the halves weigh as much as they have targets; a sum is what they add up to.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite

import numpy as np
import torch

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import CheckError, CommunicationError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import synthetic, traced_lengths
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.stock_call import stock_output
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.wrap.context import active

SAME = 1e-4
"""Relative difference of two losses that rounding explains, in float32 and above; in half precision 200 times that."""

LabelsOf = Callable[[int], np.ndarray]


def is_close(loss: float, other: float, dtype: torch.dtype) -> bool:
    """Whether two losses that were computed in ``dtype`` differ by rounding alone; False where one is no number."""
    same = SAME * (200.0 if dtype in (torch.bfloat16, torch.float16) else 1.0)
    return abs(loss - other) <= same * max(abs(loss), abs(other))


def check_no_sum(run: PreparedModel, loss: float, first: float, second: float, none: float = 0.0) -> None:
    """Raise ``CheckError`` if a loss that is no mean is the sum of those of two halves of its targets.

    ``none``: the loss without any target, such as of a router alone.
    """
    if loss == 0.0 or not is_close(loss + none, first + second, run.state.coarsest_dtype):
        return
    raise CheckError(
        f"the loss of {type(run.model).__name__} is a sum over its targets, or divided by a number that is not theirs: "
        f"with either half of the labels of a sequence it is {first:.4g} and {second:.4g}, and {loss:.4g} with all of "
        "them. The step weighs it as a mean over its targets; return that (reduction='mean'), or make it with "
        "loss=lambda output, micro_batch: "
        "F.cross_entropy(output[0], micro_batch.targets)"
    )


def check_loss_is_no_sum(run: PreparedModel) -> None:
    """Raise ``CheckError`` if a model that is computed sequence by sequence has a loss that is a sum over its targets.

    Every rank calls this, with the same outcome. A model that fails with some labels left out is not judged by it.
    """
    if run.wrapped_model.by_sequence is None or not takes_ignored(run):
        return
    lengths, dtype = traced_lengths(run.collator)[:1], run.state.coarsest_dtype
    with noise_free(run), synthetic(run, lengths), torch.no_grad():
        (loss, count), (first, num_first), (second, num_second) = _losses_of_halves(run, lengths)
        if min(num_first, num_second) == 0 or not all(map(isfinite, (loss, first, second))):
            return
        if is_close(loss * count, first * num_first + second * num_second, dtype):
            return
        none, _ = _loss_of_labels(run, lengths, lambda places: places < 0)
    check_no_sum(run, loss, first, second, none if isfinite(none) else 0.0)


def is_mean_over_kept(run: PreparedModel) -> bool:
    """Whether the loss of a sequence is the mean over the labels that are not ignored; every rank calls this."""
    lengths = traced_lengths(run.collator)[:1]
    with synthetic(run, lengths), torch.no_grad():
        (loss, count), (first, num_first), (second, num_second) = _losses_of_halves(run, lengths)
    has_both = min(num_first, num_second) > 0 and all(map(isfinite, (loss, first, second)))
    return has_both and is_close(loss * count, first * num_first + second * num_second, run.state.coarsest_dtype)


def _losses_of_halves(run: PreparedModel, lengths: tuple[int, ...]) -> list[tuple[float, int]]:
    """The loss of a sequence and the number of its targets: with all of its labels, and with either half of them."""
    halves: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda places: places >= 0, _is_early, lambda places: ~_is_early(places)
    ]  # fmt: skip
    return [_loss_of_labels(run, lengths, keeps) for keeps in halves]


def _loss_of_labels(
    run: PreparedModel, lengths: tuple[int, ...], keeps: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, int]:
    """The loss of the stock model of one sequence, with the labels at some of its places, and the number of targets.

    The same on every rank, which all call this.
    """
    collator = run.collator
    labels_of = collator.labels or collator.source.tokens
    run.collator = replace(collator, labels=partial(_some_labels, labels_of, keeps, collator.ignore_index))
    try:
        loss, count = on_every_rank(run, partial(_loss_and_targets, run, lengths), is_stock=True)
    finally:
        run.collator = collator
    rows = gather_rows(torch.tensor([loss, count], dtype=torch.float64, device=run.world.device)).tolist()
    return rows[0][0], int(rows[0][1])


def takes_ignored(run: PreparedModel) -> bool:
    """Whether the model is given labels that are ignored anyway, by the plan's objective or by the corpus."""
    collator, structure = run.collator, run.wrapped_model.structure
    if collator.has_all_targets:
        return False
    labels = collator.kinds.get("labels")
    is_usual = structure.is_hugging_face or collator.objective == NEXT_TOKEN or collator.masking is not None
    return is_usual or (labels is not None and bool((labels == collator.ignore_index).any()))


def _is_early(places: np.ndarray) -> np.ndarray:
    return places < len(places) // 2


def _some_labels(
    labels_of: LabelsOf, keeps: Callable[[np.ndarray], np.ndarray], ignored: int, sequence: int, /
) -> np.ndarray:
    labels = np.asarray(labels_of(sequence))
    is_kept = keeps(np.arange(len(labels))).reshape(-1, *[1] * (labels.ndim - 1))
    return np.where(is_kept, labels, ignored)


def _loss_and_targets(run: PreparedModel, lengths: tuple[int, ...]) -> tuple[float, int]:
    """The loss of the stock model of one sequence, not a number if it fails, and the number of targets."""
    with run.gathered():
        try:
            output, micro_batch = stock_output(run, lengths, 0)
            with active(micro_batch.shard):
                loss = run.wrapped_model.loss_of(output, micro_batch)
        except CommunicationError:
            raise
        except Exception:  # such as a module of the user's own that takes no sequence without targets
            return float("nan"), 0
        return float(loss) if loss.numel() == 1 else float("nan"), micro_batch.num_targets
