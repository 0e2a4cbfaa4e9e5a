"""A cross-entropy of deferred logits that is computed when it is asked for.

A model of transformers makes the loss of its labels in every forward, also where the loop makes another of its logits:
GRPO, DPO, distillation. As gradients are made with the loss, the unwanted one would cost a forward and a backward of
the head. So the model returns a :class:`DeferredLoss`, which costs nothing until something is done with it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError

METADATA = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta"}
"""Attributes that are known of a tensor that is not computed."""
QUERIES = {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}
"""Methods that are answered without computing it."""


class DeferredLoss(Tensor):
    """A number that is computed, with its gradients, at the first operation on it."""

    _compute: Callable[[], Any] | None
    _whole: Any
    _is_differentiable: bool

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor], *, inputs: Sequence[Tensor], dtype: torch.dtype) -> "DeferredLoss":
        """``compute``: makes the number from ``inputs``, in the gradient mode that is on now."""
        loss: DeferredLoss = Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=inputs[0].device)
        has_graph = torch.is_grad_enabled()
        loss._is_differentiable = has_graph and any(x.requires_grad for x in inputs)
        loss._whole, loss._compute = None, partial(_compute, compute, has_graph)
        return loss

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Answer what is known of the number; compute it for anything else."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name == "__get__" else ""
        if attribute == "requires_grad":
            return args[0]._is_differentiable
        if attribute in METADATA or func in QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        """Refuse operations below autograd, whose gradients would not reach the model."""
        raise InputError(f"{func} got a loss that is not computed yet; give it loss.whole()")

    def whole(self) -> Any:
        """The loss as a tensor, computed once; a placeholder where memory was not enough."""
        if self._compute is not None:
            self._whole = self._compute()
            self._compute = None  # and what it is made of is let go
        return self._whole

    @property
    def is_computed(self) -> bool:
        """Whether it was computed."""
        return self._compute is None

    def is_made_of(self, loss: Any) -> bool:
        """Whether ``loss`` is this number, computed."""
        return self._whole is not None and self._whole is loss

    def guard(self, within: Callable[[Callable[[], Any]], Any]) -> None:
        """Compute the number by ``within``, which is given what makes it."""
        if self._compute is not None:
            self._compute = partial(within, self._compute)


def computed(value: Any) -> Any:
    """``value``; of a :class:`DeferredLoss` the number, computed now."""
    return value.whole() if isinstance(value, DeferredLoss) else value


def _compute(compute: Callable[[], Tensor], has_graph: bool) -> Tensor:
    with torch.set_grad_enabled(has_graph):
        return compute()
