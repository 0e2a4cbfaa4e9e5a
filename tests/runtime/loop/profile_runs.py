"""Prepared runs of small models, for measuring, and models that lie about memory."""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.profile.probes import LoopbackGroup
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import current
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.memory_runs import run_of

VOCABULARY, HIDDEN, LAYERS, PLACES = 61, 16, 4, 256


class Layer(nn.Module):
    """Causal attention and a feed-forward, each behind a norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.other_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(out)
        x = x + self.down(F.gelu(self.up(self.other_norm(x))))
        return F.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """A language model with learned positions, and dropout before its head, after all layers."""

    def __init__(self, num_layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(PLACES, HIDDEN)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.last_dropout = nn.Dropout(dropout)
        self.register_buffer("unused", torch.zeros(7))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last_dropout(self.norm(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Limited(nn.Module):
    """Passes its input on, if there is memory for so many numbers."""

    def __init__(self, limit: int, where: str) -> None:
        """``where``: in the ``forward``, the ``backward``, or ``together``, only when other ranks take part."""
        super().__init__()
        self.limit, self.where, self.most = limit, where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, x.numel())
        if self.where == "forward" or (self.where == "together" and not isinstance(current().group, LoopbackGroup)):
            check(x.numel(), self.limit)
        elif self.where == "backward" and x.requires_grad:
            x.register_hook(lambda gradient: check(gradient.numel(), self.limit))
        return x


def check(number: int, limit: int) -> None:
    """What the allocator of a CPU does."""
    if number > limit:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")


class Limiting(nn.Module):
    """A layer in which memory is short."""

    def __init__(self, layer: nn.Module, limited: Limited) -> None:
        super().__init__()
        self.layer, self.limited = layer, limited

    def forward(self, x: Tensor) -> Tensor:
        return self.limited(self.layer(x))


class Spend(torch.autograd.Function):
    """Takes time of a clock that nothing else advances."""

    now = 0.0

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):  # type: ignore[no-untyped-def]
        ctx.backward_s = backward_s
        Spend.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        Spend.now += ctx.backward_s
        return gradient, None, None


class Spending(nn.Module):
    """A layer that takes so many seconds."""

    def __init__(self, layer: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layer, self.seconds = layer, (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(self.layer(x), *self.seconds)


class Source:
    """One sequence."""

    def tokens(self, sequence: int, /) -> np.ndarray:
        return np.random.default_rng(sequence).integers(0, VOCABULARY, 20)


def refuse(batch: object) -> None:
    """A planner that is not asked."""
    raise AssertionError("nothing is planned here")


def prepared(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> Run:
    """A run before its first step."""
    return run_of(
        WrappedModel(model.to(dtype)),
        start_world("cpu"),
        stream=None,  # type: ignore[arg-type]
        planner=refuse,  # type: ignore[arg-type]
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN),
        optimizer=OptimizerSettings(),
        lr=lambda step: 0.1,
        num_steps=1,
    )


def llama(num_layers: int = LAYERS) -> nn.Module:
    """Of transformers, with fewer key/value heads than query heads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)
