"""Learning rates of a training by transformers' Trainer: its scheduler's, and what callbacks make of them.

Schedulers work on an optimizer. Here that of a rank has its share of the parameters, so they get a stand-in with the
two groups that transformers makes, of nothing. Its rates are shown in the groups of the rank's optimizer, as callbacks
see and set them there: what a callback sets holds for the next update, until the scheduler sets another.

A run that is resumed has the schedule that its arguments say now, at the step it has come to. What cannot be made anew,
a scheduler of a user's own class or what a callback made of the rate, comes from the checkpoint.
"""

import logging
import os
from typing import Any

import torch

from lengthwise.core.errors import InputError
from lengthwise.integrations.hf_schedule_settings import (
    changes_in_words,
    is_of_the_step,
    own_values,
    rates_of,
    schedule_settings,
)

_log = logging.getLogger("lengthwise")
_FILE = "schedule.pt"
"""The state of a schedule in the folder of a checkpoint."""
_WAY_OUT = (
    "choose lr_scheduler_type, or override create_scheduler(self, num_training_steps, optimizer=None) and make it of "
    "self.optimizer"
)


def scheduler_problem(trainer: Any) -> str:
    """Why a scheduler that a trainer was given would be ignored; an empty string if it was given none."""
    if trainer.lr_scheduler is None or trainer._created_lr_scheduler:  # transformers makes those anew that it made
        return ""
    kind = type(trainer.lr_scheduler).__name__
    return f"lr_scheduler: the {kind} sets rates of another optimizer than the one that trains; {_WAY_OUT}"


