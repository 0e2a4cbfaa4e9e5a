"""Every setting of a run as one tree: loaded from YAML, overridden by dotted keys, checked at once, saved resolved."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from lengthwise.config.foreign_names import setting_of
from lengthwise.core.atomic_write import write_text
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.lr_scaling import MAX_LR_FACTOR
from lengthwise.core.read_file import brief, read_text
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.core.specs import MAX_DEVICES, nearest

MAX_CONFIG_BYTES = 256 << 10
MAX_TEXT = 4096
"""Characters of a setting."""
MAX_STEPS = 10_000_000
MAX_SEQUENCES = 1 << 31
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

NumTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
NumSequences = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]
NumSteps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MAX_STEPS)]
NumDevices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LrFactor = Annotated[float, Field(ge=0, le=MAX_LR_FACTOR)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would take: true and false as numbers, and text that no path or name can hold."""
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) for one in values) and not cls._takes_bool(info.field_name):
            raise ValueError("a number or text is needed; true and false (also yes, no, on, off) are neither")
        for text in values:
            if isinstance(text, str) and (len(text) > MAX_TEXT or _UNPRINTABLE.search(text)):
                raise ValueError(f"text has at most {MAX_TEXT:,} characters and no control characters")
        return value

    @classmethod
    def _takes_bool(cls, name: str | None) -> bool:
        return name is not None and cls.model_fields[name].annotation is bool


class PartConfig(_Section):
    """One corpus of a mixture."""

    index: str = Field(description="folder made by `lengthwise index`")
    name: str = Field(default="", description="in ledgers and reports; empty: the folder's name")
    repeat: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="passes over it in an epoch, such as 0.5 or 3; none: 1, or what share needs",
    )
    share: float | None = Field(
        default=None,
        ge=1e-9,
        le=1e9,
        description="or: its weight among the tokens of an epoch, relative to the others'",
    )


class DataConfig(_Section):
    """Which sequences are trained, and in which order."""

    index: str = Field(default="", description="folder made by `lengthwise index`")
    mixture: tuple[PartConfig, ...] = Field(default=(), description="or: several, each {index, name, repeat or share}")
    max_length: NumTokens | None = Field(
        default=None, description="longest sequence trained, in tokens; none: no limit"
    )
    over_length: Literal["error", "drop", "truncate", "split"] = Field(
        default="error", description="what happens to sequences over max_length; counted in ledger.json"
    )
    tokens_per_step: NumTokens | None = Field(default=None, description="token budget of a global batch")
    sequences_per_step: NumSequences | None = Field(default=None, description="or: sequences of a global batch")
    count_padding: bool = Field(
        default=False, description="tokens_per_step counts padding: sequences of a step x the longest of them"
    )
    order: Literal["shuffled", "corpus", "sorted", "curriculum", "windowed"] = Field(
        default="shuffled",
        description="of an epoch: random, as indexed, by metric, from easy to hard with a pacing, or random batches of "
        "sequences that a window sorted by metric",
    )
    metric: str = Field(
        default="length", description="of sorted, curriculum, windowed: length, or what `lengthwise analyze` saved"
    )
    window: NumSequences = Field(default=4096, description="sequences that windowed sorts at a time")
    pacing: Literal["linear", "root", "step", "natural"] = Field(
        default="root", description="of a curriculum: how the share of the corpus grows that sequences are drawn from"
    )
    pacing_start: float = Field(default=0.1, gt=0, le=1, description="that share at the beginning of an epoch")
    pacing_stages: int = Field(
        default=5, ge=1, le=1024, description="of step: how often it grows; of natural: groups by metric"
    )
    curriculum_epochs: int | None = Field(
        default=None, ge=1, le=1_000_000, description="epochs with the curriculum, shuffled afterwards; none: all"
    )
    verify: bool = Field(
        default=True, description="read every token before training, to refuse an index whose files were changed"
    )
    prefetch: int = Field(default=2, ge=0, le=1024, description="micro-batches read ahead of computing; 0: none")


class ModelConfig(_Section):
    """Which model is trained."""

    preset: str = Field(default="llama-tiny", description="a model preset; see `lengthwise config --presets`")
    hf: str = Field(default="", description="or: a folder with Hugging Face config.json and safetensors to start from")
    vocab_size: int | None = Field(
        default=None, ge=1, le=1 << 24, description="overrides the preset; none: what the index needs"
    )


