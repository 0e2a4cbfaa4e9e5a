"""Models of users in which slots meet elsewhere than in plain attention, or that compute otherwise at some lengths."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.loop.modules import HEADS, VOCAB, WIDTH


class OddBlock(nn.Module):
    """A layer with causal attention and one oddity."""

    def __init__(self, oddity):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.oddity, self.mix = oddity, nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH) if oddity == "short convolution" else None
        self.batch_norm = nn.BatchNorm1d(WIDTH) if oddity == "batch norm" else None

    def mask(self, t):
        i, j = torch.arange(t)[:, None], torch.arange(t)[None]
        if self.oddity == "sinks and window":
            return (j <= i) & ((i - j < 4) | (j < 2))
        if self.oddity == "sinks and wide window":
            return (j <= i) & ((i - j < 16) | (j < 2))
        return (j <= i) & ((i - j) % 3 == 0)

    def forward(self, x, positions, shared):
        b, t, c = x.shape
        y = self.norm(x)
        if self.oddity == "token shift":
            y = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1) * 0.5 + y
        if self.oddity == "shift from positions":
            shifted = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
            y = torch.where(positions[..., None] == 0, 0.0, shifted) * 0.5 + y
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(y).split(c, dim=2))
        if self.oddity == "shared keys":
            k, v = shared.setdefault("keys", (k, v))
        if self.oddity == "keys of the layer before":
            (k, v), shared["keys"] = shared.get("keys", (k, v)), (k, v)
        if self.oddity == "log-n scaling":
            q = q * max(1.0, math.log(t) / math.log(12))
        if self.oddity in ("sinks and window", "strides", "sinks and wide window"):
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(t))
        else:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        if self.conv is not None:
            x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        if self.batch_norm is not None:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.oddity == "second mixer":
            x = x + self.mix(x.cumsum(1) / (torch.arange(t)[None, :, None] + 1))
        return x + torch.tanh(self.mix(x))


class Odd(nn.Module):
    def __init__(self, oddity):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(OddBlock(oddity) for _ in range(3))
        self.oddity = oddity

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x, shared = self.embedding(tokens), {}
        for layer in self.layers:
            if self.oddity == "layer drop" and self.training and torch.rand([]) < 0.2:
                continue
            x = layer(x, positions, shared)
        return self.head(x)
