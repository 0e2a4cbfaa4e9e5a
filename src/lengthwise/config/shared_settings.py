"""Settings that configuration files and ``lengthwise.prepare`` have in common: one name, type, default and meaning."""

import re
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from lengthwise.config.choices import (
    BatchSize,
    DeviceName,
    GradientDtype,
    LrRule,
    Offload,
    OrderName,
    OverLength,
    PacingName,
    Policy,
    StatePlace,
    ZeroBubbleName,
)
from lengthwise.config.limits import (
    MAX_TEXT,
    MOST_BLOCKS,
    WINDOW,
    ClipNorm,
    LrFactor,
    NumDevices,
    NumSequences,
    NumTokens,
)
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.wording import parse_tokens

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def said_of(kind: str, message: str) -> str:
    """What pydantic says of a wrong value, ``kind`` its type of error, in words that need no Python."""
    if kind == "tuple_type":
        return "A list is needed, such as '[first, second]'"
    if kind == "string_pattern_mismatch":  # the name of a run
        return "Letters, digits, - and _ are needed, also . but not first"
    return message.removeprefix("Value error, ")


class Settings(BaseModel):
    """Frozen settings whose documentation stands below each of them; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    multiline: ClassVar[tuple[str, ...]] = ()
    """Settings whose text may have several lines."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would take: true and false as numbers, and text that no path or name can hold; null is
        text left empty.
        """
        if value is None and info.field_name is not None and cls.model_fields[info.field_name].default == "":
            return ""
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, bool) for part in values) and not cls._takes_bool(info.field_name):
            raise ValueError(f"{cls._needed(info.field_name)}; true and false (also yes, no, on, off) are neither")
        for text in values:
            lines = text.split("\n") if isinstance(text, str) and info.field_name in cls.multiline else [text]
            if isinstance(text, str) and (len(text) > MAX_TEXT or any(map(_UNPRINTABLE.search, lines))):
                raise ValueError(f"text has at most {MAX_TEXT:,} characters and no control characters")
        if isinstance(value, str) and "e" in value.lower() and cls._takes_whole(info.field_name):
            number = parse_tokens(value)  # 1e6, which is text to YAML
            return value if number is None else number
        return value

    @classmethod
    def _needed(cls, name: str | None) -> str:
        """What a setting takes: one of some words, or a number or text."""
        words = get_args(cls.model_fields[name].annotation) if name is not None else ()
        if not words or not all(isinstance(word, str) for word in words):
            return "a number or text is needed"
        return f"one of {', '.join(map(repr, words))} is needed"

    @classmethod
    def _takes_whole(cls, name: str | None) -> bool:
        """Whether a setting is a whole number, or none."""
        kind = cls.model_fields[name].annotation if name is not None else None
        parts = [get_args(part)[0] if get_origin(part) is Annotated else part for part in get_args(kind) or (kind,)]
        return set(parts) - {NoneType} == {int}

    @classmethod
    def _takes_bool(cls, name: str | None) -> bool:
        return name is not None and cls.model_fields[name].annotation in (bool, bool | None, Any)


class SeedSetting(Settings):
    """The seed of everything that is random."""

    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """The seed of the data order, of initial weights, of masks and of dropout."""


class BatchSettings(Settings):
    """Which sequences share an optimizer step."""

    max_length: NumTokens | None = None
    """The longest sequence that is trained on, in tokens; none: there is no limit."""
    over_length: OverLength = "error"
    """What happens to sequences longer than max_length. How many there were is counted in ledger.json."""
    tokens_per_step: NumTokens | None = None
    """Token budget of a global batch; 65,536 where neither budget is set."""
    sequences_per_step: NumSequences | None = None
    """Instead of tokens_per_step: the number of sequences of a global batch."""


class OrderingSettings(Settings):
    """The order in which an epoch's sequences come, and its curriculum."""

    order: OrderName = "shuffled"
    """The data order of an epoch. shuffled: random; corpus: as indexed; sorted: by metric; curriculum: from easy to
    hard with a pacing; windowed: random batches of sequences that a window sorted by metric."""
    window: NumSequences = WINDOW
    """How many sequences windowed sorts at a time."""
    pacing: PacingName = "root"
    """How, in a curriculum, the share of the corpus grows that sequences are drawn from."""
    pacing_start: float = Field(default=0.1, gt=0, le=1)
    """The share of the corpus that a curriculum draws from at the beginning of an epoch."""
    pacing_stages: int = Field(default=5, ge=1, le=MOST_BLOCKS)
    """With the pacing step, how often the share grows; with natural, the number of groups by metric."""
    curriculum_epochs: int | None = Field(default=None, ge=1, le=1_000_000)
    """The number of epochs with the curriculum, after which epochs are shuffled; none: all."""


