"""Keyword arguments of ``lengthwise.prepare``, checked at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

from pydantic import ConfigDict, Field, SkipValidation, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from lengthwise.config.choices import (
    HeldWeights,
    OptimizerName,
    Packing,
    Recompute,
    SequenceMethod,
    ShardGradients,
    SlicesName,
    TrainingObjective,
)
from lengthwise.config.foreign_names import SETTING_OF
from lengthwise.config.limits import DEFAULT_TOKENS_PER_STEP, LearningRate, NumSteps
from lengthwise.config.optimizer_settings import STATE, OptimizerSettings
from lengthwise.config.shared_settings import (
    BatchSettings,
    MemorySetting,
    OrderingSettings,
    PolicySettings,
    ProcessSettings,
    SeedSetting,
    UpdateSettings,
    said_of,
)
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.read_file import brief
from lengthwise.core.wording import nearest, with_nearest

_PRICES = ("sequence_times_s", "overhead_s", "time_s", "comm_times_s", "update_s", "peak_bytes", "max_tokens")
"""Methods without which nothing can be planned."""


class PrepareOptions(
    ProcessSettings, MemorySetting, UpdateSettings, SeedSetting, OrderingSettings, BatchSettings, PolicySettings
):
    """Keyword arguments of :func:`lengthwise.prepare`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    steps: NumSteps | None = None
    """The number of optimizer steps, also where ranks bring batches to run.steps; None: those of epochs. (A
    configuration's train.steps is 100.)"""
    epochs: int = Field(default=1, ge=1)
    """The number of times that every sequence is learned from. (In a configuration, train.steps decides where
    train.epochs is left out.)"""
    metric: SkipValidation[Any] = None
    """What sorted, curriculum and windowed follow: one number for each sequence; None: its length. (A configuration
    names a metric that `lengthwise analyze` saved.)"""

    slot_tokens: int = Field(default=1, ge=1)
    """The tokens of a slot, the unit that is sharded: 1 for text, the tokens of a frame for video."""
    objective: TrainingObjective | None = None
    """Which tokens have a loss; None: what the model's class says, or next-token. (A configuration's plan.objective is
    how the time of a pipeline is reckoned.)"""
    mask_token_id: int | None = None
    """The token id that stands for hidden tokens, with the objective masked."""
    ignore_index: int = -100
    """The label of a token that has no loss."""

    layers: str | None = None
    """The path of the model's list of layers, or of its only layer; several, with commas between, are gone through by
    turns, and ``.*`` at the end stands for the modules of each layer. None: the longest list is found."""
    inputs: Callable[..., dict[str, Any]] | None = None
    """A function from a micro-batch to the forward's arguments; None: they are found by the names of its parameters."""
    loss: Callable[..., Any] | None = None
    """A function from the forward's output and the micro-batch to the mean loss of this rank's targets; None: the loss
    in the output."""

    optimizer: OptimizerSettings | OptimizerName | Callable[[list[dict[str, Any]]], Any] = "adamw"
    """The optimizer: its name, or OptimizerSettings with its constants; or a class of torch.optim, or what else makes
    an optimizer from parameter groups, of matrices and of vectors, whose constants are then its own, lr and
    weight_decay too unless they are options as well. (A configuration names it.)"""
    lr: LearningRate | Callable[[int], float] = 3e-4
    """The learning rate: a number, or a function of the step; left out, that of an optimizer that a class or function
    makes. Groups for which that says other rates keep their ratio. (A configuration has a schedule instead.)"""

    methods: tuple[SequenceMethod, ...] | None = Field(default=None, min_length=1)
    """By which methods ranks may share sequences, where there are several; None: ulysses and ring, whichever is faster
    as measured. (Configurations, `compare` and `lengthwise.plan` also take methods that shard weights.)"""
    packing: Packing = "auto"
    """Whether several sequences share a forward, and ranks a sequence. auto: if that is exact; else the stock forward
    is called once for each sequence, by one rank, and a warning says why. always: else the model is refused. never: the
    stock forward, once for each sequence."""
    weights: HeldWeights = "auto"
    """What each rank holds of the weights between micro-batches. whole: all of them. by-layer: its share; a layer
    is gathered when it computes and released after, and its gradients are summed on their owners at once (as ZeRO
    stage 3 does), in each step for as many layers as do not fit whole; a pipeline stage gathers its layers once for
    a step. auto: whole, if the longest sequence fits."""
    shard_gradients: ShardGradients = "none"
    """Gradient sharding, as ZeRO stage 2 does it within a pipeline stage: whether ranks that share micro-batches and
    hold whole weights reduce-scatter gradients in every backward and keep a share of them, so that the loop cannot read
    them; auto: where longer micro-batches gain more than that costs; all: wherever several ranks share micro-batches;
    none: nowhere. (Configurations have auto by default.)"""
    recompute: Literal[Recompute, "selective"] = "auto"
    """Activation checkpointing: which layers are computed again in the backward; auto: as few as fit; selective: the
    same, but what attention computed is kept. (Configurations have no selective.)"""
    slices: SlicesName = "none"
    """Slices in time (TeraPipe): whether pipeline stages may compute micro-batches in slices of their tokens, one after
    another, so that a long sequence leaves the bubble of a slice; auto: where that is faster, or longer sequences need
    it. The loop gets each slice as a micro-batch, and sums over whole sequences are refused. (Configurations have auto
    by default.)"""
    feed_forward_tile: int | None = Field(default=None, ge=1)
    """Tokens that feed-forward modules compute at once, forward and backward: they keep their input alone and compute
    each tile again in the backward, so that longer sequences fit. None: all tokens, and tiles that plans choose where
    the longest sequence does not fit otherwise. A plan may say other sizes of tiles for a micro-batch."""
    compile: bool = False
    """Whether torch.compile compiles the layers around their attention, or what it can of their modules, for any number
    of tokens. (In a configuration, train.compile.)"""
    compile_backend: str = "inductor"
    """By which backend of torch.compile."""
    profile: str | PathLike[str] | None = None
    """The file that keeps the measurements; None: one in ~/.cache/lengthwise. (A configuration's plan.profile is
    measured beforehand by `lengthwise profile`.)"""
    cost: SkipValidation[CostModel | None] = None
    """A cost model to plan with instead of measuring. (A configuration names the kind of fit.)"""
    frozen: SkipValidation[list[Any]] = Field(default_factory=list)
    """Teachers and reference models that the loop calls on micro-batches too: exact on shards, without gradients."""
    loss_columns: tuple[str, ...] = ()
    """Columns of the items that the loop's loss is made of, such as advantages or log-probabilities of a policy before:
    a number for each token, or one for the sequence. They go where their tokens are computed, as
    micro_batch.column(name)."""
    coupled_loss: SkipValidation[Callable[[Any], Any] | None] = None
    """The loss of a step that couples sequences, from what step.couple(values) got of each, [U, M, ...] of all units of
    the step or [S, ...] of all sequences; their members may then lie in different micro-batches, on different ranks."""
    share_prefixes: bool = False
    """Whether sequences of a unit that begin with the same tokens, such as rollouts of one prompt, compute these once:
    the same gradients from fewer tokens. Causal models of next tokens, with labels that leave out what is shared."""
    cut_units: bool | None = None
    """Whether a unit whose sequences share prefixes may be cut in parts, in different micro-batches or on different
    ranks, each with its own copy of what its sequences begin with: where no group of ranks holds it whole, or a step is
    predicted to be faster. Exact for losses of tokens and of sequences, and for coupled_loss; micro_batch.units is
    refused then. None: where coupled_loss makes the loss."""
    step_max_length: int | None = Field(default=None, ge=1)
    """The longest sequence in tokens that run.step(items) and run.score(items) may get, for which plans keep memory;
    None: the corpus' longest."""
    count_targets: bool = False
    """Whether the labels of each step are read when it begins, so that terms of the loss may be means over tokens or
    sequences where labels leave out targets."""
    check: bool = True
    """Whether packs, shards and recomputed layers are compared with the model itself before the run, on a few short
    sequences and a longer one, to refuse a model whose gradients differ."""
    workers: int = Field(default=0, ge=0)
    """The processes of each rank that read the corpus' items ahead of computing, for datasets that are slow to read; 0:
    an item is read when it is needed. (In a configuration, plan.workers are processes that plan ahead.)"""
    verbose: bool = True
    """Whether the first rank prints what was found and measured."""

    @field_validator("epochs")
    @classmethod
    def _decide_where_steps_do_not(cls, epochs: int, info: ValidationInfo) -> int:
        if (steps := info.data.get("steps")) is not None:
            raise ValueError(f"steps={steps} says already how long to train; give one of the two")
        return epochs

    @field_validator("loss_columns", "methods", mode="before")
    @classmethod
    def _is_one_or_several(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

    @field_validator("frozen", mode="before")
    @classmethod
    def _are_models(cls, models: Any) -> Any:
        is_one = hasattr(models, "named_parameters") and type(models).__name__ != "ModuleList"
        is_one |= not isinstance(models, Iterable)
        models = [models] if is_one else list(models)
        for model in models:
            if not hasattr(model, "named_parameters"):
                raise ValueError(f"{brief(model)} is no torch.nn.Module; give one model, or a list of models")
        return models

    @field_validator("coupled_loss")
    @classmethod
    def _is_callable(cls, loss: Any) -> Any:
        if loss is not None and not callable(loss):
            raise ValueError(f"{brief(loss)} is not callable; give a function of the step's values")
        return loss

    @field_validator("optimizer", mode="before")
    @classmethod
    def _is_not_made_yet(cls, optimizer: Any) -> Any:
        if hasattr(optimizer, "param_groups"):
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} is made already, of whole parameters, and ranks update shares of them; give what makes it: "
                f"its class, or functools.partial({name}, ...) with its constants"
            )
        if isinstance(optimizer, str) and optimizer.lower() not in STATE:
            raise ValueError(
                f"{optimizer!r} is none by name ({nearest(optimizer, STATE)}); give what makes it, such as "
                "torch.optim.Adam"
            )
        return optimizer.lower() if isinstance(optimizer, str) else optimizer

    @field_validator("lr", mode="before")
    @classmethod
    def _is_no_scheduler(cls, lr: Any) -> Any:
        if hasattr(lr, "step") and not callable(lr):
            raise ValueError(
                f"{type(lr).__name__} sets the rate of an optimizer of its own; call its step() after step.update(), "
                "and give lr=lambda step: scheduler.get_last_lr()[0]"
            )
        return lr

    @field_validator("cost")
    @classmethod
    def _can_price(cls, cost: Any) -> Any:
        missing = [name for name in _PRICES if cost is not None and not callable(getattr(cost, name, None))]
        if missing:
            raise ValueError(f"{type(cost).__name__} is no cost model: it lacks {', '.join(missing)}")
        return cost

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The optimizer and its constants."""
        if isinstance(self.optimizer, OptimizerSettings):
            settings = self.optimizer
            if "weight_decay" in self.model_fields_set and self.weight_decay != settings.weight_decay:
                raise InputError(
                    f"weight_decay={self.weight_decay:g} is asked for, and optimizer=OptimizerSettings(...) has "
                    f"weight_decay={settings.weight_decay:g}: say it once"
                )
        elif callable(self.optimizer):
            make = getattr(self.optimizer, "func", self.optimizer)  # of a functools.partial
            name = getattr(make, "__qualname__", type(make).__qualname__)
            settings = OptimizerSettings(name=name, make=self.optimizer, weight_decay=self.weight_decay)
            settings = replace(settings, asks_weight_decay="weight_decay" in self.model_fields_set)
        else:
            settings = OptimizerSettings(name=self.optimizer, weight_decay=self.weight_decay)
        if settings.make is not None:
            lr = None if callable(self.lr) or "lr" not in self.model_fields_set else self.lr
            settings = replace(settings, asked_lr=lr, has_lr_function=callable(self.lr))
        if self.gradient_dtype == "compute":
            settings = replace(settings, narrow_gradients=True)
        if self.loss_scale is None and self.loss_scale_window == settings.loss_scale_window:
            return settings
        return replace(settings, loss_scale=self.loss_scale, loss_scale_window=self.loss_scale_window)

    @property
    def sharing_methods(self) -> tuple[Method, ...]:
        """The methods by which ranks may share sequences."""
        return (
            (Method.ULYSSES, Method.RING) if self.methods is None else tuple(map(Method, dict.fromkeys(self.methods)))
        )

    @property
    def budgets(self) -> dict[str, int | None]:
        """Budgets of a global batch in tokens and in sequences, as the sampler takes them."""
        if self.tokens_per_step is None and self.sequences_per_step is None:
            return {"tokens_per_step": DEFAULT_TOKENS_PER_STEP}
        return {"tokens_per_step": self.tokens_per_step, "sequences_per_step": self.sequences_per_step}


_NOT_CALLABLE = "callable_type"
"""The error of a value that is no function, which says nothing of options that may be something else too."""


def _suggestion(name: str) -> str:
    """The option that another trainer's name means, or the nearest."""
    ours = SETTING_OF.get(name, "").rpartition(".")[2]
    return (
        f"did you mean {ours}?" if ours in PrepareOptions.model_fields else nearest(name, PrepareOptions.model_fields)
    )


