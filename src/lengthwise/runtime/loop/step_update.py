"""The update of a step that all ranks computed: weighed, clipped and taken, or skipped where nothing has a loss."""

import logging
from math import nan

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.loop.call_order import RankReports, float_of
from lengthwise.runtime.loop.loss_weighing import Uses, Weighing
from lengthwise.runtime.loop.run_state import RunState
from lengthwise.runtime.loop.update_reports import without_loss
from lengthwise.runtime.train.execute_step import ADVICE_IN_LOOPS, StepResult, update_or_skip

_log = logging.getLogger("lengthwise")


def result_of(run: RunState, plan: StepPlan, weighing: Weighing, reports: RankReports, *, lr: float) -> StepResult:
    """Update weights, and return what all ranks report of the step.

    Raises:
        InputError: losses do not fit together.
        LengthwiseError: loss or gradient is not finite, or too many steps in a row have no loss.
    """
    loss, num_targets = sum(map(float_of, reports.column(0))), sum(reports.column(1))
    has_loss = num_targets > 0 or any(uses & (Uses.UNITS | Uses.TOKENS) for uses in reports.column(12))
    if not run.ledger.may_go_on(has_loss=has_loss):
        raise LengthwiseError(without_loss(plan, run.collator))
    if not has_loss:
        run.skipped.append(plan.step)
        if run.world.is_first:
            _log.warning("%s", without_loss(plan, run.collator, is_skipped=True))
        return StepResult(loss=nan, grad_norm=0.0, lr=lr, is_skipped=True)
    # The plan counts targets by lengths; where labels leave out others, the weights are set right here.
    try:
        factor = weighing.factor(reports.column(12), num_targets)
    except InputError as error:
        raise InputError(f"step {plan.step}: {error.marked}") from None
    norm = run.state.global_norm(weighing.by_target.new_zeros(()))[0]
    if norm == 0.0:
        _note_zero_gradient(run, plan)
    mean = loss / max(1, num_targets) + factor * sum(map(float_of, reports.column(11)))
    return update_or_skip(
        run.state, plan.step, loss=mean, norm=norm, lr=lr, clip_norm=run.clip_norm, factor=factor,
        advice=ADVICE_IN_LOOPS, repeated=run.collator.repeated_tokens,
    )  # fmt: skip


def _note_zero_gradient(run: RunState, plan: StepPlan) -> None:
    """Count an update without a gradient, and warn of the run's first one."""
    run.ledger.zero_gradients += 1
    if run.ledger.zero_gradients == 1 and run.world.is_first:
        _log.warning(
            "step %d: the gradient of every trained weight is exactly 0, so the step changes no more than weight decay "
            "and momentum do. That is right if its losses weigh nothing, as those of a group of equal rewards; if not, "
            "see whether a hook, detach() or no_grad() cuts the loss off from the weights (not said again)", plan.step,
        )  # fmt: skip
