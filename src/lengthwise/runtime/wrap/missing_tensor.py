"""Tensors without numbers: what a model's forward gives where a later stage, or a later attempt, computes it.

On the stages of a pipeline before the last, and where memory was not enough, a user's loop gets a
:class:`MissingTensor` in place of the loss and of every other output. It has the shape, dtype and device of what it
stands for, and so have results of torch functions, which are computed on the meta device; so the loop goes on unharmed.
"""

from collections.abc import Callable, Iterator
from math import nan
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MOST_COUNTED = 1 << 24
"""Elements of a mask up to which it is counted."""
TRUE = frozenset({"isfinite", "isreal"})
"""Functions whose results are true, so that checks of a loop pass; others are false, as all comparisons are."""
NEGATIONS = frozenset({"logical_not", "bitwise_not", "__invert__", "logical_not_", "bitwise_not_"})
CONJUNCTIONS = frozenset({"logical_and", "bitwise_and", "__and__", "__rand__"})
DISJUNCTIONS = frozenset({"logical_or", "bitwise_or", "__or__", "__ror__"})
ANSWERED_FALSE = frozenset({"equal", "allclose", "is_nonzero"})
MOVES = frozenset({"to", "cpu", "cuda"})
UNMOVED = frozenset(
    {"backward", "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook"}
)
"""Of autograd: they return the tensor as it is."""


