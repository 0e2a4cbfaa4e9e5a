"""What can be said to ``prepare``, checked at once."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, field_validator

from lengthwise.config.limits import MOST_BLOCKS, WINDOW
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.specs import nearest

DEFAULT_TOKENS_PER_STEP = 65_536
_PRICES = ("sequence_times_s", "overhead_s", "time_s", "comm_times_s", "update_s", "peak_bytes", "max_tokens")
"""Methods without which nothing can be planned."""


class PrepareOptions(BaseModel):
    """Keyword arguments of :func:`lengthwise.prepare`."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    policy: Literal["padded", "static", "bucket", "packed", "hotspa", "dcp-inter", "dcp-intra", "paradyse", "auto"] = (
        "dcp-intra"
    )
    """Who decides degree, accumulation and recompute of every step."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; None: those of ``epochs``."""
    epochs: int = Field(default=1, ge=1)
    """Times that every sequence is learned from."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Token budget of a global batch."""
    sequences_per_step: int | None = Field(default=None, ge=1)
    """Or: sequences of a global batch."""
    order: Literal["shuffled", "corpus", "sorted", "curriculum", "windowed"] = "shuffled"
    """Of an epoch: random, as they come, by metric, from easy to hard, or random batches of sequences that a window
    sorted by metric."""
    metric: SkipValidation[Any] = None
    """Of orders that follow one: a number for each sequence; None: its length."""
    window: int = Field(default=WINDOW, ge=1)
    """Sequences that ``windowed`` sorts at a time."""
    pacing: Literal["linear", "root", "step", "natural"] = "root"
    """Of a curriculum: how the share of the corpus grows that sequences are drawn from."""
    pacing_start: float = Field(default=0.1, gt=0, le=1)
    """That share at the beginning of an epoch."""
    pacing_stages: int = Field(default=5, ge=1, le=MOST_BLOCKS)
    """Of ``step``: how often it grows; of ``natural``: groups of difficulty."""
    curriculum_epochs: int | None = Field(default=None, ge=1)
    """Epochs with the curriculum, shuffled afterwards; None: all."""
    seed: int = Field(default=0, ge=0)
    """Of the order of sequences, of masks and of dropout."""

    form_batches: bool = False
    """Let the policies of data-centric parallel choose which sequences share a step, from the next eight batches:
    groups balance better, and the order of learning depends on lengths and cluster."""
    g_min: int = Field(default=1, ge=1)
    """Micro-batches that every group accumulates at least, where batches are formed."""
    g_max: int = Field(default=5, ge=1)
    """That the slowest group accumulates at most."""

    max_length: int | None = Field(default=None, ge=1)
    over_length: Literal["error", "drop", "truncate", "split"] = "error"
    """What happens to sequences over ``max_length``."""
    slot_tokens: int = Field(default=1, ge=1)
    """Tokens of a slot, the unit that is sharded: 1 of text, tokens of a frame of video."""
    objective: Literal["next-token", "masked", "every-token"] | None = None
    """What has a loss; None: what the model's class says, or next-token."""
    mask_token_id: int | None = None
    """Stands for hidden tokens, with the objective ``masked``."""
    ignore_index: int = -100
    """The target of a token that has no loss."""

    layers: str | None = None
    """Name of the model's list of layers; None: the longest one."""
    inputs: Callable[..., dict[str, Any]] | None = None
    """From a micro-batch to the forward's arguments; None: by the names of its parameters."""
    loss: Callable[..., Any] | None = None
    """From the forward's output and the micro-batch to the mean loss of this rank's targets; None: the loss in it."""

    optimizer: OptimizerSettings | Literal["adamw", "sgd", "adafactor"] = "adamw"
    lr: float | Callable[[int], float] = 3e-4
    """A number, or a function of the step."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning-rate follows the size of each step's batch."""
    lr_scaling_by: Literal["tokens", "sequences", "targets"] = "tokens"
    """What that size counts."""
    lr_reference: float | None = Field(default=None, gt=0)
    """The size that ``lr`` is for; None: that of a batch of sequences of mean length."""
    lr_clamp: tuple[float, float] | None = None
    """Least and most that ``lr`` is multiplied by."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices, where ``optimizer`` is a name."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Limit of the global gradient norm; 0: none."""

    max_degree: int | None = Field(default=None, ge=1)
    """Most ranks that share a sequence; None: all."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Whether several sequences share a forward, and ranks a sequence. ``auto``: if that is exact; else the stock
    forward is called once for each sequence, by one rank, and a warning says why. ``always``: else the model is
    refused. ``never``: the stock forward, once for each sequence."""
    recompute: Literal["auto", "none", "all", "selective"] = "auto"
    """Layers computed again in the backward: as few as fit; ``selective``: the same, but attention is kept."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Of a device; None: what it has."""
    profile: str | PathLike[str] | None = None
    """File that keeps the measurements; None: one in ``~/.cache/lengthwise``."""
    cost: SkipValidation[CostModel | None] = None
    """Instead of measuring."""
    frozen: SkipValidation[list[Any]] = []
    """Teachers and reference models that the loop calls on micro-batches too: exact on shards, without gradients."""
    count_targets: bool = False
    """Read the labels of each step when it begins, so that terms of the loss may be means over tokens or sequences
    where labels leave out targets."""
    check: bool = True
    """Compute two short sequences both ways before the run, and refuse a model whose gradients differ."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = Field(default=0, ge=0)
    """Processes of each rank that read the corpus' items ahead of computing, for datasets that are slow to read; 0: an
    item is read when it is needed."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Most seconds that a rank waits for others before the run ends with an error that names them; None: 30 minutes,
    or what torch.distributed was started with."""
    verbose: bool = True
    """Say on the first rank what was found and measured."""

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
            return self.optimizer
        return OptimizerSettings(name=self.optimizer, weight_decay=self.weight_decay)

    @property
    def budgets(self) -> dict[str, int | None]:
        """Of a global batch, as the sampler takes them."""
        if self.tokens_per_step is None and self.sequences_per_step is None:
            return {"tokens_per_step": DEFAULT_TOKENS_PER_STEP}
        return {"tokens_per_step": self.tokens_per_step, "sequences_per_step": self.sequences_per_step}


@contextmanager
def named_as_options() -> Iterator[None]:
    """Errors name settings as options of ``prepare``, not as keys of a configuration file."""
    try:
        yield
    except LengthwiseError as error:
        renamed = re.sub(r"\b(?:data|plan|train|optim)\.([a-z])", r"\1", str(error))
        if renamed == str(error):
            raise
        raise type(error)(renamed) from error


def read_options(given: dict[str, Any]) -> PrepareOptions:
    """The options, or every mistake in them at once.

    Raises:
        InputError: unknown names, with the nearest known one, and values out of range.
    """
    fields = PrepareOptions.model_fields
    unknown = [f"{name}: no such option; {nearest(name, fields)}" for name in given if name not in fields]
    known = {name: value for name, value in given.items() if name in fields}
    problems = list(unknown)
    try:
        found = PrepareOptions(**known)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, one['loc'][:1]))}: {one['msg']}" for one in error.errors()]
    if not problems and found.form_batches and not found.policy.startswith("dcp"):
        problems.append(
            f"form_batches: the policy {found.policy} takes batches as they come; use dcp-intra or dcp-inter"
        )
    if not problems and found.g_min > found.g_max:
        problems.append(f"g_min: {found.g_min} is more than g_max, which is {found.g_max}")
    if problems:
        raise InputError("prepare(...) cannot be done as asked:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return found
