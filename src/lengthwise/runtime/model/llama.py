"""A Llama over packs on one device: pre-norm, rotary embeddings, grouped-query attention, SwiGLU (Touvron et al. 2023).

T tokens of the pack, D hidden size, N heads, K key/value heads, G = N / K, H head size, E = (N + 2 K) H, F feed-forward
size, V vocabulary. Every weight that a parallel method shards is stored with the sharded dimension first.

A layer knows nothing of devices: a method computes the same layer from the same weights with the functions below,
put between its own communication.
"""

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.model.activation import silu_mul
from lengthwise.runtime.model.attention import attend
from lengthwise.runtime.model.loss import chunked_cross_entropy
from lengthwise.runtime.model.norm import rms_norm
from lengthwise.runtime.model.rope import rotary_tables, split_and_rotate

INIT_STD = 0.02
# Logits of one chunk of the loss. A CPU's cache wants it small (measured: 8 MiB of float32, but at least 128 tokens per
# product), a GPU wants large products.
_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
_MIN_CHUNK_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class PackContext:
    """What every layer needs to know of the pack; made once per forward."""

    cu_seqlens: tuple[int, ...]
    cos_TH: Tensor
    """``[T, H / 2]``."""
    sin_TH: Tensor
    """``[T, H / 2]``."""


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.head_size, self.norm_eps = spec.head_size, spec.norm_eps
        self.group_size = spec.num_heads // spec.num_kv_heads
        new = partial(_parameter, dtype=dtype, device=device)
        self.attention_norm = new(spec.hidden_size)
        self.qkv = new(spec.qkv_size, spec.hidden_size)
        """[E, D]: for each key/value head its G query heads, its key, its value."""
        self.qkv_bias = new(spec.qkv_size) if spec.qkv_bias else None
        self.proj = new(spec.num_heads * spec.head_size, spec.hidden_size)
        self.ffn_norm = new(spec.hidden_size)
        self.gate = new(spec.ffn_size, spec.hidden_size)
        self.up = new(spec.ffn_size, spec.hidden_size)
        self.down = new(spec.ffn_size, spec.hidden_size)
        """[F, D]: transposed, so that out = activations @ down."""

    def forward(self, x_TD: Tensor, pack: PackContext) -> Tensor:
        """One layer; returns ``[T, D]``."""
        x_TD = x_TD + self.attention(rms_norm(x_TD, self.attention_norm, self.norm_eps), pack)
        return x_TD + self.ffn(rms_norm(x_TD, self.ffn_norm, self.norm_eps))

    def attention(self, x_TD: Tensor, pack: PackContext) -> Tensor:
        """Attention of normed tokens, projected back to ``[T, D]``."""
        q_TNH, k_TKH, v_TKH = self.heads(F.linear(x_TD, self.qkv, self.qkv_bias), pack)
        return attend(q_TNH, k_TKH, v_TKH, pack.cu_seqlens).flatten(1) @ self.proj

    def heads(self, qkv_TE: Tensor, pack: PackContext) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[T, N, H]``, rotated keys and values ``[T, K, H]`` from any whole number of head groups."""
        qkv_TKGH = qkv_TE.unflatten(1, (-1, self.group_size + 2, self.head_size))
        return split_and_rotate(qkv_TKGH, pack.cos_TH, pack.sin_TH)

    def ffn(self, x_TD: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020) of normed tokens; ``[T, D]``."""
        return swiglu(x_TD, self.gate, self.up, self.down)


