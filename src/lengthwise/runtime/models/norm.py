"""Root-mean-square norm (Zhang & Sennrich 2019), keeping its input and one number per token for the backward; and
layer norm (Ba et al. 2016), of which PyTorch keeps the input and two.

T tokens, D hidden size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.first_derivative import first_derivative_only


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over D, statistics in float32 at least; returns ``[T, D]``.

    PyTorch fuses it on CUDA, and a compiler anywhere. On CPU its composite keeps a third [T, D] matrix; ours computes
    that one again.
    """
    if x_TD.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    out: Tensor = _RmsNorm.apply(x_TD, weight_D, eps)
    return out


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over D; returns ``[T, D]``."""
    return F.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        x = x_TD.to(wide)
        inverse_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, inverse_T1)
        return (x * inverse_T1).mul_(weight_D).to(x_TD.dtype)

    @staticmethod
    @first_derivative_only("the norm of a model of this library")
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x_TD, weight_D, inverse_T1 = ctx.saved_tensors
        normed_TD = x_TD.to(inverse_T1.dtype) * inverse_T1
        product_TD = grad_TD * normed_TD
        dweight_D = product_TD.sum(0)
        # d/dx: inverse * (g w - normed * mean(g w normed)); the mean is a product with the weights.
        mean_T1 = (product_TD @ weight_D.to(product_TD.dtype)).div_(x_TD.shape[-1]).unsqueeze(1)
        dx_TD = (grad_TD * weight_D).to(normed_TD.dtype).addcmul_(normed_TD, mean_T1, value=-1).mul_(inverse_T1)
        return dx_TD.to(x_TD.dtype), dweight_D.to(weight_D.dtype), None
