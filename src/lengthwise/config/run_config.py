"""Every setting of a run as one tree: loaded from YAML, overridden by dotted keys, checked at once, saved resolved."""

from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lengthwise.config.choices import (
    Dtype,
    LrSchedule,
    OptimizerName,
    PipelineSchedule,
)
from lengthwise.config.contradictions import CONTRADICTION, ONE_OF_THEM, check_alone, contradiction
from lengthwise.config.foreign_names import setting_of
from lengthwise.config.limits import (
    DEFAULT_TRAIN_STEPS,
    MAX_CONFIG_BYTES,
    Beta,
    LearningRate,
    NumEpochs,
    NumSteps,
    StepsOrNone,
)
from lengthwise.config.model_config import ModelConfig
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.config.override_value import override_value
from lengthwise.config.plan_config import ClusterConfig, PlanConfig
from lengthwise.config.shared_settings import (
    BatchSettings,
    OrderingSettings,
    ProcessSettings,
    SeedSetting,
    Settings,
    UpdateSettings,
    said_of,
)
from lengthwise.core.atomic_write import shell_word, write_text
from lengthwise.core.errors import InputError
from lengthwise.core.plugins import is_label
from lengthwise.core.read_file import brief, read_text
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.core.wording import nearest, with_nearest


class PartConfig(Settings):
    """One corpus of a mixture."""

    index: str
    """The folder that `lengthwise index` made."""
    name: str = ""
    """What ledgers and reports call it; empty: the folder's name."""
    repeat: float | None = Field(default=None, gt=0, le=10_000)
    """The number of passes over it in an epoch, such as 0.5 or 3; none: 1, or what share needs."""
    share: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Instead of repeat: its weight among the tokens of an epoch, relative to the weights of the others."""


class DataConfig(OrderingSettings, BatchSettings):
    """Which sequences are trained, and in which order."""

    index: str = ""
    """The folder that `lengthwise index` made."""
    mixture: tuple[PartConfig, ...] = ()
    """Instead of index: several folders as a data mixture, each {index, name, repeat or share}."""
    validation: str = ""
    """An index to compute the validation loss on; empty: none."""
    validation_share: float | None = Field(default=None, gt=0, lt=1)
    """Instead of validation: the share of every index's documents that is held out of training for the validation loss.
    Which documents these are does not depend on the seed."""
    count_padding: bool = False
    """Whether tokens_per_step counts padding: the number of sequences of a step x the longest of them."""
    metric: str = "length"
    """What sorted, curriculum and windowed follow: length, or a metric that `lengthwise analyze` saved. (In prepare,
    where nothing was saved, it is one number for each sequence.)"""
    verify: bool = True
    """Whether every token is read before training, to refuse an index whose files were changed."""
    prefetch: int = Field(default=2, ge=0, le=1024)
    """How many micro-batches are read ahead of computing; 0: none."""

    @field_validator("sequences_per_step", "mixture", "validation_share", "count_padding")
    @classmethod
    def _check_alone(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "sequences_per_step":
            check_alone("data", value, info, beside="tokens_per_step")
        elif info.field_name == "validation_share":
            check_alone("data", value, info, beside="validation", way_out=ONE_OF_THEM)
        elif info.field_name == "mixture" and value and (index := info.data.get("index")):
            raise contradiction(f"data.index={index} and data.mixture are both set; make the index a part, or leave it")
        elif info.field_name == "count_padding" and value and info.data.get("sequences_per_step") is not None:
            raise contradiction(
                "data.count_padding says what data.tokens_per_step counts; leave data.sequences_per_step out"
            )
        return value


class OptimConfig(UpdateSettings):
    """The optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """The optimizer."""
    lr: LearningRate = 3e-4
    """The learning rate after warm-up. (In prepare it may be a function of the step, which replaces a schedule.)"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """The decay rates of adamw's averages of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """A small number that keeps updates of adamw and adafactor from dividing by zero."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """The momentum of sgd; 0: it keeps no state."""
    warmup_steps: StepsOrNone = 0
    """The number of steps in which the learning rate rises linearly to lr."""
    schedule: LrSchedule = "cosine"
    """How the learning rate falls after warm-up."""
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Where the schedule ends, as a share of lr."""

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The optimizer and its constants."""
        return OptimizerSettings(
            name=self.name, betas=self.betas, eps=self.eps, momentum=self.momentum, weight_decay=self.weight_decay,
            loss_scale=self.loss_scale, loss_scale_window=self.loss_scale_window,
            narrow_gradients=self.gradient_dtype == "compute",
        )  # fmt: skip


