"""Learning rates of a training by transformers' Trainer: its scheduler's, and what callbacks make of them.

Schedulers work on an optimizer. Here that of a rank has its share of the parameters, so they get a stand-in with the
two groups that transformers makes, of nothing. Its rates are shown in the groups of the rank's optimizer, as callbacks
see and set them there: what a callback sets holds for the next update, until the scheduler sets another.
"""

import os
from typing import Any

import torch

from lengthwise.core.errors import InputError

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
        stand_in.step()  # of nothing, or the scheduler warns
        self._show()

    def rate(self) -> float:
        """The rate of the step that is next: the scheduler's, or what a callback has set since.

        Raises:
            InputError: groups of parameters have different rates.
        """
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if any(rate != self._shown for rate in rates):
            for group in self._stand_in.param_groups:
                group["lr"] = _single(rates, "a callback")
        return _single([float(group["lr"]) for group in self._stand_in.param_groups], type(self.scheduler).__name__)

    def save(self, folder: str) -> None:
        """Save where the scheduler is and what callbacks have made of its rates."""
        self.rate()
        rates = [float(group["lr"]) for group in self._stand_in.param_groups]
        torch.save({"scheduler": self.scheduler.state_dict(), "rates": rates}, os.path.join(folder, _FILE))

    def load(self, folder: str, *, num_updates: int) -> None:
        """Go to where the scheduler was when it was saved, or after ``num_updates`` steps if it was not.

        Raises:
            InputError: the file has more than plain values.
        """
        path = os.path.join(folder, _FILE)
        if os.path.isfile(path):
            self._restore(path)
        else:
            for _ in range(num_updates):
                self.scheduler.step()
        self._show()

    def _restore(self, path: str) -> None:
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise InputError(
                f"{path} cannot be read ({type(error).__name__}); delete it to take the rate from the step alone"
            ) from error
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(self._stand_in.param_groups, state["rates"], strict=True):
            group["lr"] = rate

    def end_update(self) -> None:
        """Show the rate of the update that is done, as callbacks see it then."""
        self._show()

    def step(self) -> None:
        """Go on to the rate of the next step."""
        self.rate()
        self.scheduler.step()
        self._show()

    def _show(self) -> None:
        self._shown = _single([float(g["lr"]) for g in self._stand_in.param_groups], type(self.scheduler).__name__)
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


def _constants(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups of an optimizer have beside parameters and rates."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def _single(rates: list[float], setter: str) -> float:
    """The rate that all groups have."""
    if len(set(rates)) > 1:
        words = " and ".join(f"{rate:g}" for rate in sorted(set(rates)))
        raise InputError(f"{setter} gives groups of parameters different rates, {words}; give all the same")
    return rates[0]
