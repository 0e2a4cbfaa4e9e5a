"""What a stage received as its input: the tensor leaves it for the layers, and its gradient comes back.

The tensor is not kept here, so that it is on the device between forward and backward only if the stage's first layer
saves it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import first_derivative_only


@dataclass(eq=False)
class StageInput:
    """The input of a stage on this rank, ``[t, D]``, on its way to the layers, and its gradient once that is there."""

    shape: torch.Size
    dtype: torch.dtype
    gradient_tD: Tensor | None = None

    def enter(self, x_tD: Tensor) -> Tensor:
        """Return ``x_tD`` such that its gradient comes here."""
        out: Tensor = _Enter.apply(torch.empty(0, requires_grad=True), x_tD, self)
        return out

    def gradient_of(self, output: Tensor) -> Tensor:
        """The gradient, on the device of the stage's ``output``; zeros if nothing depended on it."""
        return output.new_zeros(self.shape, dtype=self.dtype) if self.gradient_tD is None else self.gradient_tD


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, x_tD, received):  # type: ignore[no-untyped-def]
        ctx.received = received
        return x_tD.view_as(x_tD)

    @staticmethod
    @first_derivative_only("a stage of a pipeline")
    def backward(ctx, grad_tD):  # type: ignore[no-untyped-def]
        ctx.received.gradient_tD = grad_tD
        return None, None, None
