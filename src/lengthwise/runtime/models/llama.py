"""Pre-norm Transformers with rotary embeddings: Llama (Touvron et al. 2023) and the two of DCP (Transformer-1D, -2D).

T tokens of the pack, t of them on this rank, D hidden size, N heads, K key/value heads, G = N / K, H head size,
E = (N + 2 K) H, F feed-forward size, V vocabulary. Every weight that a parallel method shards is stored with the
sharded dimension first.

Llama has grouped-query attention and SwiGLU. Transformer-1D has a feed-forward without gate. Transformer-2D sees its
sequences as frames of equally many tokens: layers attend within a frame and across frames, at one place of it, in turn.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.attention_view import AttentionView, across_frames, in_order, within_frames
from lengthwise.runtime.models.base import Transformer, parameter
from lengthwise.runtime.models.execution import Execution
from lengthwise.runtime.models.layer import TransformerLayer
from lengthwise.runtime.models.norm import rms_norm
from lengthwise.runtime.models.operators import AttentionWeights, Ffn, FfnWeights, Tables
from lengthwise.runtime.models.rope import rotary_tables


class LlamaLayer(TransformerLayer):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.head_size, self.norm_eps = spec.head_size, spec.norm_eps
        self.group_size = spec.num_heads // spec.num_kv_heads
        new = partial(parameter, dtype=dtype, device=device)
        self.attention_norm = new(spec.hidden_size)
        self.qkv = new(spec.qkv_size, spec.hidden_size)
        self.qkv_bias = new(spec.qkv_size) if spec.qkv_bias else None
        self.proj = new(spec.num_heads * spec.head_size, spec.hidden_size)
        self.ffn_norm = new(spec.hidden_size)
        self.gate = new(spec.ffn_size, spec.hidden_size) if spec.gated_ffn else None
        self.up = new(spec.ffn_size, spec.hidden_size)
        self.down = new(spec.ffn_size, spec.hidden_size)

    @property
    def attention_weights(self) -> AttentionWeights:
        """The weights that the layer's operators need."""
        return AttentionWeights(
            qkv=self.qkv, qkv_bias=self.qkv_bias, proj=self.proj, group_size=self.group_size, head_size=self.head_size
        )

    @property
    def ffn_weights(self) -> FfnWeights:
        """The weights that the layer's operators need."""
        return FfnWeights(gate=self.gate, up=self.up, down=self.down, activation="gelu")

    def pre_attention(self, x_tD: Tensor) -> Tensor:
        """Norm the layer's input."""
        return rms_norm(x_tD, self.attention_norm, self.norm_eps)

    def add_attention(self, x_tD: Tensor, attended_tD: Tensor) -> Tensor:
        """Add the residual."""
        return x_tD + attended_tD

    def tokenwise_half(self, x_tD: Tensor, ffn: Ffn) -> Tensor:
        """Norm, feed-forward and residual."""
        return x_tD + ffn(rms_norm(x_tD, self.ffn_norm, self.norm_eps), self.ffn_weights)


class Llama(Transformer):
    """Embedding, layers, final norm, head."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        new = partial(parameter, dtype=dtype, device=device)
        self.embedding = new(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers))
        self.final_norm = new(spec.hidden_size)
        self.head = None if spec.tied_embeddings else new(spec.vocab_size, spec.hidden_size)

    def views(self, cu_seqlens: tuple[int, ...]) -> tuple[AttentionView, ...]:
        """One view of the pack; two for a Transformer-2D, within frames and across them."""
        if self.spec.family == "transformer-2d":
            frame_size = self.spec.frame_size
            return within_frames(cu_seqlens, frame_size=frame_size), across_frames(cu_seqlens, frame_size=frame_size)
        return (in_order(cu_seqlens, causal=self.spec.causal),)

    def tables(self, offsets: np.ndarray) -> Tables:
        """Rotary tables of tokens at ``offsets`` [t] of their sequences."""
        return rotary_tables(self.spec, offsets, dtype=self.final_norm.dtype, device=self.final_norm.device)

    def embed(self, execution: Execution) -> Tensor:
        """Input embeddings, ``[t, D]``."""
        return execution.lookup(self.embedding)

    def norm(self, x_tD: Tensor) -> Tensor:
        """The final norm."""
        return rms_norm(x_tD, self.final_norm, self.spec.norm_eps)

    @property
    def output(self) -> tuple[Tensor, None]:
        """The head, or the input embedding where they are tied; no bias."""
        return self.embedding if self.head is None else self.head, None
