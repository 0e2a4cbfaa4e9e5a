"""The tensors in what a layer of somebody else's model takes or returns."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dictionaries and dataclasses, in their order."""
    for leaf in pytree.tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
