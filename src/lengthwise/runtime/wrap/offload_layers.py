"""Offload of what layers of a third-party model save: which saved tensors stay on the device, and inputs of recompute.

What is not of one layer stays: weights and their casts, buffers, and what every layer is given or uses, such as
rotations and masks. Of a layer that is recomputed the input alone goes to the host; under selective recompute what
attention gave goes there as well.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.runtime.comm.activation_offload import OffloadedForward, OffloadedLayer, unpack
from lengthwise.runtime.wrap.tensors_in import tensors_in

_OF_ONE = frozenset(
    f"{name}Backward0"
    for name in (
        "ToCopy", "T", "Transpose", "View", "UnsafeView", "Alias", "Permute", "ReshapeAlias", "Split", "Select",
        "Slice", "AsStrided", "Expand", "Squeeze", "Unsqueeze",
    )
)  # fmt: skip
"""Backwards of views and casts of one tensor."""
_MOST_VIEWS = 6
"""Views and casts of a weight, one of another, that are followed."""


@dataclass(eq=False)
class LayerOffload:
    """Moves what layers of one micro-batch save to the host, for the layers that its plan names."""

    flags: tuple[bool, ...]
    """One per layer."""
    forward: OffloadedForward
    _given: set[int] = field(default_factory=set)
    """Storages of the arguments of the layer before."""
    _saved: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    """Storages that layers saved, and the first that did."""

    @contextmanager
    def layer(self, number: int, module: Any, hidden: Tensor | None, arguments: Any) -> Iterator[OffloadedLayer | None]:
        """Around the forward of a layer that is given ``arguments``, ``hidden`` among them if it is known."""
        input_storage = None if hidden is None else _storage(hidden)
        shared, before = set(map(_storage, _tensors(arguments))) - {input_storage}, self._given
        self._given = shared
        if number >= len(self.flags) or not self.flags[number]:
            with self.forward.layer(None):
                yield None
            return
        parts = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
        lasting = set(map(_storage, parts))
        lasting |= shared & before if number and before else shared
        with self.forward.layer(partial(self._stays, number, input_storage, lasting)) as layer:
            yield layer

    def _stays(self, number: int, hidden: int | None, lasting: set[int], tensor: Tensor) -> bool:
        storage = _storage(tensor)
        if storage == hidden:
            return False
        if storage in lasting or _is_of_weight(tensor):
            return True
        reference, first = self._saved.get(storage, (None, number))
        if reference is None or reference.expired():
            self._saved[storage] = StorageWeakRef(tensor.untyped_storage()), number
            return False
        return first != number


def saving(
    offload: LayerOffload | None,
    number: int,
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    key: int | str | None = None,
) -> AbstractContextManager[OffloadedLayer | None]:
    """Around the forward of a layer: what it saves goes to the host, if ``offload`` says so; None: nothing does.

    ``key``: which argument the hidden states are, as :func:`hidden_states_of` takes it.
    """
    if offload is None or not torch.is_grad_enabled():
        return nullcontext()
    module = layer if isinstance(layer, nn.Module) else getattr(layer, "__self__", None)
    return offload.layer(number, module, hidden_states_of(args, kwargs, key), (args, kwargs))


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str | None = None) -> Tensor | None:
    """The hidden states among the arguments of a layer; None: they are not found.

    ``key``: which argument they are, by position or name; None: the first, ``hidden_states``, or the first tensor.
    """
    arguments = _by_key(args, kwargs)
    value = arguments.get(key, arguments.get(0, arguments.get("hidden_states")))
    if isinstance(value, Tensor):
        return value
    return next(tensors_in((args, kwargs)), None)


def hidden_states_key(args: tuple[Any, ...], kwargs: dict[str, Any], before: Any, output: Any) -> int | str | None:
    """Which argument of a layer are the hidden states: what the layer before returned, or what is of the same shape.

    ``before``, ``output``: the hidden states that the layer before returned, and those that it returned itself.
    """
    tensors = {key: value for key, value in _by_key(args, kwargs).items() if isinstance(value, Tensor)}
    of_shape = [key for key, value in tensors.items() if isinstance(output, Tensor) and value.shape == output.shape]
    return next((key for key, value in tensors.items() if value is before), of_shape[0] if of_shape else None)


def _by_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str | None, Any]:
    """The arguments of a call by position or name."""
    return {**dict[int | str | None, Any](enumerate(args)), **dict[int | str | None, Any](kwargs.items())}


def by_position(call: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """``call`` with the arguments of these names last, by position: torch saves those alone of what it recomputes."""

    def called(*values: Any) -> Any:
        first = len(values) - len(names)
        return call(*values[:first], **dict(zip(names, values[first:])))

    return called


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.layout == torch.strided]


def _is_of_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight, or a view or cast of one, such as autocast makes."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            return isinstance(getattr(node, "variable", None), nn.Parameter)
        if node.name() not in _OF_ONE:
            return False
        node = node.next_functions[0][0]
    return False


class KeepOnHost(TorchDispatchMode):
    """Keeps what some operations give on the host, in the order of their calls."""

    def __init__(self, saved: deque[Any], layer: OffloadedLayer, is_saved: Callable[[Any], bool]) -> None:
        super().__init__()
        self._saved, self._layer, self._is_saved = saved, layer, is_saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        if self._is_saved(func):
            self._saved.append(pytree.tree_map_only(Tensor, self._layer.pack, outputs))
        return outputs


class ReplayFromHost(TorchDispatchMode):
    """Gives what was kept in place of calling these operations again."""

    def __init__(self, saved: deque[Any], is_saved: Callable[[Any], bool]) -> None:
        super().__init__()
        self._saved, self._is_saved = saved, is_saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_saved(func):
            return pytree.tree_map(unpack, self._saved.popleft())
        return func(*args, **kwargs or {})
