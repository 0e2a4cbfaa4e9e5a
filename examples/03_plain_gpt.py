"""A GPT of one's own in its own loop, on any number of ranks; lines with a mark are those that lengthwise adds.

python examples/03_plain_gpt.py      or      torchrun --nproc-per-node 2 examples/03_plain_gpt.py
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw  # +


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, vocab_size: int = 96, width: int = 32, num_layers: int = 3, max_length: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[0], targets[0])


torch.manual_seed(0)
model = GPT()
numbers = np.random.default_rng(0)
rows = [np.cumsum(numbers.integers(1, 4, size)) % 96 for size in np.minimum(numbers.geometric(0.04, 300) + 1, 128)]

run = lw.prepare(model, rows, policy="auto", lr=3e-3, sequences_per_step=32)  # +
for step in run.steps():  # +
    for micro_batch in step:  # +
        loss = model(**micro_batch.inputs)
        step.backward(loss)  # +
    done = step.update()  # +
    if run.world.is_first:
        degrees = sorted(pipeline.scheme.degree for pipeline in step.plan.pipelines)
        print(f"step {step.number}: loss {done.loss:.3f}, ranks that shared a pack: {degrees}")