class ClusterConfig(_Section):
    """The devices whose memory limits plans and whose speed prices them."""

    name: str = Field(default="", description="such as 8x8xA800-80GB; empty: the devices that train finds")
    memory_gib: float | None = Field(default=None, gt=0, le=1 << 20, description="overrides the device's memory")


class PlanConfig(_Section):
    """How each step is planned: parallelism, gradient accumulation, activation checkpointing, load balancing."""

    policy: Literal[
        "padded", "static", "bucket", "packed", "hotspa", "dcp-inter", "dcp-intra", "paradyse", "hydraulis", "auto"
    ] = "auto"
    file: str = Field(
        default="", description="plans to execute, made by `lengthwise plan --out` or by hand; empty: plan each step"
    )
    profile: str = Field(default="", description="file made by `lengthwise profile`; empty: analytic costs")
    cost: Literal["fitted", "hybrid"] = Field(
        default="fitted", description="made from the profile: a l^2 + b l + c, or a random forest (extra: learned)"
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SEQUENCES,
        description="sequences per micro-batch of `padded`; none: the fastest that fits",
    )
    one_shape: bool = Field(
        default=False, description="`padded`: one shape for all micro-batches of a step, for static compilation"
    )
    max_tokens: NumTokens | None = Field(
        default=None, description="most tokens of a micro-batch, padding included; none: what memory holds"
    )
    method: Literal[
        "", "random", "dense", "megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp", "ulysses", "ring"
    ] = Field(
        default="",
        description="parallel method by which devices share every layer; empty: whatever is fastest (train: of ulysses "
        "and ring); random: drawn anew for every layer and micro-batch",
    )
    degree: NumDevices | None = Field(
        default=None, description="sequence, context or tensor parallel size, exactly; none: any up to max_degree"
    )
    max_degree: NumDevices = Field(
        default=1,
        description="most devices that share a layer: the largest sequence, context or tensor parallel size",
    )
    max_stages: NumDevices = Field(default=1, description="most pipeline stages: the largest pipeline parallel size")
    recompute: Literal["auto", "none", "all"] = Field(
        default="auto",
        description="activation checkpointing: which layers are computed again in the backward; auto: as few as a "
        "micro-batch needs to fit",
    )
    objective: Literal["flow-shop", "max-times-count"] = Field(
        default="flow-shop", description="how a pipeline's time is reckoned; max-times-count: Hydraulis Eq. (1)"
    )
    shapes: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="at most so many sizes of micro-batches, filled up with padding; none: any size",
    )
    workers: int | None = Field(
        default=None, ge=0, le=64, description="processes per rank that plan ahead; 0: none; none: 1 on GPUs, 0 on CPUs"
    )
    look_ahead: int = Field(default=4, ge=1, le=1024, description="steps planned ahead of training, with workers")


class OptimConfig(_Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd", "adafactor"] = "adamw"
    lr: float = Field(default=3e-4, gt=0, le=1000)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="of adamw")
    eps: float = Field(default=1e-8, gt=0, le=1, description="of adamw and adafactor")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(default=0.1, ge=0, le=1000, description="on matrices; norms and biases never decay")
    clip_norm: float = Field(default=1.0, ge=0, le=1e9, description="limit of the global gradient norm; 0: none")
    warmup_steps: StepsOrNone = 0
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="where the schedule ends, as a share of lr")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="how the learning-rate follows the size of each step's batch"
    )
    lr_scaling_by: Literal["tokens", "sequences", "targets"] = Field(
        default="tokens", description="what that size counts"
    )
    lr_reference: float | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="the size that lr is for; none: that of a batch of sequences of mean length",
    )
    lr_clamp: tuple[LrFactor, LrFactor] | None = Field(
        default=None, description="least and most that lr is multiplied by, such as [0.25, 4]"
    )

    @field_validator("lr_clamp")
    @classmethod
    def _check_clamp(cls, clamp: tuple[float, float] | None) -> tuple[float, float] | None:
        if clamp is not None and not (clamp[0] <= clamp[1] and clamp[1] > 0):
            raise ValueError("the least factor comes first, then the most, which is above 0")
        return clamp


