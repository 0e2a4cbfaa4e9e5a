"""Which plans this runtime executes; the others are refused before anything runs."""

from lengthwise.core.errors import InputError
from lengthwise.core.plan import StepPlan
from lengthwise.core.scheme import Weights


def check_executable(plan: StepPlan, num_ranks: int, *, shard_degree: int) -> None:
    """Raise ``InputError`` naming the field of ``plan`` that the runtime cannot execute yet, or the wrong world.

    ``shard_degree``: neighbouring ranks that hold the weights together; 1 where every rank holds them whole.
    """
    if plan.num_devices != num_ranks:
        raise InputError(f"plan for step {plan.step} is for {plan.num_devices} ranks, the run has {num_ranks}")
    for number, pipeline in enumerate(plan.pipelines):
        scheme, where = pipeline.scheme, f"plan for step {plan.step}: pipelines[{number}]"
        if scheme.num_stages > 1:
            raise InputError(f"{where}.scheme.stage_layers={scheme.stage_layers} is not executable yet; use one stage")
        wanted = scheme.degree if scheme.weights is Weights.SHARDED else 1
        if wanted != shard_degree:
            held = f"sharded over {shard_degree} ranks" if shard_degree > 1 else "whole"
            raise InputError(
                f"{where}.scheme needs its weights {scheme.weights} at degree {scheme.degree}, the run holds them "
                f"{held}; weights cannot change their layout within a run yet. Set plan.method and plan.degree"
            )
        first = pipeline.ranks[0]
        if pipeline.ranks != tuple(range(first, first + scheme.degree)) or (wanted > 1 and first % wanted):
            raise InputError(
                f"{where}.ranks={pipeline.ranks} are not executable yet; use {scheme.degree} neighbouring ranks, the "
                f"first a multiple of {scheme.degree}"
            )
