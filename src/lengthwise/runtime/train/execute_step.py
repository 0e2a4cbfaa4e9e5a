"""One optimizer step: exactly what its plan says, on every rank, with the same collectives in the same order."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InfeasibleError, LengthwiseError, Setting
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.state.loss_scaler import LossScaler, scale_of
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.executable import check_executable
from lengthwise.runtime.train.execute_pipeline import WeightPhaseRun, make_groups, out_of_memory
from lengthwise.runtime.train.micro_batch_tensors import MicroBatchTensors, TokenSource, feed
from lengthwise.sim.schedule_check import RankOperations, WeightPhase, check_matching, operations


class StepMemoryError(InfeasibleError):
    """Ranks ran out of memory in micro-batches that each computed alone; weights are as they were before the step."""

    def __init__(self, plan: StepPlan, failures: tuple[MicroBatchFailure, ...]) -> None:
        first, self.failures = failures[0], failures
        error = out_of_memory(plan, first)
        super().__init__(error.marked, what=error.what, value=error.value, unit=error.unit)


class DivergedError(LengthwiseError):
    """The loss or the gradient of a step is not finite; weights are as they were before it."""

    def __init__(self, step: int, loss: float, norm: float, advice: str) -> None:
        self._figures = (step, loss, norm)
        super().__init__(
            f"step {step}: loss {loss} and gradient norm {norm} are not both finite; weights are unchanged since the "
            f"step before. {advice}"
        )

    def with_advice(self, advice: str) -> "DivergedError":
        """Return the error with another way out."""
        return DivergedError(*self._figures, advice)


ADVICE_IN_LOOPS = (
    "Lower lr, set clip_norm, or look at the step's sequences; a loop that goes on gets the step again, unless it "
    "calls step.skip()"
)
"""The way out for a loop of the user's own that diverged."""


