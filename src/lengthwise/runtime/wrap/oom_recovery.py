"""OOM recovery: placeholders for tensors that a forward could not compute for lack of memory.

The rank sends zeros for its remaining collectives (:mod:`~lengthwise.runtime.wrap.zero_collectives`), all ranks leave
the step together at its update, and its batch is planned again. What the model's forward would have returned is a
:class:`MissingTensor`, with which a user's loop goes on unharmed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lengthwise.core.errors import LengthwiseError


class MissingTensor:
    """A placeholder for a tensor that was not computed; every operation on it returns another placeholder."""

    def __init__(self, parts: int = 0) -> None:
        """``parts``: what it is unpacked into, such as the members of a unit; 0: that is not known."""
        self.parts = parts

    def __iter__(self) -> "Iterator[MissingTensor]":
        if not self.parts:
            raise TypeError("what was not computed for lack of memory cannot be unpacked; use its elements by number")
        return iter([self] * self.parts)

    def __getattr__(self, name: str) -> "MissingTensor":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "MissingTensor":
        """Return a placeholder for the result of a tensor's method."""
        return self

    def __getitem__(self, index: Any) -> "MissingTensor":
        return self

    def __float__(self) -> float:
        return float("nan")

    def __format__(self, spec: str) -> str:
        return format(float("nan"), spec)

    def __repr__(self) -> str:
        return "not computed for lack of memory"

    def split(self, sizes: Any, dim: int = 0) -> "MissingTensor | list[MissingTensor]":
        """Return a placeholder for each part that sizes are given of."""
        return [self] * len(sizes) if isinstance(sizes, list | tuple) else self

    def item(self) -> float:
        """Return NaN in place of the number."""
        return float("nan")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Return a placeholder for the result of any torch function."""
        missing = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return max(missing, key=lambda tensor: tensor.parts)


def _arithmetic(self: MissingTensor, *others: Any) -> MissingTensor:
    return self


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod"):
    setattr(MissingTensor, f"__{_name}__", _arithmetic)
    setattr(MissingTensor, f"__r{_name}__", _arithmetic)
for _name in ("neg", "pos", "abs"):
    setattr(MissingTensor, f"__{_name}__", _arithmetic)


class OutputStructure:
    """The tree structure of a forward's output, as it was first seen."""

    def __init__(self) -> None:
        self._form: pytree.TreeSpec | None = None

    def note(self, output: Any) -> None:
        """Store the structure of a forward's output."""
        if self._form is None:
            self._form = pytree.tree_flatten(output)[1]

    def not_computed(self) -> Any:
        """Build an output of the stored structure, of placeholders.

        Raises:
            LengthwiseError: no forward was seen yet.
        """
        if self._form is None:
            raise LengthwiseError("the very first forward ran out of memory; lower max_length or use more devices")
        return pytree.tree_unflatten([MissingTensor()] * self._form.num_leaves, self._form)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on ``device``; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
