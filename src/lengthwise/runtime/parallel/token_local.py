"""Operators of sequence-parallel methods: ranks multiply their own tokens by whole weights, and only attention
communicates.

t tokens of this rank, D hidden size, N heads, K key/value heads, H head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Tables, TokenwiseHalf
from lengthwise.runtime.models.tiles import ALL_AT_ONCE, Tiles
from lengthwise.runtime.parallel.head_groups import GroupedAttention
from lengthwise.runtime.parallel.weights import OperatorWeights, WholeWeights

CrossTokenAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention across ranks: this rank's queries [t, N, H], keys and values [t, K, H] to its outputs [t, N, H]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLocal:
    """Operators of one sequence-parallel layer; they multiply by ``whole_attention`` and ``whole_ffn``."""

    whole_attention: OperatorWeights
    whole_ffn: OperatorWeights
    tables: Tables | None
    attend: CrossTokenAttention
    tiles: Tiles = ALL_AT_ONCE
    kept_attention: KeptAttention | None = None
    grouped: GroupedAttention | None = None
    """Attends with some of the heads at a time; None: with all at once, by ``attend``."""

    @property
    def has_whole_weights(self) -> bool:
        """Whether this rank holds all the weights that it multiplies with, rather than gathers them."""
        return isinstance(self.whole_attention, WholeWeights)

    def attention(self, x_tD: Tensor, weights: AttentionWeights) -> Tensor:
        """Project, rotate, attend, project back: ``[t, D]``."""
        layer_weights = self.whole_attention
        if self.grouped is not None:
            return layer_weights.leave(
                self.grouped(layer_weights.enter(x_tD), layer_weights, weights, self.kept_attention)
            )
        out_tNH = self.attend(*self._heads(x_tD, weights))
        return layer_weights.leave(layer_weights.matmul(out_tNH.flatten(1), "proj"))

    def _heads(self, x_tD: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; the projection that they are split from is freed."""
        layer_weights, bias = self.whole_attention, None if weights.qkv_bias is None else "qkv_bias"
        return weights.heads(layer_weights.linear(layer_weights.enter(x_tD), "qkv", bias), self.tables)

    def ffn(self, x_tD: Tensor, weights: FfnWeights) -> Tensor:
        """Up, activation, down: ``[t, D]``."""
        return self.whole_ffn.leave(self._products(self.whole_ffn.enter(x_tD), weights))

    def tokenwise(self, half: TokenwiseHalf, x_tD: Tensor) -> Tensor:
        """The half of a layer behind attention, in tiles if the plan has them; weights are gathered once for all."""
        sizes = self.tiles.sizes(len(x_tD))
        if len(sizes) == 1:
            return half(x_tD, self.ffn)
        x_tD = self.whole_ffn.enter(x_tD)
        return self.whole_ffn.leave(self.tiles.run(lambda x_sD, number: half(x_sD, self._products), x_tD, sizes))

    def _products(self, x_tD: Tensor, weights: FfnWeights) -> Tensor:
        layer_weights = self.whole_ffn
        gate_tF = None if weights.gate is None else layer_weights.linear(x_tD, "gate")
        up_tF = layer_weights.linear(x_tD, "up", None if weights.up_bias is None else "up_bias")
        return layer_weights.matmul(weights.activate(up_tF, gate_tF), "down")
