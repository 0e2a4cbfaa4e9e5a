"""What the layer of a model that is called last returns, and from there on a graph for gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lengthwise.runtime.loop.prepared_model import PreparedModel


class LayerOutputs:
    """Notes what the layers of a model return for a number of slots, of which the last call's stays."""

    def __init__(self, num_slots: int, *, graph_from: int | None) -> None:
        """``graph_from``: the call of a layer after which there is a graph; 0: from the start, None: nowhere.

        Calls that return nothing by slot do not count.
        """
        self._num_slots, self._graph_from = num_slots, graph_from
        self.num_calls = 0
        self.tensors: dict[int, Tensor] = {}
        """What has a value for each slot in the output of the last call, or of the one where the graph begins, by its
        place."""

    @contextmanager
    def watched(self, run: PreparedModel) -> Iterator[None]:
        """Within, what layers return is noted."""
        layers = dict.fromkeys(run.wrapped_model.structure.layers)
        hooks = [layer.register_forward_hook(self._note) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        tensors = {place: leaf for place, leaf in enumerate(tensors_in(output)) if self.is_of_slots(leaf)}
        if not tensors:
            return output
        self.num_calls += 1
        if self._graph_from and self.num_calls > self._graph_from:
            return output
        self.tensors = tensors
        if self.num_calls != self._graph_from:
            return output
        torch.set_grad_enabled(True)
        self.tensors = {place: value.detach().requires_grad_() for place, value in tensors.items()}
        places = count()

        def change(leaf: Tensor) -> Tensor:
            begin = self.tensors.get(next(places))
            return leaf if begin is None else begin.clone()  # which may change in place

        return with_tensors(output, change)

    def is_of_slots(self, value: Tensor) -> bool:
        """Whether a tensor has floating values for each slot."""
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        return is_plain and value.is_floating_point() and value.ndim > 1 and self._dims(value).count(True) == 1

    def rows(self, value: Tensor) -> Tensor:
        """[slots, features] of something that has a value for each slot."""
        return value.detach().movedim(self._dims(value).index(True), 0).flatten(1)

    def _dims(self, value: Tensor) -> list[bool]:
        return [size == self._num_slots for size in value.shape]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in lists, tuples, dictionaries and dataclasses, in order."""
    tensors: list[Tensor] = []

    def note(leaf: Tensor) -> Tensor:
        tensors.append(leaf)
        return leaf

    with_tensors(value, note)
    return tensors


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of lists, tuples, dictionaries and dataclasses in which each tensor is changed, in order."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy(leaf)
        for field in fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(made, field.name, with_tensors(getattr(leaf, field.name), change))
        return made

    return pytree.tree_map(of_leaf, value)