class Schedule:
    """The rate of each step, by the scheduler that a trainer makes."""

    def __init__(self, trainer: Any, optimizer: torch.optim.Optimizer | None, *, name: str, num_steps: int) -> None:
        """Let ``trainer`` make its scheduler, on a stand-in for ``optimizer``, which is this rank's.

        ``name``: adamw or sgd, that of the optimizer; ``num_steps``: of the training.

        Raises:
            InputError: the scheduler does not say rates of this optimizer, one for all parameters at each step.
        """
        stand_in = _stand_in(trainer.args, name)
        constants = _constants(stand_in)
        trainer.optimizer, trainer.lr_scheduler = stand_in, None
        trainer.create_scheduler(num_training_steps=num_steps)
        self.scheduler: Any = trainer.lr_scheduler
        self._stand_in, self.optimizer = stand_in, stand_in if optimizer is None else optimizer
        self._shown = 0.0
        self._check(constants)
        self._settings = schedule_settings(trainer.args, self.scheduler, stand_in.param_groups[0], num_steps=num_steps)
        self._made = self._own_state()
        self._num_steps, self._is_set, self._is_first = 0, False, trainer.args.process_index == 0
        stand_in.step()  # of nothing, or the scheduler warns
        self._show()

    def rate(self) -> float:
        """The rate of the step that is next: the scheduler's, or what a callback has set since.

        Raises:
            InputError: groups of parameters have different rates.
        """
        rates = rates_of(self.optimizer)
        if any(rate != self._shown for rate in rates):
            self._is_set = True
            for group in self._stand_in.param_groups:
                group["lr"] = _single(rates, "a callback")
        return _single(rates_of(self._stand_in), type(self.scheduler).__name__)

    def save(self, folder: str) -> None:
        """Save what makes the schedule, where the scheduler is, and what callbacks have made of its rates."""
        self.rate()
        place = getattr(self.scheduler, "last_epoch", self._num_steps)
        is_left_alone = not self._is_set and place == self._num_steps and self._own_state() == self._made
        document = {
            "scheduler": self.scheduler.state_dict(),
            "rates": rates_of(self._stand_in),
            "settings": self._settings,
            "num_steps": self._num_steps,
            "is_left_alone": is_left_alone,
        }
        torch.save(document, os.path.join(folder, _FILE))

    def load(self, folder: str, *, num_updates: int) -> None:
        """Go to where the scheduler was when it was saved, or after ``num_updates`` steps if it was not.

        The rate is that of the schedule as it was made now. It is the saved one where the scheduler cannot be made
        anew, and where nothing of the schedule was changed but what a callback made of it.

        Raises:
            InputError: the file has more than plain values, or the scheduler has no rate for that step.
        """
        path = os.path.join(folder, _FILE)
        if os.path.isfile(path):
            self._restore(path)
        else:
            self._go_to(num_updates)
        self._show()

    def _go_to(self, num_steps: int) -> None:
        try:
            for _ in range(num_steps):
                self.scheduler.step()
        except ValueError as error:  # such as of OneCycleLR
            kind = type(self.scheduler).__name__
            raise InputError(
                f"the {kind} has no rate for step {num_steps} ({error}); set a larger max_steps"
            ) from error
        self._num_steps = num_steps

    def _restore(self, path: str) -> None:
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise InputError(
                f"{path} cannot be read ({type(error).__name__}); delete it to take the rate from the step alone"
            ) from error
        saved, now = state.get("settings", _base_rate(state["scheduler"])), self._settings
        changes, num_steps = changes_in_words(saved, now), state.get("num_steps", state["scheduler"].get("last_epoch"))
        is_left_alone, is_known = state.get("is_left_alone", True), is_of_the_step(self.scheduler)
        if is_known and num_steps is not None and (changes or is_left_alone):
            self._go_to(num_steps)
            rates = rates_of(self._stand_in)
            if changes or rates != state["rates"]:
                self._say(changes or "a schedule of other rates", state["rates"], is_left_alone=is_left_alone)
            return
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self._stand_in.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self._num_steps, self._is_set = num_steps or 0, True
        if changes and self._is_first:
            _log.warning(
                "resumed with %s: the state of the %s is that of the checkpoint, with a rate of %g now, since it "
                "cannot be made anew for the step",
                changes, type(self.scheduler).__name__, state["rates"][0],
            )  # fmt: skip

    def _say(self, changes: str, saved_rates: list[float], *, is_left_alone: bool) -> None:
        if not self._is_first:
            return
        rate = rates_of(self._stand_in)[0]
        dropped = "" if is_left_alone else "; what callbacks had made of it is dropped"
        _log.warning(
            "resumed with %s: the rate of the next step is %g, where the checkpoint has %g%s",
            changes, rate, saved_rates[0], dropped,
        )  # fmt: skip

    def _own_state(self) -> tuple[Any, ...]:
        """What callbacks may change of the scheduler itself."""
        return list(getattr(self.scheduler, "base_lrs", ())), own_values(self.scheduler)

    def end_update(self) -> None:
        """Show the rate of the update that is done, as callbacks see it then."""
        self._show()

    def step(self) -> None:
        """Go on to the rate of the next step."""
        self.rate()
        self.scheduler.step()
        self._num_steps += 1
        self._show()

    def _show(self) -> None:
        self._shown = _single(rates_of(self._stand_in), type(self.scheduler).__name__)
        for group in self.optimizer.param_groups:
            group["lr"] = self._shown

    def _check(self, constants: list[dict[str, Any]]) -> None:
        scheduler, kind = self.scheduler, type(self.scheduler).__name__
        if scheduler is None:
            raise InputError("create_scheduler made no scheduler; set self.lr_scheduler in it")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or kind == "GreedyLR":
            raise InputError(f"create_scheduler: the rates of {kind} depend on what is learned, not on the step alone")
        if getattr(scheduler, "optimizer", self._stand_in) is not self._stand_in:
            raise InputError(
                f"create_scheduler: the {kind} sets rates of another optimizer than the one that trains; make it of "
                "self.optimizer, as it is when create_scheduler is called"
            )
        for before, now in zip(constants, _constants(self._stand_in)):
            for name, value in before.items():
                if now[name] != value:
                    raise InputError(
                        f"create_scheduler: the {kind} changes {name} from {value} to {now[name]}, and only rates are "
                        "taken from it; leave that out (cycle_momentum=False)"
                    )


def _stand_in(args: Any, name: str) -> torch.optim.Optimizer:
    """An optimizer of nothing, with the groups of transformers: parameters that decay, and those that do not."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": decay} for decay in (args.weight_decay, 0.0)
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _base_rate(state: dict[str, Any]) -> dict[str, Any]:
    """What a scheduler's state says of its settings, of a checkpoint without them."""
    rates: list[float] = list(state.get("base_lrs") or ())
    return {"learning_rate": float(rates[0])} if rates else {}


def _constants(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer have beside parameters and rates."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def _single(rates: list[float], setter: str) -> float:
    """The rate that all groups have."""
    if len(set(rates)) > 1:
        words = " and ".join(f"{rate:g}" for rate in sorted(set(rates)))
        raise InputError(f"{setter} gives groups of parameters different rates, {words}; give all the same")
    return rates[0]