class MissingTensor(Tensor):
    """A tensor whose numbers were not computed on this rank; results of torch functions are such tensors, too.

    Read one by one, real numbers are NaN, integers 0, and truth values false but of what asks if numbers are finite.
    """

    _where: torch.device
    _truth: bool

    def __new__(
        cls, *shape: int, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", truth: bool = False
    ) -> Self:
        """``truth``: the value of every element, of a tensor of truth values."""
        return cls._of(torch.empty(shape, dtype=dtype, device="meta"), torch.device(device), truth)

    @classmethod
    def _of(cls, meta: Tensor, where: torch.device, truth: bool = False) -> Self:
        missing = Tensor._make_subclass(cls, meta)
        missing._where, missing._truth = where, truth
        return missing

    @property
    def _number(self) -> Any:
        """What every element reads as."""
        if self.dtype == torch.bool:
            return self._truth
        return nan if self.is_floating_point() or self.is_complex() else 0

    def item(self) -> Any:
        """NaN, 0 or a truth value."""
        return self._number

    def tolist(self) -> Any:
        """Nested lists of NaN, 0 or a truth value."""
        return np.full(tuple(self.shape), self._number).tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """An array of NaN, 0 or a truth value."""
        return np.full(tuple(self.shape), self._number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.full(tuple(self.shape), self._number, dtype=dtype)

    def __float__(self) -> float:
        return float(self._number)

    def __int__(self) -> int:
        return int(self._truth)

    __index__ = __int__

    def __bool__(self) -> bool:
        return self._truth if self.dtype == torch.bool else True

    def __round__(self, digits: int | None = None) -> float:
        return float(self._number)

    def __iter__(self) -> Iterator[Any]:
        if not self.dim():
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __format__(self, spec: str) -> str:
        return format(self._number, spec) if spec else str(self._number)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MissingTensor(not computed on this rank, size={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Return what a function gives, without numbers; fill with NaN what it writes to."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__" and isinstance(first, cls):
            return _attribute(first, func)
        if isinstance(first, cls) and name in cls.__dict__ and name != "__torch_function__":
            return cls.__dict__[name](*args, **kwargs)
        if name in ANSWERED_FALSE:
            return False
        if isinstance(first, Tensor) and not isinstance(first, cls) and _is_written(name):
            return _fill(first, name, args)
        if isinstance(first, cls) and (name in UNMOVED or name == "__setitem__"):
            return first
        if func is torch.autograd.grad:
            inputs = pytree.tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"])
            return tuple([cls(*value.shape, dtype=value.dtype, device=value.device) for value in inputs])
        missing = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        where = _moved_to(name, args, kwargs) or missing[0]._where
        if name in MOVES:
            func, args, kwargs = Tensor.to, *_without_devices(args, kwargs)
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                result = _computed(func, name, *pytree.tree_map(_on_meta, (args, kwargs)))
        except Exception:
            return missing[0]  # its shape depends on numbers, or the last stage says what is wrong
        truth = _truth_of(name, missing)
        return pytree.tree_map_only(Tensor, lambda meta: cls._of(meta, where, truth), result)


def _attribute(missing: MissingTensor, getter: Callable[..., Any]) -> Any:
    name, where = getter.__self__.__name__, missing._where  # type: ignore[attr-defined]
    if name == "device":
        return where
    if name in ("is_cuda", "is_cpu", "is_meta"):
        return where.type == name.removeprefix("is_")
    if name in ("grad", "grad_fn"):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if name == "requires_grad":
            return missing.is_floating_point()
        value = getter(missing)
        return MissingTensor._of(value, where, missing._truth) if isinstance(value, Tensor) else value


def _is_written(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    is_assigned = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or is_assigned or (name.endswith("_") and not name.endswith("__"))


def _fill(written: Tensor, name: str, args: Any) -> Any:
    """A tensor with NaN where a function would have written numbers; integers stay as they are."""
    if written.is_floating_point():
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if name != "__setitem__":
                written.fill_(nan)
            elif not any(isinstance(leaf, MissingTensor) for leaf in pytree.tree_leaves(args[1])):
                written[args[1]] = nan
    return None if name == "__setitem__" else written


def _moved_to(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a function is asked to give its result on."""
    if name in ("cpu", "cuda"):
        return torch.device(name)
    for value in (kwargs.get("device"), *(args[1:2] if name == "to" else ())):
        if isinstance(value, str | torch.device):
            return torch.device(value)
        if isinstance(value, Tensor):
            return value.device
    return None


def _without_devices(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of ``to``, ``cpu`` and ``cuda`` that change the dtype alone."""
    dtypes = [value.dtype if isinstance(value, Tensor) else value for value in (*args[1:], *kwargs.values())]
    dtype = next((value for value in dtypes if isinstance(value, torch.dtype)), args[0].dtype)
    return (args[0],), {"dtype": dtype}


def _on_meta(value: Any) -> Any:
    if isinstance(value, MissingTensor):
        return value.as_subclass(Tensor) if value.dtype != torch.bool else _Mask.of(value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return _Mask(value.detach(), value.detach().to("meta"))
    return value.detach().to("meta") if isinstance(value, Tensor) else value


class _Mask:
    """Truth values, of which a function may need their number."""

    def __init__(self, values: Tensor, meta: Tensor) -> None:
        self.values, self.meta = values, meta

    @classmethod
    def of(cls, missing: MissingTensor) -> "_Mask":
        """A mask of equal truth values."""
        values = torch.full((), missing._truth).expand(missing.shape)
        return cls(values, missing.as_subclass(Tensor))

    def indices(self) -> tuple[Tensor, ...]:
        """Where it is true, on the meta device."""
        if self.values.numel() > MOST_COUNTED:
            raise NotImplementedError
        return tuple(index.to("meta") for index in self.values.nonzero(as_tuple=True))


def _computed(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """The result of a function on the meta device, where masks that select are counted."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        parts = [part.indices() if isinstance(part, _Mask) else (part,) for part in index]
        args = (args[0], tuple([part for split in parts for part in split]))
    elif name == "masked_select":
        values, mask = (arg.meta if isinstance(arg, _Mask) else arg for arg in args)
        shape = torch.broadcast_shapes(values.shape, mask.shape)
        counted = cast(_Mask, args[1]).values.expand(shape)
        return values.new_empty(len(_Mask(counted, mask).indices()[0]))
    return func(*pytree.tree_map_only(_Mask, _meta_of, args), **pytree.tree_map_only(_Mask, _meta_of, kwargs))


def _meta_of(mask: _Mask) -> Tensor:
    return mask.meta


def _truth_of(name: str, missing: list[MissingTensor]) -> bool:
    """The truth value of all elements of a function's result."""
    truths = [tensor._truth for tensor in missing if tensor.dtype == torch.bool]
    if name in TRUE or not truths:
        return name in TRUE
    if name in NEGATIONS:
        return not truths[0]
    if name in CONJUNCTIONS:
        return all(truths)
    return any(truths) if name in DISJUNCTIONS else truths[0] and len(truths) == 1
