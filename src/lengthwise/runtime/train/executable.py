"""Which plans this runtime executes; the others are refused before anything runs."""

from lengthwise.core.errors import InputError
from lengthwise.core.plan import StepPlan


def check_executable(plan: StepPlan, num_ranks: int) -> None:
    """Raise ``InputError`` naming the field of ``plan`` that the runtime cannot execute yet, or the wrong world."""
    if plan.num_devices != num_ranks:
        raise InputError(f"plan for step {plan.step} is for {plan.num_devices} ranks, the run has {num_ranks}")
    for number, pipeline in enumerate(plan.pipelines):
        where = f"plan for step {plan.step}: pipelines[{number}].scheme"
        if pipeline.scheme.num_stages > 1:
            raise InputError(
                f"{where}.stage_layers={pipeline.scheme.stage_layers} is not executable yet; use one stage"
            )
        if pipeline.scheme.degree > 1:
            raise InputError(f"{where}.degree={pipeline.scheme.degree} is not executable yet; use degree 1")
