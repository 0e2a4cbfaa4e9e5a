"""Shares of loss terms that are means over the whole step, for each rank and micro-batch."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lengthwise.core.batch import num_targets
from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.handed_out import HandedOut
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.sequence_sums import check_is_whole, share_of_rank

Over = Literal["targets", "tokens", "sequences", "units"]


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """Totals of a step by which means over it divide."""

    targets: int
    slots: int
    """Slots of all sequences, without padding: tokens, or frames where sequences are videos."""
    sequences: int
    units: int
    """Sequences, or groups of sequences that share a micro-batch."""
    is_exact: bool = True
    """False where labels leave out targets that nobody has counted yet; the update then scales the gradient."""

    @classmethod
    def of(cls, plan: StepPlan, collator: PackCollator, *, targets: int | None) -> "LossTotals":
        """Compute the totals of a planned step; ``targets``: their counted number, None: as lengths say."""
        planned = [planned.pack for pipeline in plan.pipelines for planned in pipeline.micro_batches]
        packs, is_exact = [collator.computed(pack) for pack in planned], not collator.may_leave_out
        if targets is None and collator.units is not None and is_exact:  # members have other targets than their sum
            targets = sum(num_targets(pack.lengths, objective=collator.objective) for pack in packs)
        lengths = [length for pack in packs for length in collator.lengths(pack)]
        return cls(
            targets=max(1, plan.loss_normaliser if targets is None else targets),
            slots=sum(lengths) // collator.slot_tokens,
            sequences=len(lengths),
            units=sum(len(pack.ids) for pack in planned),
            is_exact=is_exact or targets is not None,
        )

    def check_exact(self, over: str) -> None:
        """Raise ``InputError`` if means over anything but targets would be scaled at the update."""
        if not self.is_exact:
            raise InputError(
                f"a mean over {over} beside one over targets needs the number of targets before the first backward, "
                "and labels may leave out some: prepare(..., count_targets=True) reads the labels of each step first"
            )


class StepShare(Protocol):
    """A micro-batch, as far as its share of a mean over the step needs it."""

    shard: PackShard
    totals: LossTotals

    @property
    def degree(self) -> int:
        """Ranks that share the micro-batch."""
        ...

    @property
    def num_targets(self) -> int:
        """Tokens of this rank that have a loss."""
        ...

    @property
    def has_all_targets(self) -> bool:
        """Whether each slot of a sequence has a target."""
        ...

    @property
    def has_target(self) -> Tensor:
        """[t] bool: whether each slot is to predict anything."""
        ...

    @property
    def handed_out(self) -> HandedOut:
        """The tensors that the loop was given."""
        ...

    @property
    def slot_tokens(self) -> int:
        """Tokens of a slot."""
        ...

    @property
    def num_units(self) -> int:
        """The number u of units of the micro-batch."""
        ...


def share_of_mean(micro_batch: StepShare, values: Tensor, over: Over) -> Tensor:
    """This rank's share of the mean of ``values`` over the whole step.

    Raises:
        InputError: there is not one value for each slot.
    """
    if isinstance(values, MissingTensor):
        return values  # stands for a term; Step.backward does not look at it
    shard, totals = micro_batch.shard, micro_batch.totals
    if over not in ("targets", "tokens", "sequences", "units"):
        raise InputError(f"a mean is over 'targets', 'tokens', 'sequences' or 'units', not over {over!r}")
    if over == "units":
        return _share_of_units(micro_batch, values)
    _check_by_slot(shard, values, f"a mean over {over}")
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    is_real = shard.sequences.to(values.device) >= 0
    if over == "targets":
        if micro_batch.handed_out.has_other_targets:
            raise InputError(
                "labels of the micro-batch were changed in place, and micro_batch.mean(values, over='targets') divides "
                "by the number of those that it had; change copies, or give micro_batch.sum(values) divided by a "
                "number of the whole step, as step.backward(loss, mean_over='step')"
            )
        is_target = is_real if micro_batch.num_targets and micro_batch.has_all_targets else micro_batch.has_target
        weights, mask = torch.full_like(values.detach(), micro_batch.slot_tokens / totals.targets), is_target
    else:
        mask = is_real
        if over == "tokens":
            weights = shard.num_members.to(values) / totals.slots
        else:
            weights = shard.inverse_lengths.to(values) / totals.sequences
    weights = weights.reshape(values.shape)
    return torch.where(mask.to(values.device).reshape(values.shape), values * weights, values.new_zeros(())).sum()


def share_of_sum(micro_batch: StepShare, values: Tensor, over: Literal["tokens", "units"]) -> Tensor:
    """This rank's share of the sum of ``values`` over the whole step.

    Raises:
        InputError: there is not one value for each slot or unit.
    """
    if isinstance(values, MissingTensor):
        return values  # stands for a term; Step.backward does not look at it
    if over == "units":
        return _share_of_units(micro_batch, values) * micro_batch.totals.units
    if over != "tokens":
        raise InputError(f"a sum is over 'tokens' or 'units', not over {over!r}")
    _check_by_slot(micro_batch.shard, values, "a sum over tokens")
    values = values if values.is_floating_point() else values.long()
    counts = micro_batch.shard.num_members.to(values).reshape(values.shape)
    return torch.where(counts > 0, values * counts, values.new_zeros(())).sum()


def _check_by_slot(shard: PackShard, values: Tensor, what: str) -> None:
    """Raise ``InputError`` unless there is one value for each slot of this rank."""
    if values.numel() != shard.num_slots:
        raise InputError(
            f"{what} needs one value for each of the {shard.num_slots} slots of this rank, [t] or [1, t]; got "
            f"{list(values.shape)}"
        )


def _share_of_units(micro_batch: StepShare, values: Tensor) -> Tensor:
    """This rank's share of a mean over the units of the step: the p ranks of a group have the same values."""
    check_is_whole(micro_batch.shard, "a mean or a sum over units has a value of each unit")
    if values.shape != (num_units := micro_batch.num_units,):
        raise InputError(
            f"a mean or a sum over units needs one value for each of the {num_units} units of this micro-batch, "
            f"[{num_units}]; got {list(values.shape)}"
        )
    return share_of_rank(values.sum(), micro_batch.shard) / micro_batch.totals.units
