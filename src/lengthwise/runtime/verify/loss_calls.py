"""What a model's loss does to labels, which few sequences need not show: some it leaves out, or it weighs classes.

A loss is weighed by its targets. Where a function of torch makes it of labels, its arguments say which of them count,
for labels too that packs are not compared with.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.runtime.models.targets import IGNORE

_LOSSES = {function: signature(function) for function in (F.cross_entropy, F.nll_loss)}


class _Call(NamedTuple):
    target: Tensor
    ignored: int
    is_weighted: bool
    """Whether it is a mean by weights of classes that are not all the same."""


class ObserveLossCalls(TorchFunctionMode):
    """Within, notes calls of losses that take labels of classes."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Note a loss, and call the function."""
        kwargs = kwargs or {}
        if (form := _LOSSES.get(func)) is not None:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            self._note(bound.arguments)
        return func(*args, **kwargs)

    def _note(self, arguments: Mapping[str, Any]) -> None:
        target, weight = arguments["target"], arguments["weight"]
        if isinstance(target, Tensor) and not target.is_floating_point():
            is_mean = arguments["reduction"] == "mean"
            is_weighted = is_mean and weight is not None and bool((weight != weight[0]).any())
            self._calls.append(_Call(target.detach().flatten(), arguments["ignore_index"], is_weighted))

    def of(self, labels: Callable[[], Tensor]) -> tuple[set[int], bool]:
        """The labels that losses of ``labels`` [t] leave out, and whether one of them weighs classes.

        ``labels`` is not called where nothing was noted.
        """
        calls = [call for call in self._calls if _is_of(call, labels())]
        return {call.ignored for call in calls}, any(call.is_weighted for call in calls)


def _is_of(call: _Call, labels: Tensor) -> bool:
    """Whether a loss was made of these labels, all of them or all but the last; those that are left out are alike."""
    target, number = call.target.to(labels.device), call.target.numel()
    if labels.dim() != 1 or number not in (len(labels), len(labels) - 1):
        return False
    counts = labels[:number] != IGNORE
    return bool(counts.any()) and bool(torch.equal(target[counts], labels[:number][counts]))
