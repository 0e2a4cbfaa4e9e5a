"""Parameters that no sequence of a step uses stay as they are, as in a loop of torch, whatever plans and optimizers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import LENGTHS, OPTIONS, plan_of
from tests.session.test_own_optimizers import NormedMatrices
from tests.session.test_prepare import EXACT, assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")

CLASS = 16
"""How many ids of tokens go to the same expert."""
STEPS = ((0, 1), (0,), (2,), (0, 2), (1, 2))
"""Experts that tokens of each step go to; the last one is never used."""
NAMES = [f"blocks.{layer}.experts.{expert}.weight" for layer in range(3) for expert in range(4)]
OPTIMIZERS = {
    "adamw": ("adamw", partial(torch.optim.AdamW, betas=(0.9, 0.95))),
    "sgd": ("sgd", partial(torch.optim.SGD, momentum=0.9)),
    "nadam": (partial(torch.optim.NAdam, eps=1e-4), partial(torch.optim.NAdam, eps=1e-4)),
}
"""What prepare takes, and what a loop of one's own has."""
OTHERS = [("adamw", "by-layer"), ("sgd", "whole"), ("nadam", "whole"), ("nadam", "by-layer")]


class RoutedBlock(models.Block):
    """Sends every token to the expert of its kind, as a mixture of experts in a list does."""

    def __init__(self, width):
        super().__init__(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, kinds):
        x = super().forward(x)
        for number, expert in enumerate(self.experts):
            chosen = kinds == number
            if chosen.any():
                x = x.index_put((chosen,), x[chosen] + expert(x[chosen]))
        return x


class Routed(models.GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock(24) for _ in self.blocks)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x, idx // CLASS)
        logits = self.head(self.norm(x))
        loss = None if targets is None else models.F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def groups_of(model):
    """As prepare has them: matrices decay, vectors do not."""
    matrices, vectors = ([x for x in model.parameters() if (x.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def rows():
    rng = np.random.default_rng(0)
    return [
        CLASS * rng.choice(experts, length) + rng.integers(0, CLASS // 2, length)
        for experts in STEPS
        for length in LENGTHS
    ]


def train_alone(make):
    model, number = build(Routed), len(LENGTHS)
    optimizer, losses, used = make(groups_of(model), lr=1e-2), [], []
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        batch = rows()[step * number : (step + 1) * number]
        loss = sum(models.sum_of_losses(model, row) for row in batch) / sum(len(row) - 1 for row in batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        used.append({name for name in NAMES if model.get_parameter(name).grad is not None})
    return losses, used, weights_of(model)


def train(folder, *, steps, optimizer, kinds, weights="whole"):
    """Losses of the steps that are left up to ``steps``, planned in turn as ``kinds`` say, and the weights then."""
    as_started_by_torchrun()
    model = build(Routed)
    options = OPTIONS | {"optimizer": optimizer, "lr": 1e-2, "weight_decay": 0.1, "weights": weights}
    run = lw.prepare(model, rows(), steps=steps, **options)
    if folder.exists():
        run.resume(folder)
    losses = []
    for step_number in range(run.next_step, steps):
        kind = kinds[step_number % len(kinds)]
        run.planner = partial(plan_of, kind, 3, run.world.size, run.can_recompute)
        step = next(run.steps())
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
    run.save(folder)
    run.close()
    return losses, weights_of(model)


CASES = [("adamw", "whole"), *(pytest.param(*case, marks=pytest.mark.deep) for case in OTHERS)]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_experts_that_no_token_reaches_stay_as_they_are_on_any_ranks_and_through_checkpoints(
    ranks, tmp_path, name, weights
):
    given, made = OPTIMIZERS[name]
    losses, used, expected = train_alone(made)
    assert len(set.intersection(*used)) < len(set.union(*used)) < len(NAMES), "some in some steps, some in none"
    run = partial(train, tmp_path / "steps", optimizer=given, weights=weights)
    first = ranks(3).run(partial(run, steps=3, kinds=("alone", "ulysses", "stages")))[0]
    state = json.loads((tmp_path / "steps/step_00000003/state.json").read_text())
    assert state["unused_parameters"] == {name: sum(name not in seen for seen in used[:3]) for name in NAMES}
    second = ranks(2).run(partial(run, steps=4, kinds=("ring",)))[0]
    third = ranks(1).run(partial(run, steps=5, kinds=("alone",)))[0]
    np.testing.assert_allclose(first[0] + second[0] + third[0], losses, rtol=EXACT)
    assert_equal_weights(third[1], expected)


class Heads(models.GPT):
    """Two heads in turn, of which a loop uses one, and a third that nobody uses."""

    def __init__(self):
        super().__init__()
        self.other, self.value = nn.Linear(24, models.VOCAB), nn.Linear(24, 1)

    def forward(self, idx):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x), self.other(x), self.value(x)


IGNORED = (1, 3)
"""Of the sequences of a step, those whose labels leave out all tokens."""


def labels_of(number, row):
    return np.full(len(row), -100) if number % len(LENGTHS) in IGNORED else row


def losses_t(output, targets, step):
    return models.F.cross_entropy(output[step % 2][0], targets, ignore_index=-100, reduction="none")


def train_heads_alone():
    model = build(Heads)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, betas=(0.9, 0.95))
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        total, count = 0, 0
        for number in range(step * len(LENGTHS), (step + 1) * len(LENGTHS)):
            row = rows()[number]
            targets = torch.as_tensor([*labels_of(number, row)[1:], -100])
            total = total + losses_t(model(torch.as_tensor(row)[None]), targets, step).sum()
            count += int((targets != -100).sum())
        (total / count).backward()
        optimizer.step()
    return weights_of(model)


def train_heads(kinds, mean_over):
    as_started_by_torchrun()
    model = build(Heads)
    items = [{"input_ids": row, "labels": labels_of(number, row)} for number, row in enumerate(rows())]
    run = lw.prepare(
        model, items, steps=len(STEPS), inputs=lambda micro_batch: {"idx": micro_batch.tokens[None]},
        loss=lambda output, micro_batch: models.F.cross_entropy(output[0][0], micro_batch.targets, ignore_index=-100),
        **OPTIONS | {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    )  # fmt: skip
    for number in range(len(STEPS)):
        run.planner = partial(plan_of, kinds[number % len(kinds)], 3, run.world.size, run.can_recompute)
        step = next(run.steps())
        for micro_batch in step:
            losses = losses_t(model(**micro_batch.inputs), micro_batch.targets, number)
            if mean_over == "step":
                step.backward(micro_batch.mean(losses, over="targets"), mean_over="step")
            else:
                step.backward(losses.sum() / max(1, micro_batch.num_targets), mean_over="targets")
        step.update()
    run.close()
    return weights_of(model)


@pytest.mark.parametrize("mean_over", ["step", pytest.param("targets", marks=pytest.mark.deep)])
def test_outputs_that_no_loss_uses_are_no_use_of_their_parameters(ranks, mean_over):
    """Backwards that run for other ranks' exchanges begin with zeros at all outputs."""
    expected = train_heads_alone()
    for weights in ranks(2).run(train_heads, ("alone", "ulysses", "stages"), mean_over):
        assert_equal_weights(weights, expected)


def test_an_optimizer_that_needs_all_gradients_is_told_which_one_is_none(tmp_path):
    with pytest.raises(
        InputError, match=r"optimizer=NormedMatrices fails .* does not use 6 parameters, such as blocks.0.experts"
    ):
        train(tmp_path / "steps", steps=1, optimizer=NormedMatrices, kinds=("alone",))
