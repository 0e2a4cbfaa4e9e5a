"""Parameters whose values are not on this rank: whoever reads or writes one gets an error, and never a wrong number.

Such a parameter keeps its identity, shape, dtype and device, and is of a subclass of its class whose
``__torch_function__`` refuses whatever needs values, as ``nn.UninitializedParameter`` does; autograd, which torch does
not tell of, would read NaN.
"""

import sys
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError

_names: dict[int, str] = {}
"""The name of each absent parameter, by its identity; not an attribute of it, which copies would have as well."""

FORM_FUNCTIONS: frozenset[Any] = frozenset({
    torch.is_floating_point, torch.is_complex, torch.numel, Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement,
    Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__hash__, Tensor.__len__,
    Tensor.is_contiguous, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_sparse",
        "is_nested", "grad", "grad_fn", "is_meta", "is_quantized", "nbytes", "itemsize", "_backward_hooks",
    )),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
})  # fmt: skip
"""Functions and properties that tell nothing of a parameter's values."""

_READS_GRADIENT = cast(Any, Tensor).grad.__get__
_OF_MEMORY = (Tensor.untyped_storage, Tensor.data_ptr)
"""What tools that count bytes, or look for tied parameters, ask."""


class AbsentParameter(nn.Parameter):
    """A parameter of whose values this rank has a share alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func == _READS_GRADIENT and sys._getframe(1).f_code.co_name != "zero_grad":  # which changes nothing here
            raise InputError(gradient_is_sent(_names.get(id(args[0]), "a parameter"), "weights are gathered by layer"))
        if func in FORM_FUNCTIONS or func in _OF_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        values = pytree.tree_iter((args, kwargs or {}))
        name = next((_names[id(value)] for value in values if id(value) in _names), "a parameter")
        raise InputError(
            f"{name} cannot be read or written here: weights are gathered by layer, so each rank holds a share of "
            "them, and all of a layer's only while it computes. For averages, norms, copies, state_dict() and "
            "evaluation use `with run.plain() as model:` on every rank, between two steps; where a forward or a loss "
            "reads weights of other layers, use weights='whole' in prepare(...)"
        )


def gradient_is_sent(name: str, reason: str, way_out: str = "weights='whole'") -> str:
    """Say why a loop cannot read or clip the gradient of a parameter, and what to do."""
    return (
        f"the gradient of {name} is not here: {reason}, so each goes to its owner within the backward. "
        "step.update() clips by clip_norm= of prepare and returns the norm; leave clip_grad_norm_, scaler.unscale_ "
        f"and optimizers of your own out. To look at gradients of single parameters use {way_out} in prepare(...)"
    )


def make_absent(parameter: nn.Parameter, name: str, *, dtype: torch.dtype, device: torch.device, shape: Any) -> None:
    """Take a parameter's values away and leave its form."""
    make_present(parameter)
    parameter.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    if (absent := _absent_class(type(parameter))) is not None:
        _names[id(parameter)] = name
        parameter.__class__ = absent


def make_present(parameter: nn.Parameter) -> nn.Parameter:
    """Let a parameter be of its own class again, as its values come, and return it."""
    if isinstance(parameter, AbsentParameter):
        _names.pop(id(parameter), None)
        parameter.__class__ = type(parameter).__bases__[-1]
    return parameter


@cache
def _absent_class(kind: type[nn.Parameter]) -> type[AbsentParameter] | None:
    """The class of absent parameters of a class; None: it has a dispatch of its own, such as a tensor of shards."""
    if kind is nn.Parameter:
        return AbsentParameter
    if kind.__torch_dispatch__ is not nn.Parameter.__torch_dispatch__:
        return None
    return type(f"Absent{kind.__name__}", (AbsentParameter, kind), {})