class TrainConfig(ProcessSettings):
    """The training loop: steps, precision, checkpoints, records."""

    multiline = ("sample_prompts",)

    steps: NumSteps | None = None
    """The number of optimizer steps; none: those of epochs, or 100. (In prepare the default is one epoch.)"""
    epochs: NumEpochs | None = None
    """Instead of steps: the number of times that every sequence is learned from; none: steps decide. (In prepare it is
    1 where steps are left out.)"""
    validate_every: StepsOrNone = 0
    """The number of steps between validations; 0: the loss of the validation set is computed after every epoch. It is
    also computed after the last step."""
    patience: NumSteps | None = None
    """Early stopping: training ends after so many validations in a row without a new lowest loss; none: never."""
    sample_every: StepsOrNone = 0
    """The number of steps between samples of text, which continue the sample prompts with the weights of the moment and
    are written to samples.jsonl; there are also some after the last step; 0: there are none."""
    sample_prompts: tuple[str, ...] = Field(default=(), max_length=64, validate_default=True)
    """The texts that samples continue."""
    sample_tokens: int = Field(default=64, ge=1, le=1 << 20)
    """The most tokens that a sample adds to its prompt."""
    sample_temperature: float = Field(default=0, ge=0, le=100)
    """The temperature that tokens of samples are drawn at; 0: the likeliest token is taken (greedy)."""
    compile: bool = False
    """Whether torch.compile compiles every layer: for the static sizes of plan.shapes, or where transformers computes
    the model, around attention for any number of tokens, as prepare does."""
    dtype: Dtype = "float32"
    """The precision of forward and backward; weights and optimizer state stay in float32 or above."""
    schedule: PipelineSchedule = "1f1b"
    """The pipeline schedule, which orders forwards and backwards; gpipe keeps every micro-batch."""
    checkpoint_every: StepsOrNone = 0
    """The number of steps between checkpoints; 0: there is one at the end."""
    checkpoint_async: bool = True
    """Whether checkpoints are written while training goes on."""
    keep_checkpoints: NumSteps = 2
    """The number of checkpoints that are kept; older ones are removed."""
    timeline: bool = True
    """Whether every rank's spans are recorded, for reports."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written as well (extra: tb)."""
    wandb: bool = False
    """Whether metrics are sent to Weights & Biases as well, in the project lengthwise (extra: wandb)."""
    trackio: bool = False
    """Whether metrics are logged to trackio as well, in the project lengthwise (extra: trackio)."""
    mlflow: bool = False
    """Whether metrics are logged to MLflow as well, in the experiment lengthwise (extra: mlflow)."""
    log_every: NumSteps = 1
    """The number of steps between lines of the log."""

    @field_validator("epochs")
    @classmethod
    def _check_no_steps(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        check_alone("train", epochs, info, beside="steps")
        return epochs

    @field_validator("sample_prompts")
    @classmethod
    def _check_samples(cls, prompts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if bool(prompts) != bool(info.data.get("sample_every", prompts)):
            raise contradiction(
                "samples of text need both how often and of what: set train.sample_every=100 and "
                "train.sample_prompts='[Once upon a time]', or neither"
            )
        return prompts

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps once epochs are counted in steps."""
        return self.steps or DEFAULT_TRAIN_STEPS


class Config(SeedSetting):
    """The settings of one training run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)
    """The name of the run: letters, digits, - and _; also . but not first."""
    output: str = "outputs"
    """Where run folders are made, as <output>/<name>/<time>."""
    run_folder: str = ""
    """Exactly this run folder instead; empty: a new one in output."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    @field_validator("train")
    @classmethod
    def _check_validates(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        data, plan = info.data.get("data"), info.data.get("plan")
        wanted = {"validate_every": train.validate_every, "patience": train.patience}
        asking = [f"train.{name}={value}" for name, value in wanted.items() if value]
        if asking and data is not None and not data.validation and data.validation_share is None:
            raise contradiction(
                f"{asking[0]} needs something to validate on; set data.validation to an index, or "
                "data.validation_share to the share of the corpus that is held out, such as 0.05"
            )
        if train.epochs is not None and plan is not None and plan.form_batches:
            raise contradiction(
                f"train.epochs={train.epochs}: with plan.form_batches, groups decide how many steps an epoch takes, "
                "and batches may hold sequences of two epochs; set train.steps"
            )
        return train

    def save(self, path: Path) -> None:
        """Write the resolved tree as YAML, whole or not at all."""
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def load(path: Path | None, overrides: list[str]) -> Config:
    """The tree in ``path`` (or the defaults) with ``section.key=value`` overrides applied.

    Raises:
        InputError: the file is missing or not YAML, or any key or value is wrong; all of them are named at once.
    """
    tree = {} if path is None else _read(path)
    of_file = deepcopy(tree)
    mistakes = [mistake for override in overrides if (mistake := _apply(tree, override))]
    if mistakes:
        raise InputError(_listed([f"  {mistake}" for mistake in mistakes]))
    config = _validated(tree)
    if not isinstance(config, Config):
        raise InputError(_blamed(path, of_file, config) + _listed(config))
    if is_label(config.plan.policy) and f"plan.policy={config.plan.policy}" not in overrides:
        raise InputError(
            f"{path}: plan.policy={config.plan.policy} is code that a file names; if you trust it, say so by giving "
            f"plan.policy={config.plan.policy} on the command line too"
        )
    return config


def load_saved(path: Path) -> Config:
    """The settings that a run saved, to be read and not run again: a policy that they name is not imported.

    Raises:
        InputError: the file is missing, or no configuration.
    """
    try:
        return check(_read(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _blamed(path: Path | None, of_file: dict[str, Any], lines: list[str]) -> str:
    """What a message begins with whose ``lines`` are of a file, of overrides or of both."""
    config = _validated(of_file)
    alone = set() if path is None or isinstance(config, Config) else {*lines} & {*config}
    if not alone:
        return ""
    return f"{path}: " if alone == {*lines} else f"{path} and the overrides: "


def check(tree: dict[str, Any]) -> Config:
    """The checked configuration of a tree of plain values.

    Raises:
        InputError: naming every wrong key and value at once, with the nearest known key.
    """
    config = _validated(tree)
    if not isinstance(config, Config):
        raise InputError(_listed(config))
    return config


def _validated(tree: dict[str, Any]) -> Config | list[str]:
    """The configuration of a tree, or a line for everything that is wrong with it."""
    sections = {name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")}
    try:
        return Config.model_validate({k: value for k, value in tree.items() if value is not None or k not in sections})
    except ValidationError as error:
        return [_explain(item["loc"], item["type"], item["msg"], item["input"]) for item in error.errors()]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, what="a configuration", max_bytes=MAX_CONFIG_BYTES)
        tree = parse_yaml(text)
    except FileNotFoundError:
        raise InputError(
            f"no configuration at {path}; print one with: lengthwise config > {shell_word(path)}"
        ) from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not YAML of a configuration: {error}") from None
    if tree is not None and not isinstance(tree, dict):
        raise InputError(f"{path} must hold a tree of settings, not a {type(tree).__name__}")
    return {key: value for key, value in (tree or {}).items() if (key, value) != ("schema_version", 1)}


def _listed(lines: list[str]) -> str:
    headline = "the configuration has " + ("an error:" if len(lines) == 1 else f"{len(lines)} errors:")
    return "\n".join([headline, *lines])


def _apply(tree: dict[str, Any], override: str) -> str:
    """Set what ``override`` says in ``tree``; what is wrong with it, or nothing."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        return f"override {brief(override)} is not key=value, such as optim.lr=1e-3"
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        child = node[section] = {} if node.get(section) is None else node[section]
        if not isinstance(child, dict):
            return f"override {brief(override)}: {brief(section)} is a value, not a section"
        node = child
    if len(value) > MAX_CONFIG_BYTES:
        return f"override {brief(override)}: the value has {len(value):,} characters"
    try:
        node[leaf] = override_value(type_of(key), value)
    except ValueError as error:
        return f"override {brief(override)} is not YAML: {error}"
    return ""


def type_of(key: str) -> Any:
    """The type of a setting, such as ``optim.lr``; None: there is no setting of that name."""
    kind: Any = Config
    for name in key.split("."):
        field = getattr(kind, "model_fields", {}).get(name)
        if field is None:
            return None
        kind = field.annotation
    return kind


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
        name, dot, leaf = str(location[-1]).partition(".")
        if dot and leaf in getattr(getattr(section.model_fields.get(name), "annotation", None), "model_fields", ()):
            return f"  {key}: unknown key; nest it, as in {name}: {{{leaf}: {brief(value)}}}"
        prefix = "".join(f"{part}." for part in location[:-1])
        if ours := setting_of(key) or _same_name_elsewhere(str(location[-1])):
            return f"  {key}: unknown key; did you mean {ours}?"
        return f"  {key}: unknown key; {nearest(key, [prefix + name for name in section.model_fields])}"
    if kind == CONTRADICTION:
        return f"  {message}"
    if kind == "model_type":
        return f"  {key}: its settings stand below it, as name: value, not {brief(value)}"
    message = said_of(kind, message)
    return with_nearest(f"  {key}: {message[0].lower()}{message[1:]}, not {brief(value)}", value)
