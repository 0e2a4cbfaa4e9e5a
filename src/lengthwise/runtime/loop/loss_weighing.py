"""Weight the losses of a step's micro-batches so that they sum to the mean over the step."""

from collections.abc import Sequence
from enum import IntFlag
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.other_means import with_other_mean
from lengthwise.runtime.wrap.gradient_changes import graph_of
from lengthwise.runtime.wrap.loss_backward import LossTerm
from lengthwise.runtime.wrap.loss_check import MeanOver, check_form
from lengthwise.runtime.wrap.loss_terms import LossTotals
from lengthwise.runtime.wrap.made_labels import targets_of_loss
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.sequence_sums import check_is_whole


class Uses(IntFlag):
    """The kinds of means among a step's losses, as far as the number of targets matters."""

    TARGETS = 1
    UNITS = 2
    """Means over units, and sums, whose weights no number of targets changes."""
    TOKENS = 4
    """Means over tokens or sequences."""
    CHANGED = 8
    """Labels that a loop changed in place have another number of targets than the step's totals count."""


class Weighing:
    """Accumulates the weighted losses of this rank's micro-batches in one step."""

    def __init__(self, totals: LossTotals, device: torch.device) -> None:
        self.totals = totals
        self.by_target = torch.zeros((), dtype=torch.float64, device=device)
        """The sum of losses that are means over targets, each times its number of targets."""
        self.direct = 0.0
        """The sum of this rank's shares of means over the whole step."""
        self.num_targets = 0
        self.uses = Uses(0)

    def terms(
        self, micro_batch: MicroBatch, loss: Tensor, side: Tensor | None, mean_over: MeanOver | None
    ) -> list[LossTerm]:
        """The terms to differentiate, with their weights in the step; a mean over no target, 0 / 0, is left out.

        Raises:
            InputError: a number that the weights need is not known yet, or ``mean_over`` is no such word.
        """
        totals, terms = self.totals, list[LossTerm]()
        count = targets_of_loss(micro_batch, loss, is_checked=mean_over is None)
        if count != micro_batch.num_targets and "targets" in micro_batch.means:
            raise InputError(
                f"labels that inputs= makes, or were changed in place, have {count:,} targets, and the micro-batch has "
                f"{micro_batch.num_targets:,}, which micro_batch.mean(values, over='targets') divides by; give such "
                "terms over='tokens', with "
                "count_targets=True, or put those labels into the items"
            )
        self._note(micro_batch, mean_over)
        if count != micro_batch.num_targets and micro_batch.handed_out.has_other_targets:
            self.uses |= Uses.CHANGED
        self.num_targets += count
        loss = with_other_mean(loss, micro_batch, mean_over)
        if mean_over in (None, "targets"):
            if count:
                terms.append(LossTerm(value=loss, weight=count / totals.targets))
                self.by_target += loss.detach().double() * count
        elif mean_over == "tokens":
            if micro_batch.shard.tree is not None:
                raise InputError(
                    "mean_over='tokens' takes the mean of this rank's tokens, of which sequences share some: with "
                    "share_prefixes=True give micro_batch.mean(values, over='tokens') with mean_over='step'"
                )
            if num_slots := micro_batch.shard.num_unpadded:
                terms.append(self._direct(loss, num_slots / totals.slots))
        elif mean_over == "units":
            check_is_whole(micro_batch.shard, "mean_over='units' takes a loss of whole units")
            terms.append(self._direct(loss, micro_batch.num_units / (totals.units * micro_batch.degree)))
        elif mean_over == "step":
            _check_is_share(micro_batch, loss, "the loss with mean_over='step'")
            terms.append(self._direct(loss, 1.0))
        else:
            raise InputError(f"mean_over is 'targets', 'tokens', 'units' or 'step', not {mean_over!r}")
        if side is not None:
            check_form(side, 1, "side")
            _check_is_share(micro_batch, side, "side=")
            terms.append(self._direct(side, 1.0))
        return terms

    def coupled_terms(self, micro_batch: MicroBatch, value: Tensor, side: Tensor | None) -> list[LossTerm]:
        """The terms to differentiate where the step's loss couples sequences.

        ``value``: the sum of a micro-batch's values, each times the derivative of the loss by it; equal on the ranks
        that share the micro-batch. It is no part of the loss that is reported.
        """
        self._note(micro_batch, "units")
        self.num_targets += micro_batch.num_targets
        terms = [LossTerm(value=value, weight=1 / micro_batch.degree)]
        if side is not None:
            check_form(side, 1, "side")
            _check_is_share(micro_batch, side, "side=")
            terms.append(self._direct(side, 1.0))
        return terms

    def factor(self, uses: Sequence[int], num_targets: int) -> float:
        """The factor for the summed gradient that corrects for labels which leave out targets.

        ``uses``: the :class:`Uses` of all ranks; ``num_targets``: the number of targets of all of them.

        Raises:
            InputError: some ranks have means over targets, and others other means, and targets are not counted.
        """
        union = reduce(or_, map(Uses, uses), Uses(0))
        if Uses.CHANGED in union and union & (Uses.UNITS | Uses.TOKENS):
            raise InputError(
                "a loop changed labels in place so that they have another number of targets, and means over tokens, "
                "sequences or units beside means over targets need that number before the first backward; put such "
                "labels into the items"
            )
        self._check_exact(union)
        if union & Uses.UNITS or (union & Uses.TOKENS and not union & Uses.TARGETS):
            return 1.0
        return self.totals.targets / num_targets

    def _direct(self, value: Tensor, weight: float) -> LossTerm:
        self.direct += float(value.detach()) * weight
        return LossTerm(value=value, weight=weight)

    def _note(self, micro_batch: MicroBatch, mean_over: MeanOver | None) -> None:
        means = micro_batch.means
        if mean_over in (None, "targets") or "targets" in means:
            self.uses |= Uses.TARGETS
        if mean_over == "tokens" or means & {"tokens", "sequences"}:
            self.uses |= Uses.TOKENS
        if mean_over == "units" or means & {"units", "sum"}:
            self.uses |= Uses.UNITS
        self._check_exact(self.uses)

    def _check_exact(self, uses: Uses) -> None:
        """Raise ``InputError`` if means over targets, which the update would scale, are beside others."""
        if uses & Uses.TARGETS and uses & (Uses.UNITS | Uses.TOKENS):
            self.totals.check_exact("units" if uses & Uses.UNITS else "tokens or sequences")


def _check_is_share(micro_batch: MicroBatch, value: Tensor, what: str) -> None:
    """Raise ``InputError`` unless a term is made of a micro-batch's shares of means or sums over the step."""
    shares = {share.grad_fn for share in micro_batch.shares if not isinstance(share, MissingTensor)} - {None}
    if shares and any(node in shares for node in graph_of(value)):
        return
    raise InputError(
        f"{what} is added as it is for every micro-batch and rank, however many the plan has, so it is to be made of "
        "this rank's share of a mean or a sum over the whole step: micro_batch.mean(values, over='tokens'), or "
        "micro_batch.sum(values) by a number that is the same on every rank; a penalty on weights goes with a mean "
        "over targets: step.backward(loss + penalty, mean_over='targets')"
    )
