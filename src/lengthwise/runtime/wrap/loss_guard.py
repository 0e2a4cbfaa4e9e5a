"""Losses that are computed after their forward: a rank whose memory is not enough for one goes on without it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.deferred_loss import DeferredLoss
from lengthwise.runtime.wrap.missing_tensor import MissingTensor


class HasStep(Protocol):
    """A model whose weights are updated by steps."""

    next_step: int
    """The step that its weights are for."""


def guard_losses(output: Any, shard: PackShard, model: HasStep, *, is_gathered: bool) -> None:
    """Guard the losses in the output of a forward of ``model``, as a forward guards those that it computes.

    ``is_gathered``: weights are gathered for the micro-batch, and are gone after its backward.
    """
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, DeferredLoss):
            leaf.guard(partial(_compute, shard, model, model.next_step, is_gathered))


def _compute(shard: PackShard, model: HasStep, step: int, is_gathered: bool, compute: Callable[[], Any]) -> Any:
    """A loss of ``step``, or a placeholder where memory was not enough.

    Raises:
        InputError: the weights that it is made of are gone.
    """
    if model.next_step != step or (is_gathered and shard.is_finished):
        end = "step.backward(...), which lets go of gathered weights" if is_gathered else "step.update()"
        raise InputError(
            "a loss of the model's own is first read when the weights that it is made of are gone; read it, as in "
            f"output.loss.item(), before {end}"
        )
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        shard.note_out_of_memory(error)
        return MissingTensor()
