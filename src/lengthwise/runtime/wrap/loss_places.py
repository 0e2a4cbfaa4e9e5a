"""What of its micro-batch a rank makes a loss of: two losses may be one there, and others elsewhere.

Logits and tokens that a loop shifts by hand, ``logits[:, :-1]`` and ``ids[:, 1:]``, give the loss of a sequence that a
rank has whole and alone. They do not where sequences follow each other, where ranks share one, or where a prompt has
no targets.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class LossPlace:
    """Which slots of a pack a rank makes a loss of, as far as another loss may be the same there by chance."""

    is_several: bool
    """Whether they are of several sequences."""
    is_masked: bool
    """Whether some of them have no target that could have one."""
    rank: int
    """The rank within the group that shares the pack."""
    degree: int
    is_first: bool
    is_last: bool
    """Whether it is the first and the last of the pack's slices."""

    def stricter(self) -> "tuple[LossPlace, ...]":
        """This place and those where a loss that is the same is the same here too."""
        several, masked = {self.is_several, True}, {self.is_masked, True}
        return tuple(replace(self, is_several=s, is_masked=m) for s in several for m in masked)

    def is_like(self, other: "LossPlace") -> bool:
        """Whether a loss that is the same at ``other`` is the same here, as far as is known before a forward."""
        return replace(other, is_masked=True) in replace(self, is_masked=True).stricter()


def place_of(micro_batch: Any, *, num_targets: int | None = None) -> LossPlace:
    """The place of a micro-batch, whose number of targets on this rank is ``num_targets``; None: not known yet."""
    shard = micro_batch.shard
    bounds, part = shard.cu_seqlens, shard.part
    if shard.group.size == 1 and part is None:
        num_sequences, num_slots = len(shard.ids), bounds[len(shard.ids)]
    else:
        numbers = np.searchsorted(bounds, shard.places, side="right")
        numbers = numbers[numbers <= len(shard.ids)]
        num_sequences, num_slots = len(np.unique(numbers)), len(numbers)
    num_most = num_slots if micro_batch.has_all_targets else num_slots - num_sequences
    return LossPlace(
        is_several=num_sequences > 1, is_masked=num_targets is not None and num_targets < num_most,
        rank=shard.group.rank, degree=shard.group.size, is_first=part is None or part.tokens.start == 0,
        is_last=part is None or part.tokens.stop == bounds[-1],
    )  # fmt: skip


def tells_apart(micro_batch: Any, place: LossPlace) -> bool:
    """Whether a loss that is the same there is so at all places of its kind: not if but one sequence has targets."""
    if not place.is_several or micro_batch.has_all_targets:
        return True
    return num_with_targets(micro_batch) > 1


def num_with_targets(micro_batch: Any) -> int:
    """The number of sequences that have a target on this rank."""
    has_target = micro_batch.has_target
    return len(micro_batch.shard.sequences.to(has_target.device)[has_target].unique())
