"""A Transformer layer as two token-wise halves around attention.

t tokens of this rank, D hidden size.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from lengthwise.runtime.models.operators import AttentionWeights, Ffn, FfnWeights, Operators


class TransformerLayer(nn.Module, ABC):
    """Attention and feed-forward with their norms and residuals, which families place differently."""

    @property
    @abstractmethod
    def attention_weights(self) -> AttentionWeights:
        """The weights that the layer's operators need."""

    @property
    @abstractmethod
    def ffn_weights(self) -> FfnWeights:
        """The weights that the layer's operators need."""

    @abstractmethod
    def pre_attention(self, x_tD: Tensor) -> Tensor:
        """Input of attention ``[t, D]``, made from the layer's input."""

    @abstractmethod
    def add_attention(self, x_tD: Tensor, attended_tD: Tensor) -> Tensor:
        """Sum ``[t, D]`` of the layer's input and the projected output of attention, which has no bias yet."""

    @abstractmethod
    def tokenwise_half(self, x_tD: Tensor, ffn: Ffn) -> Tensor:
        """The layer's output ``[t, D]``, from what :meth:`add_attention` gives; each token by itself."""

    def post_attention(self, x_tD: Tensor, attended_tD: Tensor, ffn: Ffn) -> Tensor:
        """The layer's output ``[t, D]``, from its input and the projected output of attention, without bias."""
        return self.tokenwise_half(self.add_attention(x_tD, attended_tD), ffn)

    def forward(self, x_tD: Tensor, operators: Operators) -> Tensor:
        """Run the layer; returns ``[t, D]``."""
        attended_tD = operators.attention(self.pre_attention(x_tD), self.attention_weights)
        x_tD = self.add_attention(x_tD, attended_tD)
        del attended_tD
        return operators.tokenwise(self.tokenwise_half, x_tD)
