"""Products of tokens with weights whose gradients of weights wait: what is left of a split backward (zero bubble).

Of a product y = x W^T a backward gives the gradient of x and, from x and the gradient of y, that of W. The stage before
waits for the former alone. So a product here keeps x and the gradient of y when its backward runs, and
:meth:`WeightGradients.compute` takes the other product later, layer by layer as backwards came to them. Biases, norms
and embeddings, which cost next to nothing, and layers that are recomputed have theirs at once.

t tokens of this rank, O outputs, I inputs of a product.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


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

    _waiting: deque[_Waiting] = field(default_factory=deque)

    def of_unit(self, unit: int) -> Products:
        """Products with the weights of ``unit`` whose gradients come here."""
        return _SplitBackwards(self, unit)

    def add(self, waiting: _Waiting) -> None:
        """Keep a product for later."""
        self._waiting.append(waiting)

    def compute(self, complete: Callable[[int], None]) -> None:
        """Add all gradients to those of the weights, as a backward does; ``complete`` hears of each unit that has them.

        What a product kept is freed once its gradient is there.
        """
        while self._waiting:
            unit, weight, left_tO, right_tI = self._waiting.popleft()
            torch.autograd.backward(weight, left_tO.T @ right_tI)
            del left_tO, right_tI
            if not self._waiting or self._waiting[0].unit != unit:
                complete(unit)


class _SplitBackwards:
    """The products of one unit; see :class:`Products`."""

    def __init__(self, gradients: WeightGradients, unit: int) -> None:
        self._gradients, self._unit = gradients, unit

    def linear(self, x_tI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        out: Tensor = _Product.apply(x_tI, weight_OI, bias_O, True, self._keep)
        return out

    def matmul(self, x_tI: Tensor, weight_IO: Tensor) -> Tensor:
        """``x @ weight``"""
        out: Tensor = _Product.apply(x_tI, weight_IO, None, False, self._keep)
        return out

    def _keep(self, weight: Tensor, left_tO: Tensor, right_tI: Tensor) -> None:
        self._gradients.add(_Waiting(self._unit, weight, left_tO, right_tI))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tI, weight, bias_O, is_transposed, keep):  # type: ignore[no-untyped-def]
        ctx.is_transposed, ctx.keep, ctx.weight, ctx.has_bias = is_transposed, keep, weight, bias_O is not None
        ctx.save_for_backward(x_tI)
        return F.linear(x_tI, weight, bias_O) if is_transposed else x_tI @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_tO):  # type: ignore[no-untyped-def]
        (x_tI,), weight = ctx.saved_tensors, ctx.weight
        ctx.keep(weight, *((grad_tO, x_tI) if ctx.is_transposed else (x_tI, grad_tO)))
        grad_tI = grad_tO @ (weight if ctx.is_transposed else weight.T)
        return grad_tI, None, grad_tO.sum(0) if ctx.has_bias else None, None, None
