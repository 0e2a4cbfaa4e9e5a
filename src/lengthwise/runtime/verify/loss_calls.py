"""What a model's loss does to labels, which few sequences need not show: some it leaves out, or weighs otherwise.

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
from lengthwise.runtime.wrap.gradient_changes import graph_of

_LOSSES = {function: signature(function) for function in (F.cross_entropy, F.nll_loss)}


class _Call(NamedTuple):
    made: Tensor
    """What it gave."""
    target: Tensor
    ignored: int
    weights: Tensor | None
    """Of classes, by which it is a mean; None: it is a mean over targets, a sum, or one number for each."""


class ObserveLossCalls(TorchFunctionMode):
    """Within, notes calls of losses that take labels of classes."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Call the function, and note it if it is a loss."""
        made = func(*args, **(kwargs := kwargs or {}))
        if (form := _LOSSES.get(func)) is not None:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            self._note(made, bound.arguments)
        return made

    def _note(self, made: Tensor, arguments: Mapping[str, Any]) -> None:
        target = arguments["target"]
        if isinstance(target, Tensor) and not target.is_floating_point():
            weights = arguments["weight"] if arguments["reduction"] == "mean" else None
            self._calls.append(_Call(made, target.detach().flatten(), arguments["ignore_index"], weights))

    def uncounted(self, loss: Tensor, labels: Callable[[], Tensor]) -> set[int]:
        """The labels, of any sequence, that count otherwise in a ``loss`` of ``labels`` [t] than those have, or not at
        all: those that it leaves out, and classes that have another weight.

        What the loss is not made of, such as a metric, says nothing; ``labels`` is not called where nothing was noted.
        """
        calls = [call for call in self._calls if call.made.grad_fn is not None]
        nodes = set(graph_of(loss)) if calls else set()
        calls = [call for call in calls if call.made.grad_fn in nodes and _is_of(call, labels())]
        return {call.ignored for call in calls}.union(*map(_of_other_weight, calls))


def _is_of(call: _Call, labels: Tensor) -> bool:
    """Whether a loss was made of these labels, all of them or all but the last; those that are left out are alike."""
    target, number = call.target.to(labels.device), call.target.numel()
    if labels.dim() != 1 or number not in (len(labels), len(labels) - 1):
        return False
    counts = labels[:number] != IGNORE
    return bool(counts.any()) and bool(torch.equal(target[counts], labels[:number][counts]))


def _of_other_weight(call: _Call) -> list[int]:
    """Classes that weigh otherwise than those of the targets, where these all weigh the same."""
    if call.weights is None:
        return []
    of_targets = call.weights[call.target[call.target != call.ignored]]
    if not len(of_targets) or not torch.allclose(of_targets, of_targets[0]):
        return []  # which the comparison with packs shows
    return torch.nonzero(~torch.isclose(call.weights, of_targets[0])).flatten().tolist()
