"""Run a model on copies of its tensors and restore it exactly.

A check must leave nothing behind: no gradient, no statistics that a forward in training mode updated, no table that a
module cached in another dtype, no training flag.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import CheckError

_KEPT = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module, other than its attributes, whose entries a forward may replace."""


@contextmanager
def scratch_state(
    model: nn.Module, constants: list[Tensor], *, dtype: torch.dtype | None, attributes: bool = True
) -> Iterator[None]:
    """Within, ``constants`` are copies of their values, floating ones in ``dtype``; None: only buffers, in their dtype.

    Tensors keep their identity. Afterwards values, gradients, training flags and, where modules are no wrappers with
    machinery of their own, attributes are the objects they were.
    """
    training = [(module, module.training) for module in model.modules()]
    attributes_of_modules = [(part, _attributes_of(part)) for part in _with_configs(model) if attributes]
    trained = {id(parameter) for parameter in model.parameters()}
    swapped: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for tensor in {id(tensor): tensor for tensor in constants}.values():
        is_parameter = id(tensor) in trained
        if tensor.layout != torch.strided or not _is_plain(tensor) or (dtype is None and is_parameter):
            continue
        swapped.append((tensor, tensor.data, tensor.grad if is_parameter else None))
        if is_parameter:
            tensor.grad = None
        floating = tensor.is_floating_point() and dtype is not None
        tensor.data = tensor.data.to(dtype, copy=True) if floating else tensor.data.clone()
    try:
        yield
    finally:
        for tensor, data, gradient in swapped:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient
        for module, values in attributes_of_modules:
            _restore(module, values)
        for module, is_training in training:
            module.training = is_training


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no subclass, such as a DTensor, whose data cannot be exchanged."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def _with_configs(model: nn.Module) -> list[Any]:
    """The modules of a model, and their configs, which a forward may change as well."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return [*modules, *(config for config in configs.values() if hasattr(config, "__dict__"))]


def _attributes_of(module: Any) -> dict[str, Any]:
    """The attributes of a module or a config, with copies of the dictionaries and lists among them."""
    return {
        name: (value, value.copy() if type(value) in (dict, list) or name in _KEPT else None)
        for name, value in vars(module).items()
    }


def _restore(module: Any, attributes: dict[str, Any]) -> None:
    now = vars(module)
    for name in set(now) - set(attributes):
        del now[name]
    for name, (value, contents) in attributes.items():
        now[name] = value
        if isinstance(value, list) and contents is not None:
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)


def changed_buffers(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of the buffers saved with a model whose values differ from ``before``."""
    return [name for name, value in saved_buffers(model).items() if name not in before or _differs(value, before[name])]


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the persistent buffers of a model, such as running statistics."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.detach().clone()
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _differs(value: Tensor, other: Tensor) -> bool:
    return value.shape != other.shape or not torch.equal(value, other.to(value.dtype))


def check_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ``CheckError`` if forwards have changed buffers of the model."""
    changed = changed_buffers(model, before)
    if not changed:
        return
    path = changed[0].rpartition(".")[0]
    module = model.get_submodule(path)
    way_out = "freeze such modules with eval() before preparing the model in training mode"
    if not path:
        way_out = "change it in the loop, once a step, and not in the forward"
    elif "norm" in type(module).__name__.lower():
        way_out += ", or use LayerNorm or GroupNorm instead"
    raise CheckError(
        f"a forward of {type(model).__name__} in training mode changes its buffer {changed[0]} "
        f"({type(module).__name__}), which would differ between ranks and depend on how sequences are packed; {way_out}"
    )
