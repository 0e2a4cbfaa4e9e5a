"""Parameter groups of an optimizer that a user's function makes: the rate of each, and values that change in steps.

Some optimizers count or adapt in their groups, as schedule-free ones do. ``torch.optim.Optimizer.state_dict`` has such
values, and so do checkpoints here. Constants, such as betas, are always those of the function that makes the optimizer.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ORIGIN = "lengthwise"
"""The key of a group's :class:`GroupOrigin`, beside its parameters and constants."""
_LAST_RATE = "lengthwise_lr"
"""The key of the rate that a group had after the last update."""
_NO_STATE = ("params", "lr", ORIGIN, _LAST_RATE)


@dataclass(frozen=True, kw_only=True)
class GroupOrigin:
    """What a parameter group was when its optimizer was made."""

    position: int
    """The position among all groups of the optimizer, also of those whose parameters other ranks update."""
    lr: float | None
    """The learning rate of the group; None: it has none yet."""
    base_lr: float | None
    """The rate that stands for all groups: others keep their ratio to it. None: all have the same."""
    values: dict[str, Any]
    """Plain values, by name."""
    is_empty: bool = False
    """Whether it was made without any parameter."""

    def rate_at(self, lr: float) -> float:
        """The rate of the group where ``lr`` stands for all of them."""
        if self.lr is None or not self.base_lr or self.lr == self.base_lr:
            return lr
        return self.lr * (lr / self.base_lr)


def note_origins(optimizer: torch.optim.Optimizer, base_lr: float | None, empty: Collection[int] = ()) -> None:
    """Note in each group of a new optimizer what it is now; ``empty``: positions of those made without parameters."""
    for position, group in enumerate(optimizer.param_groups):
        lr = _rate_of(group)
        group[ORIGIN] = GroupOrigin(
            position=position, lr=lr, base_lr=base_lr, values=plain_values(group), is_empty=position in empty
        )
    note_rates(optimizer)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group its rate where ``lr`` stands for all of them."""
    for group in optimizer.param_groups:
        origin: GroupOrigin | None = group.get(ORIGIN)
        group["lr"] = lr if origin is None else origin.rate_at(lr)


def note_rates(optimizer: torch.optim.Optimizer | None) -> None:
    """Note the rate of each group of a user's optimizer, after an update."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get(ORIGIN) is not None:
            group[_LAST_RATE] = _rate_of(group)


def changed_rate(optimizer: torch.optim.Optimizer | None) -> str:
    """What a loop, or its scheduler, did to the rate of a group since the last update; an empty string: nothing."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if _LAST_RATE in group and group[_LAST_RATE] != (rate := _rate_of(group)):
            return (
                f"lr of a parameter group of optimizer= was set to {rate}, and each step sets it, by lr= of prepare; "
                "leave that out, or give the schedule as lr=function of the number of the step, from 0, and the "
                "optimizer none (groups keep the ratios of their rates)"
            )
    return ""


def _rate_of(group: Mapping[str, Any]) -> float | None:
    return None if group.get("lr") is None else float(group["lr"])


def plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the values of a group that checkpoints keep where they change."""
    return {
        name: copy.deepcopy(value) for name, value in group.items() if name not in _NO_STATE and is_plain(value)
    }  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a bool, a text or None, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return type(value) in (tuple, list) and all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def changed_values(optimizer: torch.optim.Optimizer | None, *, of_empty: bool = False) -> dict[str, dict[str, Any]]:
    """Plain values of groups that are not what they were when the optimizer was made, for JSON, by position.

    Of the groups that have parameters, or, with ``of_empty``, of those without, whose values say less: ranks that
    update parameters of such a group may have others.
    """
    changes: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        origin: GroupOrigin | None = group.get(ORIGIN)
        if origin is None or of_empty == bool(group["params"]):
            continue
        changes[str(origin.position)] = {
            name: _encoded(value)
            for name, value in plain_values(group).items()
            if name not in origin.values or origin.values[name] != value
        }
    return changes


def restore_values(optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give groups the values that :func:`changed_values` gave, and all others as when the optimizer was made."""
    for group in optimizer.param_groups if optimizer is not None else ():
        origin: GroupOrigin | None = group.get(ORIGIN)
        if origin is None:
            continue
        for name in plain_values(group):
            if name not in origin.values:
                del group[name]
        changes = {name: _decoded(value) for name, value in saved.get(str(origin.position), {}).items()}
        group.update({**copy.deepcopy(origin.values), **changes})


def _encoded(value: Any) -> Any:
    """A plain value for JSON, which has no tuples."""
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encoded(item) for item in value]}
    return value


def _decoded(value: Any) -> Any:
    """The plain value that was encoded."""
    if isinstance(value, dict):
        [(kind, items)] = value.items()
        values = [_decoded(item) for item in items]
        return tuple(values) if kind == "tuple" else values
    return value
