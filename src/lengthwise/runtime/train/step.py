"""One optimizer step: exactly what its plan says, on every rank, with the same collectives in the same order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, LengthwiseError
from lengthwise.core.plan import MicroBatch, Pipeline, StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import World
from lengthwise.runtime.model.base import Transformer
from lengthwise.runtime.model.targets import Masking
from lengthwise.runtime.parallel.execution import StageExecution
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock, bytes_in_use
from lengthwise.runtime.train.executable import check_executable
from lengthwise.runtime.train.feed import Feed, TokenSource, feed


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step computed; equal on every rank."""

    loss: float
    """Mean over the target tokens of the whole step."""
    grad_norm: float
    """Global, before clipping."""
    lr: float


def agree(plan: StepPlan, world: World, clock: StepClock, *, stop: bool) -> bool:
    """Check that all ranks hold the same plan, set the clock's zero, and tell whether any rank was asked to stop.

    Raises:
        CheckError: the plans differ; training with them would hang or corrupt the gradient.
    """
    digest = int(plan.digest, 16) - (1 << 63)
    row = torch.tensor([digest, int(stop), int(clock.since_start_s() * 1e9)], dtype=torch.int64, device=world.device)
    digests, stops, leads_ns = gather_rows(row).T.tolist()
    clock.align(max(leads_ns) / 1e9)
    if len(set(digests)) > 1:
        other = next(rank for rank, value in enumerate(digests) if value != digests[0])
        raise CheckError(
            f"step {plan.step}: rank {other} plans {_hex(digests[other])}, rank 0 plans {_hex(digests[0])}; "
            "the ranks see different data, profiles or versions"
        )
    return any(stops)


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
    masking: Masking | None = None,
) -> StepResult:
    """Compute this rank's micro-batches, sum gradients over ranks, clip by the true global norm, update.

    Every target's loss weighs 1 / ``plan.loss_normaliser``, so the summed gradient is the one a single device computes
    on the whole batch, however many micro-batches each rank has (none included). ``masking``: how tokens are hidden,
    of a model that predicts masked ones.

    Raises:
        InputError: the plan is not executable yet.
        LengthwiseError: the loss or the gradient is not finite; weights are left as they were.
    """
    world = state.world
    check_executable(plan, world.size, shard_degree=state.degree)
    loss = run_micro_batches(plan, model, world, source, clock=clock, masking=masking)
    with clock.span(SpanKind.COMMUNICATE, "push"):
        state.push()
    with clock.span(SpanKind.UPDATE, "clip"):
        norm, total = state.global_norm(loss)
    if not (torch.isfinite(torch.tensor([norm, total])).all()):
        raise LengthwiseError(
            f"step {plan.step}: loss {total} and gradient norm {norm} are not both finite; weights are unchanged since "
            f"the step before. Lower optim.lr (now {lr:.2e}), set optim.clip_norm, or look at the step's sequences in "
            "plans.jsonl"
        )
    with clock.span(SpanKind.UPDATE, "optimizer"):
        state.step(lr=lr, clip=min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0)
    with clock.span(SpanKind.COMMUNICATE, "pull"):
        state.pull()
    return StepResult(loss=total, grad_norm=norm, lr=lr)


def run_micro_batches(
    plan: StepPlan,
    model: Transformer,
    world: World,
    source: TokenSource,
    *,
    clock: StepClock,
    masking: Masking | None = None,
) -> Tensor:
    """Forward and backward of this rank's micro-batches in the plan's order; its share of the step's mean loss."""
    groups = {pipeline.ranks: world.groups.of(pipeline.ranks) for pipeline in plan.pipelines}
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    pipelines = [plan.pipeline_of(world.rank, phase) for phase in range(plan.num_phases)]
    work = [(pipeline, micro_batch) for pipeline in pipelines for micro_batch in pipeline.micro_batches]
    for number, (pipeline, micro_batch) in enumerate(work):
        with clock.span(SpanKind.DATA, f"micro-batch {number}"):
            fed = feed(source, micro_batch.pack, world.device, masking=masking)
        with clock.span(SpanKind.COMPUTE, f"micro-batch {number}"):
            part = _forward(model, fed, pipeline, micro_batch, groups[pipeline.ranks]) / plan.loss_normaliser
            part.backward()
            loss += part.detach()
        clock.sample_memory(bytes_in_use(world.device))
    return loss


def _forward(model: Transformer, fed: Feed, pipeline: Pipeline, micro_batch: MicroBatch, group: Group | None) -> Tensor:
    """Sum of the losses of this rank's tokens of a micro-batch."""
    scheme = pipeline.scheme
    recompute = scheme.recompute if micro_batch.recompute is None else micro_batch.recompute
    if scheme.degree == 1:
        loss: Tensor = model(fed.tokens_T, fed.cu_seqlens, fed.targets_T, recompute=recompute)
        return loss
    assert group is not None, "a rank computes in pipelines that it is in"
    execution = StageExecution(
        model,
        group,
        tokens_T=fed.tokens_T,
        targets_T=fed.targets_T,
        cu_seqlens=fed.cu_seqlens,
        methods=scheme.methods if micro_batch.methods is None else micro_batch.methods,
        weights=scheme.weights,
        recompute=recompute,
    )
    return model.run(execution)
