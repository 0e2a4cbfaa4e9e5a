"""The gated activation of SwiGLU (Shazeer 2020), keeping two matrices for the backward instead of three."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.first_derivative import first_derivative_only


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise. Keeps its two inputs; ``silu(gate)`` is computed again in the backward."""
    if torch.compiler.is_compiling():  # which chooses what to keep by itself
        return F.silu(gate_TF) * up_TF
    out: Tensor = _SiluMul.apply(gate_TF, up_TF)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TF: Tensor, up_TF: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_TF, up_TF)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    @first_derivative_only("the activation of a model of this library")
    def backward(ctx, grad_TF: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        gate_TF, up_TF = ctx.saved_tensors
        dgate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
        return dgate_TF, F.silu(gate_TF).mul_(grad_TF)
