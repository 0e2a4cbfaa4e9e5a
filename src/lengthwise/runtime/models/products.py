"""Products of tokens with weights whose gradients of weights wait: what is left of a split backward (zero bubble).

Of a product y = x W^T a backward gives the gradient of x and, from x and the gradient of y, that of W. The stage before
waits for the former alone. So a product here keeps x and the gradient of y when its backward runs, and
:meth:`WeightGradients.compute` takes the other product later, layer by layer as backwards came to them. Biases, norms
and embeddings, which cost next to nothing, and layers that are recomputed have theirs at once.

Of a model that is not ours the products are met where torch lets calls be overridden, with any axes before the inputs.

t tokens of this rank, O outputs, I inputs of a product.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.errors import Setting
from lengthwise.runtime.models.first_derivative import first_derivative_only


class Products(Protocol):
    """How one layer multiplies tokens by weights that the rank has whole."""

    def linear(self, x_tI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        ...

    def matmul(self, x_tI: Tensor, weight_IO: Tensor) -> Tensor:
        """``x @ weight``"""
        ...


class WholeBackwards:
    """Backwards give the gradients of weights with those of tokens."""

    def linear(self, x_tI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        return F.linear(x_tI, weight_OI, bias_O)

    def matmul(self, x_tI: Tensor, weight_IO: Tensor) -> Tensor:
        """``x @ weight``"""
        return x_tI @ weight_IO


WHOLE_BACKWARDS = WholeBackwards()


class _Waiting(NamedTuple):
    """A product whose gradient of the weight is yet to be computed."""

    unit: int
    weight: Tensor
    left_tO: Tensor
    right_tI: Tensor
    """The gradient of the weight is ``left^T @ right``."""


@dataclass(eq=False)
class WeightGradients:
    """The gradients of weights that the backward of one micro-batch left for later."""

    is_open: bool = True
    """Whether backwards leave any now; those of others' derivatives are whole."""
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def of_unit(self, unit: int) -> "SplitProducts":
        """Products with the weights of ``unit`` whose gradients come here."""
        return SplitProducts(self, unit)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within, the backward runs that is to leave them for later."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def add(self, waiting: _Waiting) -> None:
        """Keep a product for later."""
        self._waiting.append(waiting)

    def compute(self, complete: Callable[[int], None]) -> None:
        """Add all gradients to those of the weights, as a backward does; ``complete`` hears of each unit that has them.

        What a product kept is freed once its gradient is there.
        """
        for unit, weight, gradient in self.taken():
            torch.autograd.backward(weight, gradient)
            if not self._waiting or self._waiting[0].unit != unit:
                complete(unit)

    def taken(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Take the products, one after the other: unit, weight, and what they add to its gradient."""
        while self._waiting:
            unit, weight, left_tO, right_tI = self._waiting.popleft()
            gradient = (left_tO.T @ right_tI).to(weight.dtype)
            del left_tO, right_tI
            yield unit, weight, gradient

    def kept(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """What waits: unit, and both factors of each product."""
        for unit, _, left_tO, right_tI in self._waiting:
            yield unit, left_tO, right_tI


class SplitProducts:
    """The products of one unit; see :class:`Products`."""

    def __init__(self, gradients: WeightGradients, unit: int) -> None:
        self._gradients, self._unit = gradients, unit

    def linear(self, x_tI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        return _product(x_tI, weight_OI, bias_O, _Kept(self._gradients, self._unit, is_transposed=True))

    def matmul(self, x_tI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight + bias``"""
        return _product(x_tI, weight_IO, bias_O, _Kept(self._gradients, self._unit, is_transposed=False))


class _Kept(NamedTuple):
    """Where a product is kept for later, and how it takes its weight."""

    gradients: WeightGradients
    unit: int
    is_transposed: bool
    """Whether the weight is [O, I]."""


def _product(x_tI: Tensor, weight: Tensor, bias_O: Tensor | None, kept: _Kept) -> Tensor:
    """The product in the dtype of autocast if that is on, as torch would take it."""
    cast = None
    if torch.is_autocast_enabled(x_tI.device.type) and x_tI.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x_tI.device.type)
        x_tI, bias_O = x_tI.to(dtype), None if bias_O is None else bias_O.to(dtype)
        cast = weight.detach().to(dtype)  # and not by autocast, whose casts without a gradient others would be given
    with torch.autocast(x_tI.device.type, enabled=False):
        out: Tensor = _Product.apply(x_tI, weight, bias_O, cast, kept)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tI, weight, bias_O, cast, kept):  # type: ignore[no-untyped-def]
        ctx.kept, ctx.weight, ctx.has_bias = kept, weight, bias_O is not None
        ctx.save_for_backward(x_tI, cast)
        factor = weight if cast is None else cast
        if kept.is_transposed:
            return F.linear(x_tI, factor, bias_O)
        return x_tI @ factor if bias_O is None else x_tI @ factor + bias_O

    @staticmethod
    @first_derivative_only(
        "products whose weight gradients are left for later", f"plan without stages: {Setting.MAX_STAGES}=1"
    )
    def backward(ctx, grad_tO):  # type: ignore[no-untyped-def]
        (x_tI, cast), weight, (gradients, unit, is_transposed) = ctx.saved_tensors, ctx.weight, ctx.kept
        factor = weight if cast is None else cast
        grad_tI = grad_tO @ (factor if is_transposed else factor.T) if ctx.needs_input_grad[0] else None
        rows_tO, rows_tI = grad_tO.flatten(0, -2), x_tI.detach().flatten(0, -2)  # without the graph that made it
        left, right = (rows_tO, rows_tI) if is_transposed else (rows_tI, rows_tO)
        grad_weight = None
        if gradients.is_open:
            gradients.add(_Waiting(unit, weight, left, right))
        else:
            grad_weight = (left.T @ right).to(weight.dtype)
        return grad_tI, grad_weight, rows_tO.sum(0) if ctx.has_bias else None, None, None
