"""Models of latents, vectors of floats in a column, on ranks beside a loop of one's own that takes whole sequences."""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from tests.session.loops import as_started_by_torchrun
from tests.session.structure_runs import LR, OPTIONS, plan_of

WIDTH, HEADS, CHANNELS = 16, 2, 4
LENGTHS = (12, 6, 18, 3, 9, 15)


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).tanh()


class Latents(nn.Module):
    """Predicts a vector for each slot; a slot that ``mask`` hides is seen as a vector of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.hidden = (
            nn.Linear(CHANNELS, WIDTH),
            nn.Linear(WIDTH, CHANNELS),
            nn.Embedding(1, WIDTH),
        )
        self.places, self.blocks = nn.Embedding(64, WIDTH), nn.ModuleList(Attended() for _ in range(2))

    def place(self, x):
        return self.places(torch.arange(x.shape[1], device=x.device))

    def forward(self, x, mask=None):
        h = self.first(x)
        if mask is not None:
            h = torch.where(mask[..., None], self.hidden.weight[0], h)
        h = h + self.place(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def items_of(columns=lambda rng, number, length: {}, lengths=LENGTHS):
    """Items of latents ``z``, what they predict ``y``, and further columns."""
    rng = np.random.default_rng(7)
    return [
        {
            "input_ids": [0] * length, "z": rng.normal(size=(length, CHANNELS)),
            "y": rng.normal(size=(length, CHANNELS)), **columns(rng, number, length),
        }
        for number, length in enumerate(lengths)
    ]  # fmt: skip


def built(kind):
    torch.manual_seed(0)
    return kind().double()


def tensor_of(item, name):
    """A column of an item as a batch of one."""
    return torch.as_tensor(np.asarray(item[name]))[None]


def squares(output, micro_batch):
    return F.mse_loss(output[0], micro_batch.column("y"))


def prepared(model, items, **options):
    as_started_by_torchrun()
    usual = {"loss_columns": ("z", "y"), "objective": "every-token", "steps": 1, "methods": ("ulysses", "ring")}
    return lw.prepare(model, items, **OPTIONS | usual | options)


def planned(run, kind):
    """The run, whose steps are planned of a kind; sequence by sequence or on one rank, of sequences on single ranks."""
    kind = "alone" if run.world.size == 1 or run.wrapped_model.by_sequence is not None else kind
    layers = run.wrapped_model.structure.num_layers
    run.planner = partial(plan_of, kind, layers, run.world.size, run.can_recompute)
    return run


def off_after_a_step(run, model, backward, alone, loss_alone):
    """The largest difference of weights and loss to a loop over whole sequences, after one step.

    ``backward``: of a step and a micro-batch; ``alone``: the model of that loop; ``loss_alone``: the loss of its step.
    """
    step = next(run.steps())
    for micro_batch in step:
        backward(step, micro_batch)
    loss = step.update().loss
    expected = loss_alone(alone)
    expected.backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
                parameter.grad = None
    with run.plain():
        pairs = zip(model.parameters(), alone.parameters())
        return max(abs(loss - float(expected.detach())), *(float((a - b).detach().abs().max()) for a, b in pairs))
