"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases everywhere, GELU by its tanh approximation.

T tokens of the pack, t of them on this rank, D hidden size, N heads, K key/value heads, H head size, E = (N + 2 K) H,
F feed-forward size, V vocabulary, P positions. Every weight that a parallel method shards is stored with the sharded
dimension first; the biases of outputs are added here, once, not by the operators.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.attention_view import AttentionView, check_positions, in_order
from lengthwise.runtime.models.base import Transformer, parameter
from lengthwise.runtime.models.execution import Execution
from lengthwise.runtime.models.layer import TransformerLayer
from lengthwise.runtime.models.norm import layer_norm
from lengthwise.runtime.models.operators import AttentionWeights, Ffn, FfnWeights


class BiasedLayer(TransformerLayer):
    """Weights of attention and feed-forward with a bias on every projection and norm: GPT's layer and BERT's."""

    activation: str
    """One of ``operators.ACTIVATIONS``."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.head_size, self.norm_eps = spec.head_size, spec.norm_eps
        self.group_size = spec.num_heads // spec.num_kv_heads
        new = partial(parameter, dtype=dtype, device=device)
        self.attention_norm = new(spec.hidden_size)
        self.attention_norm_bias = new(spec.hidden_size)
        self.qkv = new(spec.qkv_size, spec.hidden_size)
        self.qkv_bias = new(spec.qkv_size)
        self.proj = new(spec.num_heads * spec.head_size, spec.hidden_size)
        self.proj_bias = new(spec.hidden_size)
        self.ffn_norm = new(spec.hidden_size)
        self.ffn_norm_bias = new(spec.hidden_size)
        self.up = new(spec.ffn_size, spec.hidden_size)
        self.up_bias = new(spec.ffn_size)
        self.down = new(spec.ffn_size, spec.hidden_size)
        self.down_bias = new(spec.hidden_size)

    @property
    def attention_weights(self) -> AttentionWeights:
        """The weights that the layer's operators need."""
        return AttentionWeights(
            qkv=self.qkv, qkv_bias=self.qkv_bias, proj=self.proj, group_size=self.group_size, head_size=self.head_size
        )

    @property
    def ffn_weights(self) -> FfnWeights:
        """The weights that the layer's operators need."""
        return FfnWeights(up=self.up, up_bias=self.up_bias, down=self.down, activation=self.activation)

    def add_attention(self, x_tD: Tensor, attended_tD: Tensor) -> Tensor:
        """Add bias and residual."""
        return x_tD + (attended_tD + self.proj_bias)

    def feed(self, x_tD: Tensor, ffn: Ffn) -> Tensor:
        """Feed-forward with its output bias, ``[t, D]``."""
        return ffn(x_tD, self.ffn_weights) + self.down_bias


class GptLayer(BiasedLayer):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    activation = "gelu_tanh"

    def pre_attention(self, x_tD: Tensor) -> Tensor:
        """Norm the layer's input."""
        return layer_norm(x_tD, self.attention_norm, self.attention_norm_bias, self.norm_eps)

    def tokenwise_half(self, x_tD: Tensor, ffn: Ffn) -> Tensor:
        """Norm, feed-forward and residual."""
        normed_tD = layer_norm(x_tD, self.ffn_norm, self.ffn_norm_bias, self.norm_eps)
        return x_tD + self.feed(normed_tD, ffn)


class Gpt(Transformer):
    """Embeddings of tokens and positions, layers, final norm, head."""

    inputs = frozenset({"embedding", "position"})

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        new = partial(parameter, dtype=dtype, device=device)
        self.embedding = new(spec.vocab_size, spec.hidden_size)
        self.position = new(spec.max_positions, spec.hidden_size)
        self.layers = nn.ModuleList(GptLayer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers))
        self.final_norm = new(spec.hidden_size)
        self.final_norm_bias = new(spec.hidden_size)
        self.head = None if spec.tied_embeddings else new(spec.vocab_size, spec.hidden_size)

    def views(self, cu_seqlens: tuple[int, ...]) -> tuple[AttentionView, ...]:
        """The pack's own order.

        Raises:
            InputError: a sequence has more tokens than there are positions.
        """
        check_positions(cu_seqlens, self.spec)
        return (in_order(cu_seqlens, causal=True),)

    def tables(self, offsets: np.ndarray) -> None:
        """None: GPT-2 adds learned positions to the embeddings."""

    def embed(self, execution: Execution) -> Tensor:
        """Embeddings of tokens and of their positions, ``[t, D]``."""
        return execution.lookup(self.embedding) + F.embedding(execution.offsets(), self.position)

    def norm(self, x_tD: Tensor) -> Tensor:
        """The final norm."""
        return layer_norm(x_tD, self.final_norm, self.final_norm_bias, self.spec.norm_eps)

    @property
    def output(self) -> tuple[Tensor, None]:
        """The head, or the input embedding where they are tied; no bias."""
        return self.embedding if self.head is None else self.head, None
