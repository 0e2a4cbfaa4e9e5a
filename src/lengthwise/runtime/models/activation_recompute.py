"""Activation recompute (Chen et al. 2016): keep a layer's input alone, and compute the layer again in the backward.

Not ``torch.utils.checkpoint``: a layer may hold collectives, which every rank must issue in the same order. Here the
second forward runs whole, at one place: first thing in the layer's backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``layer(x)``; gradients reach the weights that ``layer`` uses as they would without."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return layer(x)
    out: Tensor = _Recomputed.apply(layer, x)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)  # gradients are off inside

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, grad)
        return None, x.grad
