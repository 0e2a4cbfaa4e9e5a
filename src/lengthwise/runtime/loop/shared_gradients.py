"""Gradients that ranks which share a prepared model's micro-batches reduce to shares, in every backward."""

from collections.abc import Iterable

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import GradientShare
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.loop.run_state import MicroBatchMaker, RunState
from lengthwise.runtime.state.gradient_shares import GRADIENT_SHARES
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.update_overlap import UpdateOverlap, WatchedBackward
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.zero_collectives import finish_backward, finish_micro_batch


def shares_of_step(plan: StepPlan) -> list[GradientShare | None]:
    """What each rank keeps of gradients during a step; None: all.

    Raises:
        InputError: a rank would have to keep others in another phase.
    """
    shares_of: list[set[GradientShare | None]] = [set() for _ in range(plan.num_devices)]
    for pipeline in plan.pipelines:
        for rank in pipeline.ranks if pipeline.micro_batches else ():
            place = pipeline.ranks_of(stage_of(pipeline, rank)).index(rank)
            shares_of[rank].add(pipeline.scheme.gradient_share(place))
    for rank, shares in enumerate(shares_of):
        if len(shares) > 1:
            raise InputError(
                f"plan for step {plan.step}: rank {rank} would keep other shares of gradients in each phase, which "
                "this library's own models alone can; plan with shard_gradients=false"
            )
    return [next(iter(shares), None) for shares in shares_of]


def lay_out(run: RunState, plan: StepPlan) -> None:
    """Let ranks keep what the plan says of gradients; every rank calls this. Weights stay where they are.

    Where weights are gathered by layer, gradients go to their owners in every backward in any case.

    Raises:
        InputError: this run cannot.
    """
    state, is_staged = run.state, any(pipeline.scheme.num_stages > 1 for pipeline in plan.pipelines)
    problems = {
        "FSDP2 shards the model": not isinstance(state, ShardedState),
        "weights of stages are gathered for a whole step": run.gather is not None and is_staged,
    }
    problem = next((problem for problem, applies in problems.items() if applies), "")
    if problem and any(pipeline.scheme.shard_gradients for pipeline in plan.pipelines):
        raise InputError(
            f"plan for step {plan.step} shards gradients over the ranks of a stage, and {problem}; plan with "
            "shard_gradients=false"
        )
    if isinstance(state, ShardedState) and run.gather is None and run.world.size > 1:
        assert state.holdings is not None, "every rank holds all weights"
        state.hold(state.holdings, shares_of_step(plan))


def end_backward(overlap: UpdateOverlap | None, shard: PackShard) -> None:
    """End the backward of a micro-batch: its gradients are reduced, if ranks keep shares of them.

    One that failed goes through what is left of it, and not before: the error holds on to what was computed.
    """
    if shard.has_failed and overlap is not None:
        overlap.abandon_backward(shard.watched)
    if shard.has_failed:
        finish_backward(shard)
    if overlap is not None:
        overlap.finish_backward(shard.watched)


def leave_micro_batch(overlap: UpdateOverlap | None, shard: PackShard, scripts: Iterable[ExchangeScript]) -> None:
    """Send zeros for all that is left of a micro-batch in which models with these scripts are called."""
    if shard.is_finished:
        return
    if overlap is not None:
        overlap.abandon_backward(shard.watched)
    finish_micro_batch(shard, scripts)
    if overlap is not None:
        overlap.finish_backward(shard.watched)


def watched_backward(run: MicroBatchMaker, pipeline: Pipeline, *, is_last: bool) -> WatchedBackward | None:
    """What is watched of the backward of a micro-batch of a pipeline; ``is_last``: on this rank. None: nothing."""
    scheme, stage = pipeline.scheme, stage_of(pipeline, run.world.rank)
    is_shared = scheme.shard_gradients and run.wrapped_model.layers.gather is None
    if not is_last and not is_shared:
        return None
    group = run.world.groups.of(pipeline.ranks_of(stage), GRADIENT_SHARES) if is_shared else None
    return WatchedBackward(is_last=is_last, group=group, layers=scheme.layers_of_stage(stage))


def stage_of(pipeline: Pipeline, rank: int) -> int:
    """The stage that a rank computes in a pipeline."""
    return next(stage for stage in range(pipeline.scheme.num_stages) if rank in pipeline.ranks_of(stage))
