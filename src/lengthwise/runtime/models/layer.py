"""A layer as two halves around attention: what depends on a token alone comes before it and after it.

t tokens of this rank, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from lengthwise.runtime.models.operators import AttentionWeights, FfnWeights, Operators

Ffn = Callable[[Tensor, FfnWeights], Tensor]


class TransformerLayer(nn.Module, ABC):
    """Attention and feed-forward with their norms and residuals, which families place differently."""

    @property
    @abstractmethod
    def attention_weights(self) -> AttentionWeights:
        """For the layer's operators."""

    @property
    @abstractmethod
    def ffn_weights(self) -> FfnWeights:
        """For the layer's operators."""

    @abstractmethod
    def pre_attention(self, x_tD: Tensor) -> Tensor:
        """What attention is given of the layer's input, ``[t, D]``."""

    @abstractmethod
    def post_attention(self, x_tD: Tensor, attended_tD: Tensor, ffn: Ffn) -> Tensor:
        """The layer's output ``[t, D]`` from its input and what attention gave, projected back, without bias."""

    def forward(self, x_tD: Tensor, operators: Operators) -> Tensor:
        """One layer; returns ``[t, D]``."""
        return self.post_attention(
            x_tD, operators.attention(self.pre_attention(x_tD), self.attention_weights), operators.ffn
        )
