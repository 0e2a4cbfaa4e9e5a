"""Count the targets of labels that a user's ``inputs=`` makes, by which their loss is weighted in the step.

A plan counts targets by lengths, or by the labels of items. Labels that a function of the user's makes may leave out
others, or be as many as a decoder has tokens. Which of them have a loss was found out before the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lengthwise.runtime.wrap.forward_arguments import TARGETS

SHIFTED = "shift_labels"
NAMES = (SHIFTED, *TARGETS)
"""Names of arguments that may be labels, those first that a model prefers."""


@dataclass(frozen=True, kw_only=True)
class MadeLabels:
    """Which labels of an argument that ``inputs=`` makes have a loss."""

    name: str
    """The argument."""
    ignored: int
    """The label that has no loss."""
    drops_first: bool
    """Whether the first label of a sequence has none, as where the model shifts labels."""
    drops_last: bool
    """Whether the last label of a sequence has none."""
    is_mean: bool
    """Whether the loss was seen to be the mean over the labels that count, so that their number is its weight."""

    def count_in_sequence(self, arguments: Mapping[str, Any]) -> int | None:
        """The number of targets in the labels of one sequence; None: there are no such labels."""
        labels = arguments.get(self.name)
        if not _is_ids(labels):
            return None
        start, end = int(self.drops_first), labels.numel() - int(self.drops_last)
        return int((labels.flatten()[start:end] != self.ignored).sum())

    def count(self, arguments: Mapping[str, Any], micro_batch: Any) -> int | None:
        """The number of this rank's targets in the labels of a pack; None: there are no such labels.

        Labels that are not those of slots are taken for those of one sequence.
        """
        labels = arguments.get(self.name)
        if not _is_ids(labels) or labels.numel() != micro_batch.shard.num_slots:
            return self.count_in_sequence(arguments)
        is_target = labels.flatten() != self.ignored
        if self.drops_first:
            is_target &= micro_batch.shard.positions.to(labels.device) != 0
        if self.drops_last:
            is_target &= ~micro_batch.is_last.to(labels.device)
        return int(is_target.sum())

    def count_made(self, micro_batch: Any, *, by_sequence: bool) -> int:
        """The number of this rank's targets in the labels that are made for a micro-batch, or planned if none are.

        ``by_sequence``: they are made for each sequence again.
        """
        if by_sequence and len(micro_batch.pack.ids) > 1:
            alone = [micro_batch.shard.alone(number) for number in range(len(micro_batch.pack.ids))]
            return sum(self.count_made(sequence, by_sequence=False) for sequence in alone)
        count = self.count(micro_batch.inputs, micro_batch)
        return int(micro_batch.num_targets) if count is None else count


def is_labels(value: Any) -> TypeGuard[Tensor]:
    """Whether an argument can be labels of a sequence: integers, one or more."""
    return _is_ids(value) and value.numel() > 0


def targets_of_loss(micro_batch: Any, loss: Tensor | None = None, *, is_checked: bool = True) -> int:
    """The number of this rank's targets that a loss is the mean of: the micro-batch's, or of made or changed labels.

    ``loss``: what a forward returned, or what was made of it; None: of any. ``is_checked``: whether it is the loss that
    was checked before the run, and not one that its user says to be a mean over the micro-batch's targets.
    """
    made = [forward for forward in micro_batch.shard.passes if forward.num_made_targets is not None]
    if not made:
        return int(micro_batch.num_targets)
    for forward in micro_batch.shard.passes:
        if loss is not None and forward.noted is not None and forward.noted.is_in(loss):
            count = forward.num_made_targets
            return int(micro_batch.num_targets if count is None else count)
    return int(made[-1].num_made_targets if is_checked else micro_batch.num_targets)


def _is_ids(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool
