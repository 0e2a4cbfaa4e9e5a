"""Tensors that a loop is given, and what they were: it may change them in place.

A loop leaves targets out in place before its forward, or puts other labels there afterwards, to decode them. So it is
given copies. How many targets a micro-batch has is counted of what they were.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Copy(NamedTuple):
    """One tensor that was given."""

    tensor: Tensor
    original: Tensor
    version: int
    ignored: int | None
    """The label without a loss; None: these are no labels."""

    @property
    def is_changed(self) -> bool:
        if version_of(self.tensor) != self.version:
            return True
        return self.tensor.device.type == "cpu" and not torch.equal(self.tensor, self.original)  # NumPy counts nothing


class HandedOut:
    """The copies that the loop of one micro-batch was given."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def copy_of(self, original: Tensor, *, ignored: int | None = None) -> Tensor:
        """A copy for the loop; ``ignored``: the label without a loss, of labels."""
        tensor = original.clone()
        self._copies.append(_Copy(tensor, original, version_of(tensor), ignored))
        return tensor

    @property
    def has_labels(self) -> bool:
        """Whether anybody has asked what tokens are to predict."""
        return any(copy.ignored is not None for copy in self._copies)

    def targets_of_changed(self, labels: Any) -> int | None:
        """The number of targets of labels that were changed in place; None: these are no such labels."""
        copy = self._found(labels)
        if copy is None or copy.ignored is None or not copy.is_changed:
            return None
        return int((copy.tensor != copy.ignored).sum())

    def as_given(self, tensor: Any) -> Any:
        """``tensor``; of one that was given and changed in place, what it was."""
        copy = self._found(tensor)
        return tensor if copy is None or not copy.is_changed else copy.original.view(tensor.shape)

    @property
    def has_other_targets(self) -> bool:
        """Whether labels were changed in place so that there are more or fewer targets."""
        return any(
            copy.ignored is not None
            and copy.is_changed
            and int((copy.tensor == copy.ignored).sum()) != int((copy.original == copy.ignored).sum())
            for copy in self._copies
        )

    def _found(self, tensor: Any) -> _Copy | None:
        if not isinstance(tensor, Tensor) or not self._copies:
            return None
        place = tensor.data_ptr()
        same = (copy for copy in self._copies if copy.tensor.data_ptr() == place)
        return next((copy for copy in same if copy.tensor.numel() == tensor.numel()), None)


class GivenInputs:
    """The arguments of a forward as the loop was given them, whatever it does to their dictionary."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs, self.values = inputs, dict(inputs)
        self._versions = {name: _versions(value) for name, value in self.values.items()}

    def is_changed(self, name: str) -> bool:
        """Whether tensors of an argument were changed in place."""
        return _versions(self.values[name]) != self._versions[name]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def _versions(value: Any) -> list[int]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
