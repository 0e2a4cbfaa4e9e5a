"""Losses that are bent after their mean: clamped, or their absolute value taken, as flooding does (Ishida et al. 2020).

A step's loss is a mean over all its targets, made of means over micro-batches. Of the absolute value of a mean that
does not hold, nor of another function with a kink; where such a loss is on one side of the kink it looks like any
other, so values cannot tell. The operations that made it can: one with a kink that takes a single number and gives one.
"""

from collections.abc import Set
from typing import Any

from torch import Tensor

from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.loss_places import num_with_targets
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.missing_tensor import MissingTensor

_WITH_KINKS = (
    "Abs", "Clamp", "ClampMin", "ClampMax", "Elu", "Hardtanh", "HuberLoss", "LeakyRelu", "Maximum", "Minimum", "Relu",
    "SmoothL1Loss", "Threshold",
)  # fmt: skip
_MOST = 300
"""Operations that are looked through for those that made what a forward returned."""


def check_not_bent(loss: Tensor, *, model: str, micro_batch: MicroBatch) -> None:
    """Raise ``CheckError`` if the loss of a micro-batch of several sequences has an operation with a kink after its
    mean.

    As many such operations as sequences with targets are taken for one of each sequence, which plans do not change.
    """
    if len(micro_batch.shard.ids) == 1 or isinstance(loss, MissingTensor):
        return
    bends = _bends(loss, {edge.node for forward in micro_batch.shard.passes for edge, _ in forward.roots})
    if bends and len(bends) < num_with_targets(micro_batch):
        raise CheckError(
            f"the loss of {model} has an operation with a kink after its mean over a micro-batch ({bends[0]}, such as "
            "clamp, abs or flooding), so what it learns depends on which sequences share one. Take it of the loss of "
            "each token or sequence, before the mean; or leave it out"
        )


def bends_after(loss: Tensor, node: Any) -> list[str]:
    """The operations with kinks, by name, between a number that ``node`` made and a loss that is made of it."""
    return _bends(loss, {node}, seen={node})


def _bends(loss: Tensor, outputs: Set[Any], seen: set[Any] | None = None) -> list[str]:
    """The last operations with kinks that take and give single numbers made of a forward's ``outputs``, by name.

    ``seen``: operations before which none is looked for.
    """
    bends, waiting, seen = list[str](), [loss.grad_fn], set[Any]() if seen is None else seen
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not _is_number(node):
            continue
        seen.add(node)
        inputs = [before for before, _ in node.next_functions if before is not None]
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind in _WITH_KINKS and any(_is_number(before) and _reaches(before, outputs) for before in inputs):
            bends.append(node.name())
        else:
            waiting += inputs
    return bends


def _shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what an operation gave; None: a parameter, or not known."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[0].shape) if metadata and node.next_functions else None


def _is_number(node: Any) -> bool:
    return _shape_of(node) == ()


def _reaches(node: Any, outputs: Set[Any]) -> bool:
    """Whether an operation depends on one of the operations that made ``outputs``, and not on weights alone."""
    waiting, seen = [node], set[Any]()
    while waiting and len(seen) < _MOST:
        node = waiting.pop()
        if node in outputs:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False
