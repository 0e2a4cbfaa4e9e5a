"""The keyword arguments of ``lengthwise.prepare`` with their types, for editors, mypy and ``help``."""

from collections.abc import Callable
from inspect import Parameter, Signature
from os import PathLike
from typing import Any, Literal, TypedDict, get_type_hints

from lengthwise.config.choices import (
    BatchSize,
    DeviceName,
    GradientDtype,
    HeldWeights,
    LrRule,
    Offload,
    OptimizerName,
    OrderName,
    OverLength,
    PacingName,
    Packing,
    PolicyName,
    Recompute,
    SequenceMethod,
    ShardGradients,
    SlicesName,
    StatePlace,
    TrainingObjective,
    ZeroBubbleName,
)
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel


class PrepareKeywords(TypedDict, total=False):
    """Keyword arguments of :func:`lengthwise.prepare`, each explained in ``PrepareOptions``."""

    policy: PolicyName | str
    max_degree: int | None
    max_stages: int | None
    max_tokens: int | None
    zero_bubble: ZeroBubbleName
    form_batches: bool
    g_min: int
    g_max: int
    memory_margin: float | None
    offload: Offload
    max_length: int | None
    over_length: OverLength
    tokens_per_step: int | None
    sequences_per_step: int | None
    order: OrderName
    window: int
    pacing: PacingName
    pacing_start: float
    pacing_stages: int
    curriculum_epochs: int | None
    seed: int
    weight_decay: float
    clip_norm: float
    lr_scaling: LrRule
    lr_scaling_by: BatchSize
    lr_reference: float | None
    loss_scale: float | None
    loss_scale_window: int
    gradient_dtype: GradientDtype
    lr_clamp: tuple[float, float] | None
    memory_gib: float | None
    host_memory_gib: float | None
    device: DeviceName
    offload_state: StatePlace
    timeout_s: float | None
    steps: int | None
    epochs: int
    metric: Any
    slot_tokens: int
    objective: TrainingObjective | None
    mask_token_id: int | None
    ignore_index: int
    layers: str | None
    inputs: Callable[..., dict[str, Any]] | None
    loss: Callable[..., Any] | None
    optimizer: OptimizerSettings | OptimizerName | Callable[[list[dict[str, Any]]], Any]
    lr: float | Callable[[int], float]
    methods: tuple[SequenceMethod, ...] | None
    packing: Packing
    weights: HeldWeights
    shard_gradients: ShardGradients
    recompute: Literal[Recompute, "selective"]
    slices: SlicesName
    feed_forward_tile: int | None
    compile: bool
    compile_backend: str
    profile: str | PathLike[str] | None
    cost: CostModel | None
    frozen: list[Any]
    loss_columns: tuple[str, ...]
    coupled_loss: Callable[[Any], Any] | None
    share_prefixes: bool
    cut_units: bool | None
    step_max_length: int | None
    count_targets: bool
    check: bool
    workers: int
    verbose: bool


def with_keywords(signature: Signature) -> Signature:
    """``signature`` with each option of ``prepare`` and its default in place of ``**options``."""
    types, fields = get_type_hints(PrepareKeywords), PrepareOptions.model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=types[name], default=default)
        for name, default in defaults.items()
    ]
    named = [part for part in signature.parameters.values() if part.kind is not Parameter.VAR_KEYWORD]
    return signature.replace(parameters=[*named, *options])
