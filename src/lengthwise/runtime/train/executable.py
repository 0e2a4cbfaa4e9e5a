"""Which plans a run can execute; the others are refused before anything runs."""

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan


def check_executable(plan: StepPlan, spec: ModelSpec, num_ranks: int) -> None:
    """Raise ``InputError`` naming what of ``plan`` does not fit this model or this many ranks."""
    where = f"plan for step {plan.step}"
    if plan.num_devices != num_ranks:
        raise InputError(
            f"{where} is for {plan.num_devices} ranks, the run has {num_ranks}; plan again for {num_ranks}"
        )
    for number, pipeline in enumerate(plan.pipelines):
        scheme, named = pipeline.scheme, f"{where}: pipelines[{number}].scheme"
        if scheme.num_layers != spec.num_layers:
            raise InputError(
                f"{named}.stage_layers={scheme.stage_layers} hold {scheme.num_layers} layers, model {spec.name} has "
                f"{spec.num_layers}; plan again for this model"
            )
        groups = max((pipeline.scheme_of(m).head_groups for m in pipeline.micro_batches), default=1)
        if groups > -(-spec.num_heads // scheme.degree):
            raise InputError(
                f"{named}: {groups} groups of heads, but each of {scheme.degree} ranks has at most "
                f"{-(-spec.num_heads // scheme.degree)} of the {spec.num_heads} heads of model {spec.name}; lower "
                "head_groups"
            )
        if not spec.causal and any(micro_batch.slices for micro_batch in pipeline.micro_batches):
            raise InputError(
                f"{named}: micro-batches are cut into slices, which see what is before them alone, and tokens of model "
                f"{spec.name} also see later ones; plan again with {Setting.SLICES}=none"
            )
        used = {method for micro_batch in pipeline.micro_batches for method in pipeline.methods_of(micro_batch)}
        if Method.MEGATRON_TS in used and scheme.degree > spec.num_kv_heads:
            raise InputError(
                f"{named}: megatron_ts at degree {scheme.degree} needs as many key/value heads, model {spec.name} has "
                f"{spec.num_kv_heads}; choose a lower degree or another method"
            )


def check_undivided(pipeline: Pipeline, where: str) -> None:
    """Raise ``InputError`` if a pipeline computes a layer in parts, one after the other, as compiled layers do not."""
    schemes = [pipeline.scheme_of(micro_batch) for micro_batch in pipeline.micro_batches]
    if any(scheme.tile_tokens or scheme.head_groups > 1 for scheme in schemes):
        raise InputError(
            f"{where} computes in tiles of tokens or groups of heads, and compiled layers compute all at once; plan "
            f"tile_tokens=0 and head_groups=1, or set {Setting.COMPILE}=false"
        )


def check_compiled(plan: StepPlan) -> None:
    """Raise ``InputError`` naming the first pipeline of ``plan`` whose layers are not compiled."""
    for number, pipeline in enumerate(plan.pipelines):
        check_undivided(pipeline, f"{Setting.COMPILE}=true: plan for step {plan.step}: pipelines[{number}]")
        if any(micro_batch.slices for micro_batch in pipeline.micro_batches):
            raise InputError(
                f"{Setting.COMPILE}=true: plan for step {plan.step}: pipelines[{number}] cuts micro-batches "
                "into slices, and compiled layers compute all tokens at once; plan again with "
                f"{Setting.SLICES}=none, or set {Setting.COMPILE}=false"
            )
        if pipeline.scheme.zero_bubble:
            raise InputError(
                f"{Setting.COMPILE}=true: plan for step {plan.step}: pipelines[{number}] splits backwards, "
                f"and those of compiled layers are whole; plan with zero_bubble=false, or set {Setting.COMPILE}=false"
            )
        if pipeline.scheme.weights is WeightPlacement.SHARDED and pipeline.scheme.degree > 1:
            raise InputError(
                f"{Setting.COMPILE}=true: plan for step {plan.step}: pipelines[{number}] shares layers by "
                f"{pipeline.scheme.methods[0]}, which gathers weights while it computes; such layers are not compiled. "
                f"Plan ulysses, ring or dense, or set {Setting.COMPILE}=false"
            )
