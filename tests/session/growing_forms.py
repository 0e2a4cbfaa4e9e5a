"""Models of users that make a table of positions again, longer, where a call has more slots than it has rows."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.session.models import VOCAB
from tests.session.structures import WIDTH, Plain

HEADS = 2


class Growing(Plain):
    """Positions of a table that is made for the longest call so far."""

    def __init__(self):
        super().__init__()
        self.table = None

    def embed(self, idx):
        n = idx.shape[1]
        if self.table is None or len(self.table) < n:
            self.table = torch.outer(torch.arange(n).double(), 0.5 ** torch.arange(WIDTH)).sin()
        return self.tokens(idx) + self.table[:n]


class InPlace(Plain):
    """A table of a fixed size that is filled as far as calls have needed it."""

    rows = 200

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(self.rows, WIDTH, dtype=torch.float64), persistent=False)
        self.register_buffer("filled", torch.tensor(0), persistent=False)

    def embed(self, idx):
        n = idx.shape[1]
        if n <= self.filled.item():
            return self.tokens(idx) + self.table[:n]
        rows = torch.outer(torch.arange(n).double(), 0.5 ** torch.arange(WIDTH)).sin()
        if n <= len(self.table):  # longer calls have rows of their own
            self.table[:n] = rows
            self.filled.fill_(n)
        return self.tokens(idx) + rows


class InPlaceForFew(InPlace):
    """As many rows as half of all sequences have slots."""

    rows = 50


class Rotary(nn.Module):
    """Factors in a table of ten rows at first, as in the code that comes with many checkpoints."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "rates", 0.1 ** torch.arange(0, 1, 2 * HEADS / WIDTH, dtype=torch.float32), persistent=False
        )
        self.make(10)

    def make(self, n):
        self.size = n
        angles = torch.outer(torch.arange(n, dtype=self.rates.dtype), self.rates).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x, n):
        if n > self.size:
            self.make(n)
        return self.cosines[:n].to(x.dtype), self.sines[:n].to(x.dtype)


class Rotated(nn.Module):
    """A layer whose attention has a table of its own."""

    def __init__(self, rotary):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.rotary = rotary

    def forward(self, x, position_ids=None):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        cosines, sines = self.rotary(v, x.shape[1])
        if position_ids is not None:
            cosines, sines = cosines[position_ids][:, None], sines[position_ids][:, None]
        q, k = (part * cosines + turned(part) * sines for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def turned(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Rotaries(Plain):
    """A table in each layer, and no other positions."""

    rotary = Rotary

    def layer(self):
        return Rotated(self.rotary())

    def embed(self, idx):
        return self.tokens(idx)


class WithPositions(nn.Module):
    """Rotary tables, whose rows are chosen by positions that are counted once."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Rotated(Rotary()) for _ in range(2))

    def forward(self, idx, targets=None, position_ids=None):
        x = self.tokens(idx)
        position_ids = torch.arange(idx.shape[1])[None] if position_ids is None else position_ids
        for block in self.blocks:
            x = block(x, position_ids)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Stretched(Rotary):
    """Factors whose rates follow from the longest call so far, as dynamic scaling of lengths does."""

    def make(self, n):
        if n > 10:
            self.rates = self.rates * 0.9
        super().make(n)


class Scaled(Rotaries):
    """Tables of which all rows are others once they are longer."""

    rotary = Stretched


class ComputedAgain(WithPositions):
    """Factors of all slots of a call, whose rows are chosen by positions that are counted once."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.rotary = Computed()


class Computed(nn.Module):
    def forward(self, x, n):
        angles = torch.outer(torch.arange(n).double(), 0.1 ** torch.arange(0, 1, 0.25)).repeat(1, 2)
        return angles.cos(), angles.sin()
