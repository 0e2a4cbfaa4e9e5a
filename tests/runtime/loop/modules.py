"""Models as their users wrote them: no word in them of packs, ranks or this package."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 37
WIDTH, HEADS = 32, 4


def distances(t):
    return torch.arange(t)[:, None] - torch.arange(t)


def sinks_and_window(t, x):
    seen = torch.ones(t, t, dtype=torch.bool).tril().triu(-3)
    seen[:, :2] = True
    return seen.tril()


def strides(t, x):
    rows = torch.ones(t, t).cumsum(0) - torch.ones(t, t).cumsum(1)
    return (rows >= 0) & (rows % 3 == 0)


def sinks_by_arange(t, x):
    key = torch.arange(t)
    return (distances(t) >= 0) & ((key < 2) | (distances(t) < 4))


def slopes(t, x):
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)[:, None, None]
    bias = -slopes * (torch.ones(t, t).cumsum(0) - torch.ones(t, t).cumsum(1)).to(x.dtype)
    return bias.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e30)


def both_ways(t, x):
    return torch.ones(1, 1, t, t, dtype=torch.bool).tril(2).triu(-4)


def longer_is_narrower(t, x):
    return torch.ones(t, t, dtype=torch.bool).tril().triu(-4 if t > 12 else -40)


MASKS = {
    "sinks": sinks_and_window, "strides": strides, "sinks by arange": sinks_by_arange, "slopes": slopes,
    "both ways": both_ways, "longer is narrower": longer_is_narrower,
}  # fmt: skip
"""Of t slots."""


def filled(logits, tril):
    return logits.masked_fill(tril == 0, -math.inf)


def filled_in_place(logits, tril):
    logits.masked_fill_(tril == 0, torch.finfo(logits.dtype).min)
    return logits


def biased(logits, tril):
    t = logits.shape[-1]
    return torch.where(tril[:t, :t].bool(), logits + slopes(t, logits), torch.tensor(-1e9, dtype=logits.dtype))


def capped(logits, tril):
    return 5.0 * torch.tanh(filled(logits, tril) / 5.0)


def scaled_by_length(logits, tril):
    return filled(logits * math.log(logits.size(-1)), tril)


BY_HAND = {
    "filled": filled, "filled in place": filled_in_place, "biased": biased, "capped": capped,
    "scaled by length": scaled_by_length,
}  # fmt: skip
"""What is done to logits; the second is the lower triangle."""


class Attention(nn.Module):
    """nanoGPT's."""

    def __init__(self, mask: str = "is_causal", dropout: float = 0.0):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.dropout = mask, dropout
        self.register_buffer("tril", torch.ones(64, 64).tril().view(1, 1, 64, 64), persistent=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        p = self.dropout if self.training else 0.0
        if self.mask == "is_causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        elif self.mask == "none":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self.mask == "bool":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(t, t, dtype=torch.bool).tril())
        elif self.mask == "float":
            mask = torch.full((t, t), -math.inf, dtype=x.dtype).triu(1)
            y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.3)
        elif self.mask == "buffer":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.tril[:, :, :t, :t] == 1)
        elif self.mask == "alibi":
            distance = torch.arange(t)[None] - torch.arange(t)[:, None]
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=distance.to(x.dtype).masked_fill(distance > 0, -math.inf)
            )
        elif self.mask == "window":
            seen = torch.ones(t, t, dtype=torch.bool).tril().triu(-16)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        elif self.mask == "narrow window":
            seen = torch.ones(t, t, dtype=torch.bool).tril().triu(-3)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        elif self.mask in MASKS:
            mask = MASKS[self.mask](t, x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        elif self.mask == "cross":
            y = F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2])
        elif self.mask == "by hand":
            logits = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            y = logits.masked_fill(self.tril[:, :, :t, :t] == 0, -math.inf).softmax(-1) @ v
        elif self.mask in BY_HAND:
            logits = BY_HAND[self.mask]((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1)), self.tril[0, 0, :t, :t])
            y = F.dropout(logits.softmax(-1), p) @ v
        elif self.mask == "einsum":
            logits = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(self.tril[:, :, :t, :t] == 0, -math.inf)
            y = torch.einsum("bhij,bhjd->bhid", logits.softmax(-1), v)
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(**options), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.drop = nn.Dropout(options.get("dropout", 0.0))

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """As in nanoGPT: learned positions by arange, tied weights, the loss inside."""

    def __init__(self, num_layers=3, **options):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "drop": nn.Dropout(options.get("dropout", 0.0)),
                "h": nn.ModuleList(Block(**options) for _ in range(num_layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


class RotaryBlock(nn.Module):
    """Grouped queries, a layer that returns a tuple and takes its tables by keyword."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, tables):
        b, t, c = x.shape
        y = self.norm(x)
        q = self.q(y).view(b, t, HEADS, -1).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, 2, -1).permute(2, 0, 3, 1, 4)
        q, k = (self.rotate(z, *tables) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + F.silu(self.gate(x)), y.detach()

    @staticmethod
    def rotate(x, cos, sin):
        one, two = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-two, one), dim=-1) * sin


class Uneven(nn.Module):
    """Values of another size than queries and keys."""

    def __init__(self, size: int, value_size: int):
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, 2 * HEADS * size), nn.Linear(WIDTH, HEADS * value_size)
        self.out = nn.Linear(HEADS * value_size, WIDTH)

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2, HEADS, -1)).unbind(2)
        v = self.v(x).unflatten(-1, (HEADS, -1))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class UnevenHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Uneven(8, 6), Uneven(4, 6), Uneven(6, 6)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Llama(nn.Module):
    """Tables of rotations: a buffer and a plain attribute, cut to the length."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        angles = torch.outer(torch.arange(64.0), 10000.0 ** -torch.arange(0, 1, 0.25)).repeat(1, 2).double()
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.sin = angles.sin()
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        t = tokens.shape[1]
        tables = self.cos[None, None, :t], self.sin[:t, :]
        x = self.embedding(tokens)
        for layer in self.layers:
            x, _ = layer(x, tables=tables)
        return self.head(x)


class TorchEncoder(nn.Module):
    """Of torch's own layers; learned positions of its parameter's first rows."""

    def __init__(self, causal: bool, batch_first: bool, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, 64, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout, batch_first=batch_first, norm_first=causal)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.causal, self.batch_first = causal, batch_first

    def forward(self, tokens):
        t = tokens.size(1)
        x = self.embedding(tokens) + self.position[:, :t]
        mask = nn.Transformer.generate_square_subsequent_mask(t, dtype=x.dtype) if self.causal else None
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, is_causal=self.causal)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class OwnMultihead(nn.Module):
    """nn.MultiheadAttention in a layer of one's own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(OwnMultihead() for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLACES, CHANNELS = 3, 5


class VideoBlock(nn.Module):
    """Attention within frames, then at one place across frames."""

    def __init__(self, dropout: float):
        super().__init__()
        self.space, self.time = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def attend(self, qkv, x):
        q, k, v = qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(-2, -3).flatten(-2)

    def forward(self, x):
        x = x + self.attend(self.space, x)
        x = x + self.attend(self.time, x.transpose(0, 1)).transpose(0, 1)
        return x + F.gelu(self.mlp(x))


class Video(nn.Module):
    """A Transformer over [1, frames, places, channels]."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.inner, self.outer = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.frame, self.place = nn.Parameter(torch.zeros(32, 1, WIDTH)), nn.Parameter(torch.zeros(PLACES, WIDTH))
        self.blocks = nn.ModuleList(VideoBlock(dropout) for _ in range(2))

    def forward(self, x):
        x = self.inner(x[0])
        x = x + self.frame[: x.shape[0]] + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.outer(x)[None]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    """Stands for the kernel, which needs a GPU: the same for one sequence."""
    assert q.dim() == 3 and cu_seqlens_q.tolist() == [0, len(q)], "one sequence"
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    before, after = (len(q) if size < 0 else size for size in window_size)
    seen = (distance <= before) & (distance >= (0 if causal else -after))
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=softmax_scale)[0].transpose(0, 1)


class FlashBlock(nn.Module):
    """Packs of one's own: a kernel that takes the ends of sequences."""

    def __init__(self, window):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window = window

    def forward(self, x, ends):
        q, (k, v) = self.q(x).view(len(x), HEADS, -1), self.kv(x).view(len(x), 2, 2, -1).unbind(1)
        longest = int(ends.diff().max())
        y = flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, softmax_scale=0.4, causal=True, window_size=self.window
        )  # fmt: skip
        return x + torch.tanh(self.out(y.flatten(1)))


class Flash(nn.Module):
    def __init__(self, window=(-1, -1)):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(FlashBlock(window) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens[0])
        ends = torch.tensor([0, len(x)], dtype=torch.int32)
        for layer in self.layers:
            x = layer(x, ends)
        return self.head(x)[None]
