"""BERT (Devlin et al. 2019) with its masked-LM head: post-norm, bidirectional, learned positions, biases everywhere.

T tokens of the pack, t of them on this rank, D hidden size, V vocabulary, P positions; a layer's sizes are GPT's. Every
token is of type 0: a pack's sequences are single sentences, and there is no next-sentence prediction and no pooler.
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
from lengthwise.runtime.models.gpt import BiasedLayer
from lengthwise.runtime.models.norm import layer_norm
from lengthwise.runtime.models.operators import Ffn

NUM_TOKEN_TYPES = 2
"""Rows of the table of token types, as published models have them; only the first is used."""


class BertLayer(BiasedLayer):
    """Attention and feed-forward, each beside a residual and before a norm."""

    activation = "gelu"

    def pre_attention(self, x_tD: Tensor) -> Tensor:
        """Return ``x``: post-norm layers attend to their input as it is."""
        return x_tD

    def tokenwise_half(self, x_tD: Tensor, ffn: Ffn) -> Tensor:
        """Norm; then feed-forward, residual and norm."""
        x_tD = layer_norm(x_tD, self.attention_norm, self.attention_norm_bias, self.norm_eps)
        summed_tD = x_tD + self.feed(x_tD, ffn)
        return layer_norm(summed_tD, self.ffn_norm, self.ffn_norm_bias, self.norm_eps)


class Bert(Transformer):
    """Normed embeddings of tokens, positions and types, layers, masked-LM transform, decoder with a bias."""

    inputs = frozenset({"embedding", "position", "token_type", "embedding_norm", "embedding_norm_bias"})

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        new = partial(parameter, dtype=dtype, device=device)
        self.embedding = new(spec.vocab_size, spec.hidden_size)
        self.position = new(spec.max_positions, spec.hidden_size)
        self.token_type = new(NUM_TOKEN_TYPES, spec.hidden_size)
        self.embedding_norm = new(spec.hidden_size)
        self.embedding_norm_bias = new(spec.hidden_size)
        self.layers = nn.ModuleList(BertLayer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers))
        self.transform = new(spec.hidden_size, spec.hidden_size)
        self.transform_bias = new(spec.hidden_size)
        self.transform_norm = new(spec.hidden_size)
        self.transform_norm_bias = new(spec.hidden_size)
        self.head = None if spec.tied_embeddings else new(spec.vocab_size, spec.hidden_size)
        self.output_bias = new(spec.vocab_size)

    def views(self, cu_seqlens: tuple[int, ...]) -> tuple[AttentionView, ...]:
        """The pack's own order.

        Raises:
            InputError: a sequence has more tokens than there are positions.
        """
        check_positions(cu_seqlens, self.spec)
        return (in_order(cu_seqlens, causal=False),)

    def tables(self, offsets: np.ndarray) -> None:
        """None: BERT adds learned positions to the embeddings."""

    def embed(self, execution: Execution) -> Tensor:
        """Embeddings of tokens, of their positions and of type 0, normed: ``[t, D]``."""
        x_tD = execution.lookup(self.embedding) + F.embedding(execution.offsets(), self.position) + self.token_type[0]
        return layer_norm(x_tD, self.embedding_norm, self.embedding_norm_bias, self.spec.norm_eps)

    def norm(self, x_tD: Tensor) -> Tensor:
        """The masked-LM transform, ``[t, D]``: dense, GELU, norm."""
        x_tD = F.gelu(F.linear(x_tD, self.transform, self.transform_bias))
        return layer_norm(x_tD, self.transform_norm, self.transform_norm_bias, self.spec.norm_eps)

    @property
    def output(self) -> tuple[Tensor, Tensor]:
        """The decoder, which is the input embedding where they are tied, and its bias."""
        return self.embedding if self.head is None else self.head, self.output_bias