class Llama(nn.Module):
    """Embedding, layers, final norm, head. Calling it gives the *sum* of the losses of a pack."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        new = partial(_parameter, dtype=dtype, device=device)
        self.embedding = new(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers))
        self.final_norm = new(spec.hidden_size)
        self.head = None if spec.tied_embeddings else new(spec.vocab_size, spec.hidden_size)

    def forward(
        self,
        tokens_T: Tensor,
        cu_seqlens: tuple[int, ...],
        targets_T: Tensor,
        *,
        recompute: tuple[bool, ...] | None = None,
    ) -> Tensor:
        """Sum over the targets of the pack of their cross-entropy: a scalar.

        Args:
            tokens_T: int64 token ids.
            cu_seqlens: offsets of the sequence boundaries, from 0 to T.
            targets_T: see :func:`lengthwise.runtime.model.targets.next_token_targets`.
            recompute: one flag per layer; True keeps only the layer's input and computes it again in the backward.
        """
        return self.loss(self.hidden(tokens_T, cu_seqlens, recompute=recompute), targets_T)

    def hidden(
        self, tokens_T: Tensor, cu_seqlens: tuple[int, ...], *, recompute: tuple[bool, ...] | None = None
    ) -> Tensor:
        """Output of the last layer, before the final norm: ``[T, D]``."""
        flags = recompute or (False,) * len(self.layers)
        assert len(flags) == len(self.layers), f"{len(flags)} recompute flags for {len(self.layers)} layers"
        pack = self.context(cu_seqlens)
        x_TD = self.embed(tokens_T)
        for layer, again in zip(self.layers, flags):
            if again and torch.is_grad_enabled():
                x_TD = checkpoint(layer, x_TD, pack, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = layer(x_TD, pack)
        return x_TD

    def context(self, cu_seqlens: tuple[int, ...]) -> PackContext:
        """The pack's boundaries and rotary tables."""
        weight = self.final_norm
        cos_TH, sin_TH = rotary_tables(self.spec, cu_seqlens, dtype=weight.dtype, device=weight.device)
        return PackContext(cu_seqlens=cu_seqlens, cos_TH=cos_TH, sin_TH=sin_TH)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Input embeddings, ``[T, D]``."""
        return F.embedding(tokens_T, self.embedding)

    def loss(self, x_TD: Tensor, targets_T: Tensor) -> Tensor:
        """Final norm, head and summed cross-entropy."""
        x_TD = rms_norm(x_TD, self.final_norm, self.spec.norm_eps)
        num_logits = _CHUNK_LOGITS.get(x_TD.device.type, _CHUNK_LOGITS["cuda"])
        chunk_tokens = max(_MIN_CHUNK_TOKENS, num_logits // self.spec.vocab_size)
        return chunked_cross_entropy(x_TD, self.output_embedding, targets_T, chunk_tokens=chunk_tokens)

    def logits(self, tokens_T: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
        """``[T, V]`` at once, for evaluation and tests."""
        x_TD = rms_norm(self.hidden(tokens_T, cu_seqlens), self.final_norm, self.spec.norm_eps)
        return x_TD @ self.output_embedding.T

    @property
    def output_embedding(self) -> Tensor:
        """``[V, D]``: the head, or the input embedding where they are tied."""
        return self.embedding if self.head is None else self.head


def build_model(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Llama:
    """A Llama with random weights that depend on ``seed`` alone, not on dtype or device.

    Each weight is drawn in float32 from its own generator, seeded by its name: normal, standard deviation 0.02, divided
    by sqrt(2 L) in the two projections into the residual stream (GPT-2). On device ``meta`` nothing is drawn.

    Raises:
        InputError: ``spec`` is not a causal Llama with a gated feed-forward.
    """
    if spec.family != "llama" or not spec.gated_ffn or not spec.causal:
        raise InputError(f"model {spec.name} is not a causal Llama with a gated feed-forward (family {spec.family!r})")
    model = Llama(spec, dtype=dtype, device=device)
    if torch.device(device).type != "meta":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(initial_value(name, tuple(weight.shape), num_layers=spec.num_layers, seed=seed))
    return model


def initial_value(name: str, shape: tuple[int, ...], *, num_layers: int, seed: int) -> Tensor:
    """The float32 value that the weight called ``name`` starts with."""
    kind = name.rpartition(".")[2]
    if kind.endswith("norm"):
        return torch.ones(shape)
    if kind == "qkv_bias":
        return torch.zeros(shape)
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    std = INIT_STD / (2 * num_layers) ** 0.5 if kind in ("proj", "down") else INIT_STD
    return torch.randn(shape, generator=generator) * std


def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_FD: Tensor) -> Tensor:
    """``(silu(x gate^T) * (x up^T)) down``; with rows of all three left out, the sum over the rest of F."""
    return silu_mul(F.linear(x_TD, gate_FD), F.linear(x_TD, up_FD)) @ down_FD


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
