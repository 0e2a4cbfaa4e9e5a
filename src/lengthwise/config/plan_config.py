"""The settings of ``cluster`` and ``plan``: the devices, and how each step is planned for them."""

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from lengthwise.config.choices import (
    CostFit,
    MethodName,
    PipelineTime,
    Recompute,
    ShardGradients,
    SharingMethod,
    SlicesName,
)
from lengthwise.config.limits import MAX_SEQUENCES, NumDevices
from lengthwise.config.shared_settings import MemorySetting, PolicySettings


class ClusterConfig(MemorySetting):
    """The devices whose memory limits plans and whose speed prices them."""

    name: str = ""
    """The cluster, such as 8x8xA800-80GB; empty: the devices that train finds."""


class PlanConfig(PolicySettings):
    """How each step is planned: parallelism, gradient accumulation, activation checkpointing, load balancing."""

    file: str = ""
    """Plans to execute, made by `lengthwise plan --out` or by hand; empty: each step is planned."""
    profile: str = ""
    """A file of measurements made by `lengthwise profile`; empty: costs are analytic. (prepare measures by itself, and
    keeps its measurements in the file that this names.)"""
    cost: CostFit = "fitted"
    """The cost model made from the profile: a l^2 + b l + c, or a random forest (extra: learned). (prepare takes a
    cost model as an object.)"""
    batch_size: int | None = Field(default=None, ge=1, le=MAX_SEQUENCES)
    """The micro-batch size of `padded`, in sequences; none: the fastest that fits."""
    one_shape: bool = False
    """Whether `padded` gives all micro-batches of a step one shape, for static compilation."""
    method: Literal["", MethodName] = ""
    """The parallel method by which devices share every layer; empty: whatever is fastest of methods; random: drawn anew
    for every layer and micro-batch."""
    methods: tuple[SharingMethod, ...] | None = None
    """Instead of method: the parallel methods that plans choose from, such as [ulysses, metp]; those on sharded weights
    (metp, megatron_ts, megatron_cz, ulysses_z, colossal_z) also from layer to layer. none: with the policy paradyse
    those five; else ulysses, ring and megatron_ts, and those five too where the longest sequence needs them or typical
    steps are faster by them. (prepare has only methods that share sequences.)"""
    smoothing: float = Field(default=0.05, ge=0, le=1)
    """The share of a pack's time that `paradyse` may lose so that packs of like sizes run the same methods (gamma)."""
    degree: NumDevices | None = None
    """The sequence, context or tensor parallel size, exactly; none: any up to max_degree."""
    recompute: Recompute = "auto"
    """Activation checkpointing: which layers are computed again in the backward; auto: as few as a micro-batch needs
    to fit, some of them with what attention computed kept, where that pays. (prepare also knows selective, which keeps
    it in all of them.)"""
    tile_tokens: int | None = Field(default=None, ge=0, le=1 << 30)
    """Tokens that a rank's feed-forwards compute at a time, again in the backward; 0: all; none: all, and 4096 where
    that pays or longer sequences need it. (prepare has feed_forward_tile.)"""
    shard_gradients: ShardGradients = "auto"
    """Gradient sharding, as ZeRO stage 2 does it within a pipeline stage: whether ranks that share a layer with whole
    weights reduce-scatter its gradients in every backward and keep a share of them; auto: where longer micro-batches
    gain more than that costs; all: wherever several ranks share whole weights; none: nowhere. (In prepare, none by
    default.)"""
    slices: SlicesName = "auto"
    """Whether stages may compute micro-batches in slices of tokens, one after another, so that a long sequence leaves
    the bubble of a slice, in less memory than 1F1B; auto: whichever is faster; none: whole micro-batches. (Compiled
    layers and runs with shapes have whole ones; in prepare, none by default.)"""
    local_sequences: bool = False
    """Whether short sequences of a micro-batch that several devices share may each be whole on one of them, where only
    keys and values are exchanged: nothing of them is sent then. (Models that transformers computes, prepare, compiled
    layers and runs with shapes share all sequences.)"""
    objective: PipelineTime = "flow-shop"
    """How the time of a pipeline is reckoned; max-times-count: Hydraulis Eq. (1). (In prepare, objective is what the
    model learns, which here the model's preset decides.)"""
    overlap: float | None = Field(default=None, ge=0, le=1)
    """The share of every update that plans take to run beneath computation, as `lengthwise compare --overlap`; null: as
    the passes of each pipeline, what they exchange, and what is moved when say."""
    shapes: int | None = Field(default=None, ge=1, le=1024)
    """The most sizes of micro-batches, which are filled up with padding; none: micro-batches have any size."""
    workers: int | None = Field(default=None, ge=0, le=64)
    """The processes per rank that plan ahead; 0: none; none: on GPUs as many as a rank has further
    cores, 1 to 4; 0 on CPUs. (In prepare, workers are processes that read items, as those of a DataLoader.)"""
    look_ahead: int = Field(default=4, ge=1, le=1024)
    """The number of steps that workers plan ahead of training."""

    @field_validator("methods", mode="before")
    @classmethod
    def _split_names(cls, methods: Any, info: ValidationInfo) -> Any:
        """Take ``ulysses,metp`` as well as a list."""
        if methods is not None and (method := info.data.get("method")):
            raise ValueError(f"nothing may be set beside plan.method={method}")
        if methods in ([], (), ""):
            raise ValueError("at least one method is needed")
        return [name.strip() for name in methods.split(",")] if isinstance(methods, str) else methods
