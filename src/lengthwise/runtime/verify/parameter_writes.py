"""Refuse models whose forward changes their parameters: ranks and packs would change them differently.

A forward that clamps a whole parameter to numbers may: every forward of a step does the same to it. Where that changes
values, ranks that did not compute it are noticed by their fingerprints between steps, and so are other changes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.core.errors import InputError


class RefuseParameterWrites(TorchDispatchMode):
    """While it is entered, an operation that would write to a parameter of a model raises ``InputError`` instead."""

    def __init__(self, model: nn.Module, *, may_clamp: bool = False) -> None:
        """``may_clamp``: whether clamping that changes no value is let through."""
        super().__init__()
        self._model, self._may_clamp = model, may_clamp

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_checked = func._schema.is_mutable and func.namespace == "aten"  # collectives bring parameters their values
        if is_checked and not (self._may_clamp and _clamps_nothing(func, args, kwargs or {})):
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(func, value)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else (written,):
            name = self._parameter_with(tensor) if isinstance(tensor, Tensor) and tensor.numel() else None
            if name is not None:
                owner = type(self._model.get_submodule(name.rpartition(".")[0])).__name__
                raise InputError(
                    f"a forward of {type(self._model).__name__} changes its parameter {name} ({owner}, by "
                    f"{func._schema.name.removeprefix('aten::')}), which would differ between ranks and depend on how "
                    "sequences are packed; leave that out (of nn.Embedding: max_norm), or change weights after "
                    "step.update(), in `with run.plain():`"
                )

    def _parameter_with(self, tensor: Tensor) -> str | None:
        """The name of the first parameter that has memory of a tensor's; parameters may lie end to end in a buffer."""
        storage, (first, last) = tensor.untyped_storage()._cdata, _bytes_of(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            for name, value in self._model.named_parameters():
                start, end = _bytes_of(value)
                if value.untyped_storage()._cdata == storage and first < end and start < last:
                    return name
        return None


_CLAMPS = ("aten::clamp_", "aten::clamp_min_", "aten::clamp_max_")


def _clamps_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation clamps a tensor to numbers that all of its values are within."""
    if func._schema.name not in _CLAMPS or any(isinstance(limit, Tensor) for limit in (*args[1:], *kwargs.values())):
        return False
    return torch.equal(func(args[0].detach().clone(), *args[1:], **kwargs), args[0])


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins and ends."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (span * tensor.element_size() if tensor.numel() else 0)