class TrainConfig(_Section):
    """The training loop: steps, precision, checkpoints, records."""

    steps: NumSteps = 100
    compile: bool = Field(default=False, description="torch.compile of every layer for the static sizes of plan.shapes")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="of forward and backward; weights and optimizer stay in float32 or above"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(
        default=1800.0,
        ge=1,
        le=604_800,
        description="most seconds that a rank waits for others, at the start and in any collective; then the run ends",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description="order of forwards and backwards in a pipeline; gpipe keeps every micro-batch"
    )
    checkpoint_every: StepsOrNone = Field(default=0, description="steps between checkpoints; 0: only at the end")
    checkpoint_async: bool = Field(default=True, description="write them while training goes on")
    keep_checkpoints: NumSteps = 2
    timeline: bool = Field(default=True, description="record every rank's spans")
    tensorboard: bool = Field(default=False, description="write event files too (extra: tb)")
    log_every: NumSteps = 1


class Config(_Section):
    """One run."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        max_length=100,
        description="of the run: letters, digits, - and _; also . but not first",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    output: str = Field(default="outputs", description="run folders are made in <output>/<name>/<time>")
    run_folder: str = Field(default="", description="exactly this folder instead")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    def save(self, path: Path) -> None:
        """Write the resolved tree as YAML, whole or not at all."""
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def load(path: Path | None, overrides: list[str]) -> Config:
    """The tree in ``path`` (or the defaults) with ``section.key=value`` overrides applied.

    Raises:
        InputError: the file is missing or not YAML, or any key or value is wrong; all of them are named at once.
    """
    tree = {} if path is None else _read(path)
    mistakes = [mistake for override in overrides if (mistake := _apply(tree, override))]
    if mistakes:
        raise InputError(_headline(mistakes) + "\n" + "\n".join(f"  {mistake}" for mistake in mistakes))
    try:
        return check(tree)
    except InputError as error:
        raise InputError(f"{path}: {error}" if path is not None else str(error)) from None


def check(tree: dict[str, Any]) -> Config:
    """The checked configuration of a tree of plain values.

    Raises:
        InputError: naming every wrong key and value at once, with the nearest known key.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item["loc"], item["type"], item["msg"], item["input"]) for item in error.errors()]
        raise InputError(_headline(lines) + "\n" + "\n".join(lines)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, what="a configuration", max_bytes=MAX_CONFIG_BYTES)
        tree = parse_yaml(text)
    except FileNotFoundError:
        raise InputError(f"no configuration at {path}; print one with: lengthwise config > {path}") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not YAML of a configuration: {error}") from None
    if tree is not None and not isinstance(tree, dict):
        raise InputError(f"{path} must hold a tree of settings, not a {type(tree).__name__}")
    return tree or {}


def _headline(lines: list[str]) -> str:
    return "the configuration has " + ("an error:" if len(lines) == 1 else f"{len(lines)} errors:")


def _apply(tree: dict[str, Any], override: str) -> str:
    """Set what ``override`` says in ``tree``; what is wrong with it, or nothing."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        return f"override {brief(override)} is not key=value, such as optim.lr=1e-3"
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            return f"override {brief(override)}: {brief(section)} is a value, not a section"
        node = child
    if len(value) > MAX_CONFIG_BYTES:
        return f"override {brief(override)}: the value has {len(value):,} characters"
    try:
        node[leaf] = parse_yaml(value) if value else ""
    except ValueError as error:
        if value[0] in "[{&*!|>":  # YAML was meant
            return f"override {brief(override)} is not YAML: {error}"
        node[leaf] = value
    return ""


def _same_name_elsewhere(name: str) -> str | None:
    """The setting of this name, if exactly one section has it."""
    sections = {key: field.annotation for key, field in Config.model_fields.items()}
    having = [key for key, kind in sections.items() if name in getattr(kind, "model_fields", ())]
    return f"{having[0]}.{name}" if len(having) == 1 else None


def _explain(location: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(brief(str(part))[1:-1] for part in location)
    if kind == "extra_forbidden":
        section: Any = Config
        for part in location[:-1]:
            section = section.model_fields[part].annotation if isinstance(part, str) else get_args(section)[0]
        prefix = "".join(f"{part}." for part in location[:-1])
        if ours := setting_of(key) or _same_name_elsewhere(str(location[-1])):
            return f"  {key}: unknown key; did you mean {ours}?"
        return f"  {key}: unknown key; {nearest(key, [prefix + name for name in section.model_fields])}"
    message = message.removeprefix("Value error, ")
    return f"  {key}: {message[0].lower()}{message[1:]}, not {brief(value)}"