def advice_at(lr: float) -> str:
    """The way out for a run of a configuration that diverged at the learning rate ``lr``."""
    return f"Lower {Setting.LR} (now {lr:.2e}), set {Setting.CLIP_NORM}, or look at the step's sequences in plans.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Loss, gradient norm and the like of one step; equal on every rank."""

    loss: float
    """Mean over the target tokens of the whole step."""
    grad_norm: float
    """Global, before clipping."""
    lr: float
    is_skipped: bool = False
    """Whether scaled gradients overflowed, so that weights are as they were; the norm is not finite then."""
    repeated_tokens: int = 0
    """Tokens that were computed more than once, because units whose sequences share prefixes were cut in parts."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None: losses are not scaled."""
    num_skipped: int = 0
    """Steps of the run so far whose scaled gradients overflowed."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, gradient norm {self.grad_norm:.3g}, learning rate {self.lr:.3g}"


@dataclass(frozen=True, kw_only=True)
class StepConsensus:
    """What all ranks share before a step: the greatest of any rank."""

    stop: int
    """Why a rank is to stop, as :class:`~lengthwise.runtime.train.stop.StopCause`; 0: none is."""
    save_failed: bool
    """A rank knows of a checkpoint that could not be written."""


def sync_step(
    plan: StepPlan, world: DistContext, clock: StepClock, *, stop: int, save_failed: bool = False
) -> StepConsensus:
    """Check that all ranks hold the same plan, set the clock's zero, and share what any rank knows. One all-gather.

    Raises:
        CheckError: the plans differ; training with them would hang or corrupt the gradient.
    """
    values = [int(plan.digest, 16) - (1 << 63), int(stop), int(save_failed), int(clock.since_start_s() * 1e9)]
    row = torch.tensor(values, dtype=torch.int64, device=world.device)
    digests, stops, failures, leads_ns = gather_rows(row).T.tolist()
    clock.align(max(leads_ns) / 1e9)
    if len(set(digests)) > 1:
        other = next(rank for rank, value in enumerate(digests) if value != digests[0])
        raise CheckError(
            f"step {plan.step}: rank {other} plans {_hex(digests[other])}, rank 0 plans {_hex(digests[0])}; "
            "the ranks see different data, profiles or versions"
        )
    return StepConsensus(stop=max(stops), save_failed=any(failures))


def _hex(digest: int) -> str:
    return f"{digest + (1 << 63):016x}"


def run_step(
    plan: StepPlan,
    model: Transformer,
    state: ShardedState,
    source: TokenSource,
    *,
    lr: float,
    clip_norm: float,
    clock: StepClock,
    masking: TokenMasking | None = None,
    feeds: Callable[[Pack], MicroBatchTensors] | None = None,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> StepResult:
    """Compute this rank's micro-batches, sum gradients over ranks, clip by the true global norm, update.

    Every target's loss weighs 1 / ``plan.loss_normaliser``, so the summed gradient is the one a single device computes
    on the whole batch, however many micro-batches each rank has (none included). ``masking``: how tokens are hidden,
    of a model that predicts masked ones. ``feeds``: where tensors come from; None: ``source`` is read when they are
    needed.

    Raises:
        InputError: the plan is for other ranks or another model.
        CheckError: its operations do not match.
        DivergedError: the loss or the gradient is not finite; weights are left as they were.
        StepMemoryError: on every rank, where one ran out of memory; weights are left as they were.
    """
    own_failures: list[MicroBatchFailure] = []
    loss = run_micro_batches(
        plan, model, state, source, clock=clock, masking=masking, feeds=feeds, schedule=schedule,
        on_oom=own_failures.append,
    )  # fmt: skip
    state.world.offload.release()
    with clock.span(SpanKind.UPDATE, "clip"):
        norm, total = state.global_norm(loss)
    if not (isfinite(norm) and isfinite(total)) and (failures := _shared_failures(own_failures, state.world)):
        state.discard_gradient()
        raise StepMemoryError(plan, failures)
    with clock.span(SpanKind.UPDATE, "optimizer"):
        return update_or_skip(state, plan.step, loss=total, norm=norm, lr=lr, clip_norm=clip_norm, advice=advice_at(lr))


class UpdatableState(Protocol):
    """Weights with a summed gradient, as far as an update uses them."""

    loss_scaler: LossScaler | None

    def step(self, *, lr: float, clip: float) -> None:
        """Scale the summed gradient by ``clip`` and update weights."""
        ...


def update_or_skip(
    state: UpdatableState,
    step: int,
    *,
    loss: float,
    norm: float,
    lr: float,
    clip_norm: float,
    advice: str,
    factor: float = 1.0,
    repeated: int = 0,
) -> StepResult:
    """Clip the summed gradient and update weights, or skip the step if its scaled gradient overflowed.

    ``norm``: that of the gradient as it was summed, which is ``factor`` times that of the step, and scaled as the loss
    was. Every rank has the same numbers, and so does the same. ``repeated``: tokens that were computed more than once.

    Raises:
        DivergedError: the loss is not finite, or the gradient is not and no lower loss scale may help.
    """
    scaler = state.loss_scaler
    factor /= scale_of(scaler)
    norm *= factor
    is_skipped = scaler is not None and scaler.can_fall and isfinite(loss) and not isfinite(norm)
    if not is_skipped and not (isfinite(norm) and isfinite(loss)):
        raise DivergedError(step, loss, norm, advice)
    if not is_skipped:
        state.step(lr=lr, clip=factor * (min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0))
    result = StepResult(loss=loss, grad_norm=norm, lr=lr, is_skipped=is_skipped, repeated_tokens=repeated)
    if scaler is None:
        return result
    scale = scaler.scale
    scaler.update(has_overflowed=is_skipped)
    return replace(result, loss_scale=scale, num_skipped=scaler.num_skipped)


def _shared_failures(own: list[MicroBatchFailure], world: DistContext) -> tuple[MicroBatchFailure, ...]:
    """Where ranks ran out of memory, the same on all of them; one all-gather."""
    places = [(failure.pipeline, failure.micro_batch, failure.host_bytes) for failure in own] or [(-1, -1, 0)]
    rows = gather_rows(torch.tensor(places[0], dtype=torch.int64, device=world.device)).tolist()
    return tuple(
        MicroBatchFailure(rank=rank, pipeline=pipeline, micro_batch=micro_batch, host_bytes=host_bytes)
        for rank, (pipeline, micro_batch, host_bytes) in enumerate(rows)
        if pipeline >= 0
    )


def run_micro_batches(
    plan: StepPlan,
    model: Transformer,
    state: ShardedState,
    source: TokenSource,
    *,
    clock: StepClock,
    masking: TokenMasking | None = None,
    feeds: Callable[[Pack], MicroBatchTensors] | None = None,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    on_oom: Callable[[MicroBatchFailure], None] = lambda failure: None,
) -> Tensor:
    """Pull, compute and push all that the plan has for this rank; its share of the step's mean loss.

    ``on_oom``: is told where this rank ran out of memory, if it did; its loss is NaN then.

    Raises:
        InputError, CheckError: as :func:`run_step`.
    """
    planned = _matched_operations(plan, model, state, schedule)
    state.clear_gradient()
    feeds = feeds or partial(feed, source, masking=masking)
    rank_run = WeightPhaseRun(plan=plan, model=model, state=state, feeds=feeds, clock=clock)
    for stretch, lists in planned:
        rank_run.run(stretch, lists[state.world.rank])
    if rank_run.failure is not None:
        on_oom(rank_run.failure)
    return rank_run.loss


def _matched_operations(
    plan: StepPlan, model: Transformer, state: ShardedState, schedule: PipelineSchedule, *, forward_only: bool = False
) -> tuple[tuple[WeightPhase, RankOperations], ...]:
    """The operations of all ranks, which are known to match, with the groups that they need."""
    check_executable(plan, model.spec, state.world.size)
    planned = operations(plan, schedule, forward_only=forward_only)
    for _, lists in planned:
        check_matching(lists, step=plan.step)
    make_groups(plan, state)
    return planned


@torch.no_grad()
def forward_loss(
    plan: StepPlan,
    model: Transformer,
    state: ShardedState,
    source: TokenSource,
    *,
    clock: StepClock,
    masking: TokenMasking | None = None,
) -> Tensor:
    """This rank's share of the mean loss of a plan, by its forwards alone: weights and gradients stay as they are.

    Raises:
        InputError, CheckError: as :func:`run_step`.
    """
    planned = _matched_operations(plan, model, state, PipelineSchedule.ONE_F_ONE_B, forward_only=True)
    feeds = partial(feed, source, masking=masking)
    rank_run = WeightPhaseRun(plan=plan, model=model, state=state, feeds=feeds, clock=clock, forward_only=True)
    for stretch, lists in planned:
        rank_run.run(stretch, lists[state.world.rank])
    return rank_run.loss
