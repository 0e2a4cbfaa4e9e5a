"""A diffusion Transformer over frames and places, alone or under torchrun; lines with a mark are added."""

import numpy as np
from torch import manual_seed, nn
from torch.nn import functional as F

import lengthwise as lw  # +

PLACES, CHANNELS, WIDTH = 16, 4, 32  # of a frame, of a place, of the model


def attend(x, qkv):
    q, k, v = (each.unflatten(-1, (2, -1)).transpose(-3, -2) for each in qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.mlp = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 3, 1))

    def forward(self, x):  # [1, frames, places, width]
        x = x + attend(x, self.space) + attend(x.transpose(1, 2), self.time).transpose(1, 2)
        return x + F.gelu(self.mlp(F.layer_norm(x, (WIDTH,))))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.when = nn.Linear(CHANNELS, WIDTH), nn.Linear(1, WIDTH)
        self.blocks, self.outward = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, t):  # t: [1, frames]
        x = self.inward(x) + self.when(t[..., None, None])
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def noised(m):  # the forward's arguments, and what it is to find
    clean, noise = m.own(np.concatenate(m.sequences)), m.normal(PLACES, CHANNELS)  # +
    t = m.uniform_of_sequences()[:, None, None]  # +
    return {"x": ((1 - t) * clean + t * noise)[None], "t": t[None, :, 0, 0]}, (noise - clean)[None]


manual_seed(0)
model, draw = Diffusion(), np.random.default_rng(0)
films = [draw.normal(size=(frames, PLACES, CHANNELS)).astype("float32") for frames in draw.integers(1, 13, 120)]
how = {"inputs": lambda m: noised(m)[0], "loss": lambda out, m: F.mse_loss(out, noised(m)[1])}  # +
how |= {"slot_tokens": PLACES, "objective": "every-token", "sequences_per_step": 24}  # +
run = lw.prepare(model, films, policy="auto", lr=3e-3, **how)  # +
for step in run.steps():  # +
    for micro_batch in step:  # +
        inputs, target = noised(micro_batch)
        step.backward(F.mse_loss(model(**inputs), target))  # +
    done = step.update()  # +
    if run.world.is_first:
        degrees = sorted(pipeline.scheme.degree for pipeline in step.plan.pipelines)
        print(f"step {step.number}: loss {done.loss:.3f}, ranks that shared a pack: {degrees}")