def _said_of(mistake: ErrorDetails) -> str:
    """What is wrong with a value, and the value unless that is said already."""
    message = said_of(mistake["type"], mistake["msg"])
    return message if mistake["type"] in ("value_error", _NOT_CALLABLE) else f"{message}, not {brief(mistake['input'])}"


def read_options(given: dict[str, Any]) -> PrepareOptions:
    """The options, or every mistake in them at once.

    Raises:
        InputError: unknown names, with the nearest known one, and values out of range.
    """
    fields = PrepareOptions.model_fields
    unknown = [f"{name}: no such option; {_suggestion(name)}" for name in given if name not in fields]
    known_options = {name: value for name, value in given.items() if name in fields}
    problems = list(unknown)
    try:
        options = PrepareOptions(**known_options)
    except ValidationError as error:
        mistakes = error.errors()
        more_said = {mistake["loc"][:1] for mistake in mistakes if mistake["type"] != _NOT_CALLABLE}
        problems += [
            f"{'.'.join(map(str, mistake['loc'][:1]))}: " + with_nearest(_said_of(mistake), mistake["input"])
            for mistake in mistakes
            if mistake["type"] != _NOT_CALLABLE or mistake["loc"][:1] not in more_said
        ]
    if problems:
        raise InputError("prepare(...) cannot be done as asked:\n  " + "\n  ".join(dict.fromkeys(problems)))
    _ = options.optimizer_settings  # refuses an optimizer that cannot have such gradients
    return options
