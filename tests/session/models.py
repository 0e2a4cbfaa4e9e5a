"""Small models of users, corpora of theirs, and the loops that they would write on one device."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.plan.costs import SimpleCost

VOCAB = 61


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads, self.causal = num_heads, causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Counts positions itself, and makes its loss itself: what many plain scripts have."""

    def __init__(self, *, width: int = 24, num_layers: int = 3, max_length: int = 96) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, loss


class Video(nn.Module):
    """[1, F, P, C] in and out: each place attends across the frames, then the places of a frame to one another."""

    def __init__(self, *, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(channels, width), nn.Linear(width, channels)
        self.blocks = nn.ModuleList(Frames(width) for _ in range(2))

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


class Frames(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.across, self.within = Block(width, 2, causal=False), Block(width, 2, causal=False)

    def forward(self, x):
        return self.within(self.across(x.transpose(1, 2)).transpose(1, 2))


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT().double()


class Adapter(nn.Module):
    """A frozen linear layer with a trained matrix of low rank beside it, as LoRA adds, and frozen scales in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features, bias=False)
        self.scales = nn.Parameter(torch.rand(linear.out_features), requires_grad=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x)) * self.scales


def adapted_gpt(seed: int = 0, **sizes: int) -> GPT:
    """A frozen GPT whose attention has adapters, which are trained."""
    torch.manual_seed(seed)
    model = GPT(**sizes).double().requires_grad_(False)
    for block in model.blocks:
        adapter = block.attention.qkv = Adapter(block.attention.qkv)
        adapter.down.double(), adapter.up.double()
    return model


def video(seed: int = 0) -> Video:
    torch.manual_seed(seed)
    return Video().double()


def films(count: int = 12, *, places: int = 4, channels: int = 3, seed: int = 0) -> list[np.ndarray]:
    """[F, P, C] each; F differs."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(int(length), places, channels)) for length in rng.integers(2, 17, count)]


def rows(count: int = 40, *, longest: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Token ids; most rows are short."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.12, count) + 1, longest)
    lengths[rng.integers(0, count, count // 8)] = longest
    return [rng.integers(0, VOCAB, length) for length in lengths]


def mixed_cost() -> SimpleCost:
    """A device holds 40 tokens, so the longest rows need two devices; short ones are dearer on two than on one."""
    return SimpleCost(capacity=40, loss=0.4, c_s=0.05)


def sum_of_losses(model: nn.Module, row: np.ndarray, labels: np.ndarray | None = None) -> torch.Tensor:
    """Of one sequence by itself, over its targets."""
    tokens = torch.as_tensor(np.asarray(row).astype(np.int64))
    targets = (tokens if labels is None else torch.as_tensor(labels))[1:]
    logits, _ = model(tokens[None])
    return F.cross_entropy(logits[0, :-1], targets, reduction="sum", ignore_index=-100)


def train_alone(model, batches, loss_of, *, num_targets, lr, weight_decay=0.1, clip=1.0, betas=(0.9, 0.95), eps=1e-8):
    """Losses of an ordinary loop on one device; ``model`` is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps)
    losses = []
    for step, ids in enumerate(batches):
        count = sum(num_targets(i) for i in ids)
        total = 0.0
        for i in ids:
            loss = loss_of(model, i) / count
            loss.backward()
            total += loss.item()
        if clip:
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained))
            for parameter in trained:
                parameter.grad.mul_(min(1.0, clip / (norm + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
