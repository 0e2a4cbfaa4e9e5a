"""What a step's losses weigh, and what the step's loss is, from what each micro-batch hands to its backward."""

from collections.abc import Sequence
from enum import IntFlag

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.loss_backward import LossTerm
from lengthwise.runtime.wrap.loss_check import MeanOver, check_form
from lengthwise.runtime.wrap.loss_terms import LossTotals
from lengthwise.runtime.wrap.micro_batch import MicroBatch


class Uses(IntFlag):
    """What losses of a step are means over, as far as the number of targets matters for it."""

    TARGETS = 1
    UNITS = 2


class Weighing:
    """The losses of this rank's micro-batches in one step."""

    def __init__(self, totals: LossTotals, device: torch.device) -> None:
        self.totals = totals
        self.by_target = torch.zeros((), dtype=torch.float64, device=device)
        """Losses that are means over targets, times their numbers."""
        self.direct = 0.0
        """Shares of means over the step."""
        self.num_targets = 0
        self.uses = Uses(0)

    def terms(
        self, micro_batch: MicroBatch, loss: Tensor, side: Tensor | None, mean_over: MeanOver | None
    ) -> list[LossTerm]:
        """What is differentiated, with the weights in the step; a mean over nothing, 0 / 0, is left out.

        Raises:
            InputError: a number that the weights need is not known yet, or ``mean_over`` is no such word.
        """
        totals, count, terms = self.totals, micro_batch.num_targets, list[LossTerm]()
        self._note(micro_batch, mean_over)
        self.num_targets += count
        if mean_over in (None, "targets"):
            if count:
                terms.append(LossTerm(value=loss, weight=count / totals.targets))
                self.by_target += loss.detach().double() * count
        elif mean_over == "tokens":
            totals.check_exact("tokens")
            if num_slots := int((micro_batch.shard.sequences >= 0).sum()):
                terms.append(self._direct(loss, num_slots / totals.slots))
        elif mean_over == "units":
            terms.append(self._direct(loss, len(micro_batch.units) / (totals.units * micro_batch.degree)))
        elif mean_over == "step":
            terms.append(self._direct(loss, 1.0))
        else:
            raise InputError(f"mean_over is 'targets', 'tokens', 'units' or 'step', not {mean_over!r}")
        if side is not None:
            check_form(side, 1, "side")
            terms.append(self._direct(side, 1.0))
        return terms

    def factor(self, uses: Sequence[int], num_targets: int) -> float:
        """What the summed gradient is scaled with, for targets that the totals did not know of.

        ``uses``: of all ranks; ``num_targets``: of all of them.

        Raises:
            InputError: some ranks have means over targets, and others over units, and targets are not counted.
        """
        if not any(Uses.UNITS in Uses(of_rank) for of_rank in uses):
            return self.totals.targets / num_targets
        if any(Uses.TARGETS in Uses(of_rank) for of_rank in uses):
            self.totals.check_exact("units")
        return 1.0

    def _direct(self, value: Tensor, weight: float) -> LossTerm:
        self.direct += float(value.detach()) * weight
        return LossTerm(value=value, weight=weight)

    def _note(self, micro_batch: MicroBatch, mean_over: MeanOver | None) -> None:
        means = micro_batch.means
        if mean_over in (None, "targets") or "targets" in means or (mean_over == "step" and not means):
            self.uses |= Uses.TARGETS
        if mean_over == "units" or "units" in means:
            self.uses |= Uses.UNITS
        if self.uses == Uses.TARGETS | Uses.UNITS:
            self.totals.check_exact("units")
