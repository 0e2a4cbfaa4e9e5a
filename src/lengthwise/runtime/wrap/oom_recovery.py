"""What a forward returns that was not computed, for lack of memory or as a later stage of the pipeline computes it.

Without memory, the rank sends zeros for its remaining collectives (:mod:`~lengthwise.runtime.wrap.zero_collectives`),
all ranks leave the step together at its update, and its batch is planned again. What the model's forward would have
returned is made of :class:`~lengthwise.runtime.wrap.missing_tensor.MissingTensor`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.wrap.missing_tensor import MissingTensor


class OutputStructure:
    """What a forward returns: a tree of tensors, some of whose axes are over the slots of a rank."""

    def __init__(self) -> None:
        self._form: pytree.TreeSpec | None = None
        self._leaves: list[Any] = []
        self._num_slots = 0

    def note(self, output: Any, num_slots: int) -> None:
        """Store the structure of a forward's output of ``num_slots`` slots.

        Axes as long as that are over slots, unless they have the same length in an output of other slots.
        """
        if self._form is None:
            leaves, self._form = pytree.tree_flatten(output)
            self._num_slots = num_slots
            self._leaves = [_axes_of(leaf, num_slots) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        elif num_slots != self._num_slots:
            leaves, form = pytree.tree_flatten(output)
            if form == self._form:
                self._leaves = [_fewer_slots(axes, leaf, num_slots) for axes, leaf in zip(self._leaves, leaves)]

    def not_computed(self, num_slots: int, device: torch.device) -> Any:
        """Build an output of the stored structure, of placeholders for ``num_slots`` slots.

        Raises:
            LengthwiseError: no forward was seen yet.
        """
        if self._form is None:
            raise LengthwiseError("the very first forward ran out of memory; lower max_length or use more devices")
        leaves = [leaf.placeholder(num_slots, device) if isinstance(leaf, _Axes) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._form)


@dataclass(frozen=True)
class _Axes:
    """The shape of a tensor, None for axes over slots."""

    lengths: tuple[int | None, ...]
    dtype: torch.dtype

    def placeholder(self, num_slots: int, device: torch.device) -> MissingTensor:
        shape = [num_slots if length is None else length for length in self.lengths]
        return MissingTensor(*shape, dtype=self.dtype, device=device)


def _axes_of(tensor: Tensor, num_slots: int) -> _Axes:
    return _Axes(tuple(None if length == num_slots else length for length in tensor.shape), tensor.dtype)


def _fewer_slots(axes: Any, leaf: Any, num_slots: int) -> Any:
    """What is known of a tensor, without axes over slots that have another length for ``num_slots``."""
    if not isinstance(axes, _Axes) or not isinstance(leaf, Tensor) or leaf.dim() != len(axes.lengths):
        return axes
    pairs = zip(axes.lengths, leaf.shape)
    lengths = tuple(None if length is None and now == num_slots else length or now for length, now in pairs)
    return _Axes(lengths, axes.dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on ``device``; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