class PolicySettings(Settings):
    """Who plans steps, and within which parallel sizes."""

    policy: Policy = "auto"
    """The scheduling policy that plans each step: its pipelines, gradient accumulation, activation checkpointing and
    load balancing. auto searches all others and is never predicted to be slower, by more than the error of the costs
    where these are measured. MODULE:FUNCTION is one of your own;
    packages register theirs by name, as entry points lengthwise.policies."""
    max_degree: NumDevices | None = None
    """The most devices that share a layer: the largest sequence, context or tensor parallel size; none: as many as the
    run has, and as its costs are known for."""
    max_stages: NumDevices | None = None
    """The most pipeline stages: the largest pipeline parallel size; none: as many as the run has devices and the model
    layers, up to 8, and as its costs are known for; one where a model cannot be cut."""
    max_tokens: NumTokens | None = None
    """The most tokens of a micro-batch, padding included; none: what memory holds."""
    zero_bubble: ZeroBubbleName = "auto"
    """Zero-bubble pipeline parallelism (ZB-H1): whether stages split backwards, send gradients of inputs on at once and
    compute gradients of weights where they would wait, in the memory of 1F1B; auto: whichever is faster; none: all
    pipelines run 1F1B; all: wherever stages have whole weights and some layers are not recomputed. (Compiled
    layers and schedule gpipe have whole backwards.)"""
    form_batches: bool = False
    """Whether dcp-inter and dcp-intra choose which sequences share a step, from the next eight batches: groups balance
    better, and the order of learning depends on lengths and cluster."""
    g_min: int = Field(default=1, ge=1, le=1 << 20)
    """With form_batches: where no group accumulates as many micro-batches, every group's number is multiplied until one
    does (DCP's G_min)."""
    g_max: int = Field(default=5, ge=1, le=1 << 20)
    """With form_batches, the number of micro-batches that the slowest group accumulates at most (DCP's G_max)."""
    memory_margin: float | None = Field(default=None, ge=0, lt=1)
    """The share of each device's memory that plans leave free for fragmentation and workspaces, beside what the
    context and libraries take of a GPU; none: 0.06 of a GPU, 0 of a CPU. memory_gib is used to the full."""
    offload: Offload = "auto"
    """Activation offload: whether what layers save for their backward (of recomputed ones their input) is in host
    memory meanwhile; auto: of as many layers as pays or longer sequences need, none on a CPU; all: of every layer."""

    @field_validator("form_batches")
    @classmethod
    def _check_policy_forms(cls, form_batches: bool, info: ValidationInfo) -> bool:
        policy = info.data.get("policy")
        if form_batches and policy not in (None, "dcp-inter", "dcp-intra"):
            raise ValueError(f"the policy {policy} takes batches as they come; use dcp-intra or dcp-inter")
        return form_batches


class MemorySetting(Settings):
    """The device's memory, and its share of the host's."""

    memory_gib: float | None = Field(default=None, gt=0, le=1 << 20)
    """Memory of each device that plans may fill, in GiB; none: what the device has."""
    host_memory_gib: float | None = Field(default=None, ge=0, le=1 << 20)
    """Memory of the host that plans may fill for each device, in GiB; none: nine tenths of its share of what such a
    machine has."""


class UpdateSettings(Settings):
    """Weight decay, clipping, and how the learning rate follows batches."""

    weight_decay: float = Field(default=0.1, ge=0, le=1000)
    """Decoupled weight decay of matrices; norms and biases never decay. Left out, an optimizer that a class or function
    makes in `prepare` decays as it says."""
    clip_norm: ClipNorm = 1.0
    """The limit that the global gradient norm is clipped to; 0, none and inf: gradients are not clipped."""
    lr_scaling: LrRule = "none"
    """How the learning rate follows the size of each step's batch."""
    lr_scaling_by: BatchSize = "tokens"
    """What lr_scaling counts as the size of a batch; targets are tokens that have a loss."""
    lr_reference: float | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """The batch size that lr is meant for; none: the size of a batch of sequences of mean length."""
    loss_scale: float | None = Field(default=None, ge=2.0**-16, le=2.0**64)
    """Loss scaling, as torch.amp.GradScaler does it: the first scale, which halves where gradients overflow and doubles
    after loss_scale_window steps without. A step that overflows is skipped on all ranks; none: 65,536 where the model
    computes in float16, else losses are not scaled."""
    loss_scale_window: int = Field(default=2000, ge=1, le=1 << 40)
    """The number of steps in a row without an overflow after which the loss scale doubles."""
    gradient_dtype: GradientDtype = "master"
    """The precision that gradients are added up in. master: float32 or above; compute: that of the weights that the
    model computes with, in half the memory and traffic where it has 16 bits, but sums are rounded to it."""
    lr_clamp: tuple[LrFactor, LrFactor] | None = None
    """The least and the most that lr_scaling multiplies the learning rate by, such as [0.25, 4]; none: any factor."""

    @field_validator("lr_clamp")
    @classmethod
    def _check_clamp(cls, clamp: tuple[float, float] | None) -> tuple[float, float] | None:
        if clamp is not None and not (clamp[0] <= clamp[1] and clamp[1] > 0):
            raise ValueError("the least factor comes first, then the most, which is above 0")
        return clamp


class ProcessSettings(Settings):
    """The device of each rank, where its optimizer state lies, and how long ranks wait for one another."""

    device: DeviceName = "auto"
    """The kind of device that ranks compute on; auto: GPUs if there are any."""
    offload_state: StatePlace = "auto"
    """Where master weights, summed gradients and the optimizer's state lie. device: with what computes. host: in host
    memory (optimizer offload): gradients are copied there, the update runs there, and weights come back in the dtype
    that computes; it trains the same. auto: the device, and the host where the longest sequence fits no other way; in
    runs of a configuration only if costs are closed forms."""
    timeout_s: float | None = Field(default=None, ge=1, le=604_800)
    """The most seconds that a rank waits for others, at the start and in any collective; then the run ends with an
    error that names them. none: 30 minutes, or what torch.distributed was started with."""
