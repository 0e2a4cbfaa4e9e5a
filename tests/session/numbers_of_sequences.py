"""A model of one number or class for each sequence, whose forward returns its loss, and a plain loop over it."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import LengthwiseError
from tests.session.loops import as_started_by_torchrun
from tests.session.models import VOCAB, Block
from tests.session.structure_runs import LENGTHS, LR, OPTIONS, rows

PENALTY = 0.01


class Pooled(nn.Module):
    """Predicts a number, or a class, from the mean of all tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))

    def forward(self, idx, labels):
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        outputs = self.head(x.mean(1))
        return F.mse_loss(outputs[:, 0], labels) if labels.is_floating_point() else F.cross_entropy(outputs, labels)


def items(kind):
    draws = np.random.default_rng(5)
    values = draws.normal(size=len(LENGTHS)) if kind == "number" else draws.integers(0, 3, len(LENGTHS))
    return [{"input_ids": row, "value": value} for row, value in zip(rows(), values)]


def inputs(micro_batch):
    return {"idx": micro_batch.tokens[None], "labels": micro_batch.column_by_sequence("value")}


def model(kind=Pooled):
    torch.manual_seed(0)
    return kind().double()


def penalty(of):
    return PENALTY * of.head.weight.square().sum()


WEIGHTS = {
    ("number", None): lambda length: length - 1.0,
    ("number", "targets"): lambda length: length - 1.0,
    ("number", "tokens"): float,
    ("class", "tokens"): float,
}
"""Of a sequence's loss by its length; the same of every sequence, if there is none."""
LOSSES = {
    "as it is": lambda loss, of: loss,
    "half, with a penalty": lambda loss, of: 0.5 * loss + penalty(of),
    "half in place": lambda loss, of: loss.mul_(0.5),
}


def loop_alone(kind, mean_over, made):
    alone, given = model(), items(kind)
    weigh = WEIGHTS.get((kind, mean_over), lambda length: 1.0)
    total, mean = sum(map(weigh, LENGTHS)), 0.0
    for item in given:
        value = torch.as_tensor(np.asarray(item["value"]))[None]
        mean = mean + alone(torch.as_tensor(item["input_ids"])[None], value) * (weigh(len(item["input_ids"])) / total)
    loss = LOSSES[made](mean * 1.0, alone)
    loss.backward()
    return float(loss.detach()), [(p - LR * p.grad).detach() for p in alone.parameters()]


def trained(cases):
    """Of each kind of value, mean and loss: the largest difference to :func:`loop_alone`, or what refused it."""
    as_started_by_torchrun()
    outcomes = {}
    for kind, mean_over, made in cases:
        pooled = model()
        run = lw.prepare(
            pooled, items(kind), inputs=inputs, loss_columns=("value",), steps=1, packing="never", count_targets=True,
            **OPTIONS,
        )  # fmt: skip
        options = {} if mean_over is None else {"mean_over": mean_over}
        try:
            step = next(run.steps())
            for micro_batch in step:
                step.backward(LOSSES[made](pooled(**micro_batch.inputs), pooled), **options)
            loss = step.update().loss
        except LengthwiseError as error:
            outcomes[kind, mean_over, made] = f"{type(error).__name__}: {error}"
            run.close()
            continue
        expected, weights = loop_alone(kind, mean_over, made)
        with run.plain():
            off = [float((a - b.detach()).abs().max()) for a, b in zip(weights, pooled.parameters())]
        outcomes[kind, mean_over, made] = max(*off, abs(loss - expected))
        run.close()
    return outcomes
