"""Tensors that a loop is given, and what they were: it may change them in place.

A loop leaves targets out in place before its forward, or puts other labels there afterwards, to decode them. So it is
given copies. How many targets a micro-batch has is counted of what they were.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Given(NamedTuple):
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
        self._given: list[_Given] = []

    def copy(self, original: Tensor, *, ignored: int | None = None) -> Tensor:
        """A copy for the loop; ``ignored``: the label without a loss, of labels."""
        tensor = original.clone()
        self._given.append(_Given(tensor, original, version_of(tensor), ignored))
        return tensor

    def targets_of_changed(self, labels: Any) -> int | None:
        """The number of targets of labels that were changed in place; None: these are no such labels."""
        given = self._found(labels)
        if given is None or given.ignored is None or not given.is_changed:
            return None
        return int((given.tensor != given.ignored).sum())

    def as_given(self, tensor: Any) -> Any:
        """``tensor``; of one that was given and changed in place, what it was."""
        given = self._found(tensor)
        return tensor if given is None or not given.is_changed else given.original.view(tensor.shape)

    @property
    def has_other_targets(self) -> bool:
        """Whether labels were changed in place so that there are more or fewer targets."""
        return any(
            given.ignored is not None
            and given.is_changed
            and int((given.tensor == given.ignored).sum()) != int((given.original == given.ignored).sum())
            for given in self._given
        )

    def _found(self, tensor: Any) -> _Given | None:
        if not isinstance(tensor, Tensor) or not self._given:
            return None
        place = tensor.data_ptr()
        same = (given for given in self._given if given.tensor.data_ptr() == place)
        return next((given for given in same if given.tensor.numel() == tensor.numel()), None)


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
