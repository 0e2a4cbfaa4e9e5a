"""What the benchmark of any model runs on its ranks: three models, three sets of lengths, one side at a time."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lengthwise
from lengthwise.core.wording import GIB
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.run import Run

VOCABULARY, PATCHES, CHANNELS = 512, 16, 8
LENGTHS = tuple(32 * 2**k for k in range(6))
"""32 to 1,024 tokens, doubling: thirty times as long as the shortest."""
POWERS = {"short": -2.0, "balanced": -1.0, "long": 0.25}
"""How often a length l is drawn: l to this power. The work of a sequence is between l and l^2."""
TOKENS = 4_000
"""Of a step."""


class Attention(nn.Module):
    """Multi-head attention along the last axis but one."""

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.num_heads, self.causal = num_heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    """A layer of the Transformers of DCP, table 1: feed-forward of four times the width, no biases in products."""

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal=causal)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer1D(nn.Module):
    """A language model with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 128), nn.Embedding(LENGTHS[-1], 128)
        self.layers = nn.ModuleList(Block(128, 8, causal=True) for _ in range(6))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Across(nn.Module):
    """Each place of the frames by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.across = Block(96, 8, causal=False), Block(96, 8, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.across(self.within(x).transpose(1, 2)).transpose(1, 2)


class Transformer2D(nn.Module):
    """[1, frames, patches, channels] in and out; attention within frames and across them in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(CHANNELS, 96), nn.Linear(96, CHANNELS)
        self.layers = nn.ModuleList(Across() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        for layer in self.layers:
            h = layer(h)
        return self.outward(h)


def make_llama() -> nn.Module:
    """Of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=LENGTHS[-1], use_cache=False,
        )
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model of a user, and how the loop calls it."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    options: dict[str, Any]


def _video_inputs(micro_batch: Any) -> dict[str, Any]:
    frames = torch.from_numpy(np.concatenate(micro_batch.sequences))
    return {"x": micro_batch.own(frames)[None]}


def _video_loss(output: Tensor, micro_batch: Any) -> Tensor:
    return F.mse_loss(output, torch.zeros_like(output))


KINDS = {
    "llama (transformers)": Kind(make=make_llama, loss=lambda output, micro_batch: output.loss, options={}),
    "Transformer-1D": Kind(make=Transformer1D, loss=lambda output, micro_batch: output[1], options={}),
    "Transformer-2D": Kind(
        make=Transformer2D, loss=_video_loss,
        options={"inputs": _video_inputs, "loss": _video_loss, "slot_tokens": PATCHES, "objective": "every-token"},
    ),
}  # fmt: skip


def corpus(kind: str, drawn: str, number: int = 2_000) -> list[np.ndarray]:
    """Sequences drawn with probability proportional to a power of their length."""
    rng = np.random.default_rng(7)
    weights = np.asarray(LENGTHS, dtype=float) ** POWERS[drawn]
    lengths = rng.choice(LENGTHS, number, p=weights / weights.sum())
    if kind == "Transformer-2D":
        return [rng.standard_normal((length // PATCHES, PATCHES, CHANNELS)).astype(np.float32) for length in lengths]
    return [rng.integers(0, VOCABULARY, length) for length in lengths]


def prepared(kind: str, drawn: str, policy: str, work: str, **options: Any) -> Run:
    """A run of one policy; what two layers cost is measured once for all."""
    logging.getLogger("lengthwise").setLevel(logging.ERROR)
    torch.manual_seed(0)
    found = KINDS[kind]
    profile = Path(work) / f"{kind.split()[0]} on {torch.distributed.get_world_size()}.json"
    return lengthwise.prepare(
        found.make(), corpus(kind, drawn), policy=policy, tokens_per_step=TOKENS, device="cpu", profile=profile,
        verbose=False, check=False, **{**found.options, **options},
    )  # fmt: skip


def memory_gib(kind: str, work: str) -> float:
    """A device that holds the longest sequence at the highest degree with half of the layers recomputed, no less."""
    run = prepared(kind, "long", "static", work, steps=1)
    cost = run.on_finish.__self__.cost.base  # type: ignore[union-attr]
    assert isinstance(cost, DualLayerCost)
    degree, layers = run.world.size, run.wrapped_model.structure.num_layers
    state = min(int(cost.peak_bytes(0, kind.scheme, num_devices=degree)) for kind in run.planner.problem.candidates)  # type: ignore[attr-defined]
    needed = cost.predict((LENGTHS[-1],), degree, layers // 2)[1]
    run.close()
    return float(state + 1.05 * needed) / GIB


def train(kind: str, drawn: str, policy: str, steps: int, limit_gib: float, work: str) -> dict[str, float]:
    """Tokens per second, share of idle time and errors of prediction over ``steps`` steps after the first."""
    run = prepared(kind, drawn, policy, work, steps=steps + 1, memory_gib=limit_gib)
    loss_of, tokens, seconds, idle, errors = KINDS[kind].loss, 0, 0.0, [], []
    for step in run.steps():
        start_s = time.perf_counter()
        for micro_batch in step:
            step.backward(loss_of(run.model(**micro_batch.inputs), micro_batch))
        busy_s = sum(measured.time_s for measured in step.measured)
        step.update()
        row = torch.tensor([time.perf_counter() - start_s, busy_s], dtype=torch.float64)
        steps_s, busy = gather_rows(row).T.numpy()
        if step.number:
            tokens += sum(sum(m.pack.lengths) for p in step.plan.pipelines for m in p.micro_batches)
            seconds += float(steps_s.max())
            idle.append(1.0 - float(busy.mean() / busy.max()))
            errors.append(abs(step.plan.time_s / float(steps_s.max()) - 1.0))
    degrees = {p.scheme.degree for p in step.plan.pipelines if p.micro_batches}
    run.close()
    return {
        "tokens_per_s": tokens / seconds,
        "idle": float(np.mean(idle)),
        "error": float(np.median(errors)),
        "max_degree": float(max(degrees)),
    }
