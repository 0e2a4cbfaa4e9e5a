"""Activation recompute (Chen et al. 2016): keep a layer's input alone, and compute the layer again in the backward.

Not ``torch.utils.checkpoint``: a layer may hold collectives, which every rank must issue in the same order. Here the
second forward runs whole, at one place: first thing in the layer's backward.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.kept_attention import KeptAttention


def recomputed(layer: Callable[[Tensor], Tensor], x: Tensor, kept_attention: KeptAttention | None = None) -> Tensor:
    """``layer(x)``; gradients reach the weights that ``layer`` uses as they would without.

    ``kept_attention``: what the attention of ``layer`` keeps for the second forward; None: nothing.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:
        return layer(x)
    out: Tensor = _Recomputed.apply(layer, x, kept_attention)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, kept_attention):  # type: ignore[no-untyped-def]
        ctx.layer, ctx.kept_attention = layer, kept_attention
        out = layer(x)  # gradients are off inside
        ctx.save_for_backward(x, *(() if kept_attention is None else kept_attention.take()))
        return out

    @staticmethod
    @first_derivative_only("a layer that is recomputed")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, *results = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), nullcontext() if ctx.kept_attention is None else ctx.kept_attention.given(results):
            out = ctx.layer(x)
        del results
        torch.autograd.backward(out, grad)
        return None, x.grad, None
