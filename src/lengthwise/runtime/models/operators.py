"""The two sharded operations of a layer, attention and feed-forward; one implementation per parallel method.

A layer knows norms, residuals and weights; how tokens meet each other, and where the rest of a weight is, is its
operators' business. :class:`Dense` is the operators of one device and the right-hand side of every equality.

t tokens of this rank, D hidden size, E = (N + 2 K) H rows of queries, keys and values, N heads, K key/value heads,
H head size, F feed-forward size; in a bundle of weights, this rank's share of E, N and F.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.activation import silu_mul
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.kept_attention import KeptAttention, kernels_of
from lengthwise.runtime.models.products import WHOLE_BACKWARDS, Products
from lengthwise.runtime.models.rope import split, split_and_rotate
from lengthwise.runtime.models.tiles import ALL_AT_ONCE, Tiles
from lengthwise.runtime.models.varlen_attention import attend

Tables = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of some tokens, each ``[tokens, H / 2]``."""


class LayerWeights:
    """The weights of one operator of a layer."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the operator's weights, by name; absent ones are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(LayerWeights):
    """Weights of one attention, for any whole number of key/value heads with their queries."""

    qkv: Tensor
    """[E, D]: for each key/value head its queries, its key, its value."""
    proj: Tensor
    """[N H, D]: out = heads @ proj."""
    group_size: int
    """Query heads of each key/value head."""
    head_size: int
    qkv_bias: Tensor | None = None
    """[E]"""

    def project(
        self, x_tD: Tensor, tables: Tables | None, products: Products | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (normed) tokens, with weights that are held whole; ``products``: None in compiled
        code, which cannot hold one.
        """
        linear = F.linear if products is None else products.linear
        return self.heads(linear(x_tD, self.qkv, self.qkv_bias), tables)

    def heads(self, qkv_tE: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[t, N, H]``, keys and values ``[t, K, H]`` of a projection; rotated, if there are ``tables``."""
        qkv_tKGH = qkv_tE.unflatten(1, (-1, self.group_size + 2, self.head_size))
        return split(qkv_tKGH) if tables is None else split_and_rotate(qkv_tKGH, *tables)


@dataclass(frozen=True, kw_only=True)
class FfnWeights(LayerWeights):
    """Weights of one feed-forward, for any of its columns: the sum over the rest of F adds up."""

    up: Tensor
    """[F, D]"""
    down: Tensor
    """[F, D]: out = activations @ down."""
    gate: Tensor | None = None
    """[F, D]; None: ``activation(up)`` instead of ``silu(gate) * up``."""
    up_bias: Tensor | None = None
    """[F]"""
    activation: str = "silu"
    """Of a feed-forward without gate: one of ``ACTIVATIONS``."""

    def activate(self, up_tF: Tensor, gate_tF: Tensor | None) -> Tensor:
        """Activation of the feed-forward: the products with ``up`` and ``gate`` to the input of ``down``."""
        if gate_tF is not None:
            return silu_mul(gate_tF, up_tF)
        return ACTIVATIONS[self.activation](up_tF)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
"""GELU by Hendrycks & Gimpel 2016, with the error function (BERT) or its tanh approximation (GPT-2)."""


Ffn = Callable[[Tensor, FfnWeights], Tensor]
TokenwiseHalf = Callable[[Tensor, Ffn], Tensor]
"""Maps tokens [s, D] to [s, D] by a feed-forward, each by itself."""


class Operators(Protocol):
    """The two operations of one layer of one micro-batch."""

    @property
    def kept_attention(self) -> KeptAttention | None:
        """What attention keeps for the second forward of a recomputed layer; None: it runs again."""
        ...

    def attention(self, x_tD: Tensor, weights: AttentionWeights) -> Tensor:
        """Attention of (normed) tokens, projected back to ``[t, D]``; no output bias."""
        ...

    def ffn(self, x_tD: Tensor, weights: FfnWeights) -> Tensor:
        """Feed-forward of (normed) tokens, ``[t, D]``; no output bias."""
        ...

    def tokenwise(self, half: TokenwiseHalf, x_tD: Tensor) -> Tensor:
        """The half of a layer behind attention, ``[t, D]``, with :meth:`ffn`; in tiles, if the plan has them."""
        ...


class Dense:
    """Operators of one device, which holds every token and every weight."""

    has_whole_weights = True

    def __init__(
        self,
        view: AttentionView,
        tables: Tables | None,
        tiles: Tiles = ALL_AT_ONCE,
        products: Products = WHOLE_BACKWARDS,
        kept_attention: KeptAttention | None = None,
        slice_attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """``slice_attention``: in place of that within the view, where the view is of a slice of a pack."""
        self.view, self.tables, self.tiles, self.products = view, tables, tiles, products
        self.kept_attention, self.slice_attention = kept_attention, slice_attention

    def attention(self, x_TD: Tensor, weights: AttentionWeights) -> Tensor:
        """Attention within each sequence of the view."""
        out_TNH = self.attend(*weights.project(x_TD, self.tables, self.products))
        return self.products.matmul(out_TNH.flatten(1), weights.proj)

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Attention of projected queries, keys and values, ``[T, N, H]``."""
        if self.slice_attention is not None:
            return self.slice_attention(q_TNH, k_TKH, v_TKH)
        with kernels_of(self.kept_attention):
            return attend_in(self.view, q_TNH, k_TKH, v_TKH)

    def ffn(self, x_TD: Tensor, weights: FfnWeights) -> Tensor:
        """Feed-forward of all tokens: up, activation, down."""
        return feed_forward(x_TD, weights, self.products)

    def tokenwise(self, half: TokenwiseHalf, x_TD: Tensor) -> Tensor:
        """The half of a layer behind attention, in tiles if the plan has them."""
        sizes = self.tiles.sizes(len(x_TD))
        if len(sizes) == 1:
            return half(x_TD, self.ffn)
        return self.tiles.run(lambda x_sD, number: half(x_sD, self.ffn), x_TD, sizes)


def attend_in(view: AttentionView, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
    """Attention of a whole pack, given and returned in the pack's order; ``[T, N, H]``."""
    if view.order is None:
        return attend(q_TNH, k_TKH, v_TKH, view.cu_seqlens, causal=view.causal)
    order, places = (to_device(index, q_TNH.device) for index in (view.order, view.places))
    q_TNH, k_TKH, v_TKH = (x[order] for x in (q_TNH, k_TKH, v_TKH))
    return attend(q_TNH, k_TKH, v_TKH, view.cu_seqlens, causal=view.causal)[places]


def feed_forward(x_tD: Tensor, weights: FfnWeights, products: Products | None = None) -> Tensor:
    """``activation(x up^T + bias) down``, or SwiGLU (Shazeer 2020): ``(silu(x gate^T) * (x up^T)) down``.

    ``products``: None in compiled code, which cannot hold one.
    """
    linear, matmul = (F.linear, Tensor.matmul) if products is None else (products.linear, products.matmul)
    gate_tF = None if weights.gate is None else linear(x_tD, weights.gate)
    active_tF = weights.activate(linear(x_tD, weights.up, weights.up_bias), gate_tF)
    return matmul(active_tF, weights.down)
