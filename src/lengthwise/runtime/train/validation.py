"""Validation loss and early stopping: the mean over a fixed set of sequences, planned and sharded as training is."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer, run_eagerly
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import forward_loss, sync_step
from lengthwise.runtime.train.micro_batch_tensors import TokenSource

_log = logging.getLogger("lengthwise")
AskStop = Callable[[], int]
"""Why this rank is to stop, as :class:`~lengthwise.runtime.train.stop.StopCause`; 0: it is not."""


def nobody_asks() -> int:
    """Ask for no stop."""
    return 0


class StopAgreedError(Exception):
    """All ranks agreed to stop before the next batch of a validation; ``cause``: why."""

    def __init__(self, cause: int) -> None:
        super().__init__(f"stopped: {cause}")
        self.cause = cause


def sync_batch(plan: StepPlan, world: DistContext, clock: StepClock, stop: AskStop) -> None:
    """Check that all ranks hold the same plan of a validation batch, and stop together where any of them is to.

    Raises:
        CheckError: the plans differ.
        StopAgreedError: a rank is to stop.
    """
    if cause := sync_step(plan, world, clock, stop=stop()).stop:
        raise StopAgreedError(cause)


def validation_loss(
    plans: Sequence[StepPlan],
    model: Transformer,
    state: ShardedState,
    source: TokenSource,
    *,
    masking: TokenMasking | None = None,
    stop: AskStop = nobody_asks,
) -> float:
    """Mean loss over all target tokens of ``plans``, the same on every rank; changes neither weights nor generators.

    Raises:
        CheckError: the ranks have different plans.
        StopAgreedError: a rank is to stop, as ``stop`` says.
    """
    run_layer, model.run_layer = model.run_layer, run_eagerly  # layers are compiled for training alone
    try:
        total, num_targets = torch.zeros((), dtype=torch.float64, device=state.world.device), 0
        for plan in plans:
            clock = StepClock(state.world)
            sync_batch(plan, state.world, clock, stop)
            total += forward_loss(plan, model, state, source, clock=clock, masking=masking) * plan.loss_normaliser
            num_targets += plan.loss_normaliser
    finally:
        model.run_layer = run_layer
    return float(sum_over_ranks(total).item()) / num_targets


@dataclass(kw_only=True)
class Validation:
    """When the validation loss is computed, on what, the lowest so far, and whether training is to stop early."""

    plans: Callable[[], Sequence[StepPlan]]
    source: TokenSource
    every: int = 0
    """Number of steps between validations; 0: one after every epoch."""
    digest: str = ""
    """Of the sequences; empty: it is not known."""
    patience: int | None = None
    """Number of validations in a row without a new lowest loss that end the training; None: it is never ended."""
    best_loss: float = field(default=math.inf, init=False)
    best_step: int | None = field(default=None, init=False)
    """Steps after which the loss was lowest."""
    earlier_step: int | None = field(default=None, init=False)
    """Steps after which that of another set was lowest, whose weights stay until there is a lowest one of this set."""
    num_worse: int = field(default=0, init=False)
    """Validations since then."""
    outstanding: dict[str, Any] | None = field(default=None, init=False)
    """Metrics of the last step, if a stop cut its validation short: that comes first when the run goes on."""

    def is_due(self, step: int, *, num_steps: int, ends_epoch: bool) -> bool:
        """Whether the loss is to be computed after ``step`` of ``num_steps`` steps."""
        return step == num_steps or (step % self.every == 0 if self.every else ends_epoch)

    @property
    def should_stop(self) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and self.num_worse >= self.patience

    def compute(
        self, step: int, mean_loss: Callable[[Sequence[StepPlan], TokenSource], float]
    ) -> dict[str, float | None]:
        """Compute the loss after ``step`` steps and return the figures of it that metrics record."""
        start_s = time.perf_counter()
        loss = mean_loss(self.plans(), self.source)
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.num_worse = loss, step, 0
        else:
            self.num_worse += 1
        return {"val/loss": loss, "val/best_step": self.best_step, "val/time_s": time.perf_counter() - start_s}

    @property
    def kept_step(self) -> int | None:
        """Steps after which the weights are kept as the best."""
        return self.earlier_step if self.best_step is None else self.best_step

    def state_dict(self) -> dict[str, Any]:
        """The lowest loss so far, in plain values."""
        best_loss = self.best_loss if self.best_step is not None else None
        figures = {"best_loss": best_loss, "best_step": self.best_step, "num_worse": self.num_worse}
        if self.best_step is None and self.earlier_step is not None:
            figures["earlier_step"] = self.earlier_step
        outstanding = {} if self.outstanding is None else {"outstanding": self.outstanding}
        return {**figures, "digest": self.digest, **outstanding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint; a run that had no validation before begins with none.

        So does one with other sequences, of which the lowest loss says nothing.

        Raises:
            InputError: it is damaged.
        """
        loss, step, worse = (state.get(name) for name in ("best_loss", "best_step", "num_worse"))
        has_best = type(step) is int and type(loss) is float
        is_sound = type(worse) is int and (step is None or has_best) and type(state.get("outstanding", {})) is dict
        is_sound = is_sound and type(state.get("earlier_step", 0)) is int
        if state and not is_sound:
            raise InputError(f"the checkpoint's validation state is damaged: {state}; resume from another")
        self.outstanding = state.get("outstanding")
        self.earlier_step = state.get("earlier_step") if step is None else step
        if state.get("digest", self.digest) != self.digest:
            if step is None:
                return
            _log.warning(
                "the validation set is another one than that of the checkpoint: the lowest loss so far, %s after step "
                "%s, does not count, and patience begins anew; its weights stay until this set has a lowest loss",
                loss, step,
            )  # fmt: skip
            return
        self.best_loss, self.best_step, self.num_worse = math.inf if loss is None else loss, step, worse or 0
