"""What ranks run to see by which numbers a loop is told of items: texts of their own are looked up by them."""

from math import ceil

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from tests.session.loops import as_started_by_torchrun
from tests.session.models import VOCAB
from tests.session.structure_runs import LENGTHS, LR, OPTIONS, rows
from tests.session.structures import Plain

WIDTH, HEADS = 16, 2
TEXTS = [torch.tensor(np.random.default_rng(n).normal(size=(1 + 5 * n % 7, WIDTH))) for n in range(len(LENGTHS))]


class JointBlock(nn.Module):
    """Tokens and text have their own weights and attend to one another, as in MM-DiT."""

    def __init__(self):
        super().__init__()
        self.of_tokens, self.of_text, self.mlp = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 3, 1))

    def forward(self, x, text):
        joint = torch.cat([self.of_text(text), self.of_tokens(x)], 1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in joint.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.gelu(self.mlp(y[:, text.shape[1] :])), text + y[:, : text.shape[1]]


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(JointBlock() for _ in range(2))

    def forward(self, idx, text, scale=1.0):
        x = scale * self.tokens(idx)
        for block in self.blocks:
            x, text = block(x, text)
        return self.head(x)


def inputs(micro_batch):
    text = torch.cat([TEXTS[sequence] for sequence in micro_batch.sequence_ids])
    return {"idx": micro_batch.tokens[None], "text": text[None], "scale": 0.5}


def loss_of(output, micro_batch):
    return F.cross_entropy(output[0], micro_batch.targets)


def model():
    torch.manual_seed(0)
    return Joint().double()


LONGEST = sorted(LENGTHS)[len(LENGTHS) // 2]
"""Items that are longer are left out, or cut."""


def pieces(over_length):
    """The item and tokens of each sequence."""
    for item, row in enumerate(rows()):
        if len(row) <= LONGEST:
            yield item, row
        elif over_length == "truncate":
            yield item, row[:LONGEST]
        elif over_length == "split":
            yield from ((item, piece) for piece in np.array_split(row, ceil(len(row) / LONGEST)))


def loop_alone(over_length):
    """Weights after a step of a plain loop over those sequences."""
    alone, given = model(), list(pieces(over_length))
    count = sum(len(row) - 1 for _, row in given)
    for item, row in given:
        tokens = torch.as_tensor(row)
        output = alone(tokens[None], TEXTS[item][None], 0.5)[0]
        (F.cross_entropy(output[:-1], tokens[1:], reduction="sum") / count).backward()
    return [(p - LR * p.grad).detach() for p in alone.parameters()]


def texts_of_items(over_length):
    """The largest difference to :func:`loop_alone` of a model whose texts are looked up by ``sequence_ids``."""
    as_started_by_torchrun()
    joint = model()
    run = lw.prepare(
        joint, rows(), steps=1, inputs=inputs, loss=loss_of, max_length=LONGEST, over_length=over_length,
        **OPTIONS | {"sequences_per_step": len(list(pieces(over_length)))},
    )  # fmt: skip
    for step in run.steps():
        for micro_batch in step:
            step.backward(loss_of(joint(**micro_batch.inputs), micro_batch))
        step.update()
    with run.plain():
        off = max(float((a - b.detach()).abs().max()) for a, b in zip(loop_alone(over_length), joint.parameters()))
    run.close()
    return off


def numbers_of_units():
    """Items and tokens of the sequences of a corpus of pairs, of which the longest is dropped."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    pairs = [({"input_ids": row}, {"input_ids": row[::-1].copy()}) for row in rows()]
    run = lw.prepare(
        Plain().double(), pairs, steps=1, max_length=2 * max(LENGTHS) - 1, over_length="drop",
        **OPTIONS | {"sequences_per_step": len(LENGTHS) - 1},
    )  # fmt: skip
    return seen_in(next(run.steps()), run)


def numbers_of_brought(counts):
    """The same of a step of items that ranks bring, ``counts[rank]`` each."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    run = lw.prepare(Plain().double(), rows(), steps=1, **OPTIONS)
    first = sum(counts[: run.world.rank])
    return seen_in(run.step(rows()[first : first + counts[run.world.rank]]), run)


def seen_in(step, run):
    seen = []
    for micro_batch in step:
        own = {item: slots for item, slots, _ in micro_batch.own_slots()}
        assert list(own) == list(dict.fromkeys(micro_batch.sequence_ids))
        seen += [(item, tuple(row.tolist())) for item, row in zip(micro_batch.sequence_ids, micro_batch.sequences)]
        step.backward(run.model(**micro_batch.inputs)[1])
    step.update()
    run.close()
    return seen
