"""The token-wise half of a layer, computed over some tokens at a time: what it has inside is never there for all.

A feed-forward widens each token several times, which in a long sequence is most of what a layer has at once (tiled
computation: Arctic Long Sequence Training, Bekman et al. 2025, section 3.1). In tiles norm, feed-forward and residual
keep their input alone; the backward computes each tile again and adds what it gives to the gradients of the weights.
The second forward of a recomputed layer leaves the half out, as nothing but its input is needed.

Bytes on the device for a token between forward and backward, of width w: D w of the half's input, in place of
(2 D + 3 F) w (gated; 2 F else; post-norm a D more) and the norm's numbers. While the backward has a tile of s tokens:
what the half keeps of s tokens and its gradients, 2 D w for all tokens (of output and input), and the gradient of one
weight.

t tokens of this rank, D hidden size, F feed-forward size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import first_derivative_only

Half = Callable[[Tensor, int], Tensor]
"""Maps a tile of some tokens [s, D], and its number, to [s, D], each token by itself."""


@dataclass(frozen=True)
class Tiles:
    """In tiles of how many tokens the halves of one layer are computed."""

    tokens: int = 0
    """Of a tile; 0: all at once."""
    is_recomputed: bool = False
    """Whether the layer runs forward twice, the second time with gradients."""

    def sizes(self, num_tokens: int) -> list[int]:
        """Tokens of each tile; one tile if they are not cut."""
        if not self.tokens or num_tokens <= self.tokens:
            return [num_tokens]
        return split_evenly(num_tokens, -(-num_tokens // self.tokens))

    def run(self, half: Half, x_tD: Tensor, sizes: Sequence[int]) -> Tensor:
        """``half`` of tiles of ``sizes``, ``[t, D]``."""
        if not torch.is_grad_enabled() or not x_tD.requires_grad:
            return _forward(half, x_tD, sizes)
        out_tD: Tensor = _InTiles.apply(half, x_tD, sizes, self.is_recomputed)
        return out_tD


ALL_AT_ONCE = Tiles()


def split_evenly(num_tokens: int, count: int) -> list[int]:
    """Tokens of ``count`` tiles, which differ by one at most."""
    return [num_tokens // count + (number < num_tokens % count) for number in range(count)]


def _forward(half: Half, x_tD: Tensor, sizes: Sequence[int]) -> Tensor:
    out_tD = torch.empty_like(x_tD)
    for number, (x_sD, out_sD) in enumerate(zip(x_tD.split(list(sizes)), out_tD.split(list(sizes)))):
        out_sD.copy_(half(x_sD, number))
    return out_tD


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, half, x_tD, sizes, is_second):  # type: ignore[no-untyped-def]
        ctx.half, ctx.sizes = half, list(sizes)
        ctx.save_for_backward(x_tD)
        return x_tD.new_empty(1).expand_as(x_tD) if is_second else _forward(half, x_tD, sizes)  # nobody reads it

    @staticmethod
    @first_derivative_only("a feed-forward in tiles")
    def backward(ctx, grad_tD):  # type: ignore[no-untyped-def]
        (x_tD,) = ctx.saved_tensors
        dx_tD = torch.empty_like(x_tD)
        tiles = zip(x_tD.split(ctx.sizes), grad_tD.split(ctx.sizes), dx_tD.split(ctx.sizes))
        for number, (x_sD, grad_sD, dx_sD) in enumerate(tiles):
            x_sD = x_sD.detach().requires_grad_()
            with torch.enable_grad():
                out_sD = ctx.half(x_sD, number)
            torch.autograd.backward(out_sD, grad_sD)
            dx_sD.copy_(x_sD.grad)
            del out_sD, x_sD
        return None, dx_tD, None, None
