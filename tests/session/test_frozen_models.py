"""Frozen models beside the trained one take what ``inputs=`` makes, exact at any degree, or are refused as they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.errors import CheckError, InputError
from tests.runtime.harness import with_check
from tests.session import models
from tests.session.latents import (
    CHANNELS,
    LENGTHS,
    Latents,
    built,
    items_of,
    off_after_a_step,
    planned,
    prepared,
    squares,
    tensor_of,
)

EXACT = 1e-10


def masks(rng, number, length):
    return {"mask": (torch.arange(length) % 2 == 0).to(torch.uint8).numpy()}


def hidden(micro_batch):
    return {"x": micro_batch.column("z")[None], "mask": micro_batch.column("mask").bool()[None]}


class Seeing(nn.Module):
    """Takes the latents under a name of its own."""

    def __init__(self):
        super().__init__()
        self.of, self.blocks = built(Latents), nn.ModuleList()
        self.blocks, self.of.blocks = self.of.blocks, nn.ModuleList()

    def forward(self, latents):
        h = self.of.first(latents) + self.of.place(latents)
        for block in self.blocks:
            h = block(h)
        return self.of.last(h)


class Wider(nn.Module):
    """Takes two arguments, neither of which is made."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS)]), nn.Linear(CHANNELS, 1)

    def forward(self, latents, noise):
        return self.last(self.blocks[0](latents + noise))


class Mixed(Latents):
    """Adds the mean of all slots, unless some are hidden."""

    def forward(self, x, mask=None):
        x = x + x.mean(1, keepdim=True) if mask is None else x
        return super().forward(x, mask)


CALLS = {
    "all of the inputs": lambda teacher, micro_batch: teacher(**micro_batch.inputs),
    "some by name": lambda teacher, micro_batch: teacher(x=micro_batch.inputs["x"]),
    "some by position": lambda teacher, micro_batch: teacher(micro_batch.column("z")[None]),
}


def frozen(teacher):
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return teacher.requires_grad_(False)


def difference(call, plan, kind=Latents):
    """How far a step of a student beside its teacher is from that of a loop of one's own."""
    model, teacher, items = built(Latents), frozen(built(kind)), items_of(masks)
    alone, beside = copy.deepcopy(model), copy.deepcopy(teacher)
    columns = ("z", "y", "mask")
    run = prepared(model, items, inputs=hidden, loss=squares, loss_columns=columns, frozen=[teacher])

    def backward(step, micro_batch):
        target = CALLS[call](teacher, micro_batch)
        of_slots = (model(**micro_batch.inputs)[0] - target[0]).pow(2).mean(-1)
        step.backward(micro_batch.mean(of_slots, over="tokens"), mean_over="step")

    def loss_alone(alone):
        losses = []
        for item in items:
            x, mask = tensor_of(item, "z"), tensor_of(item, "mask").bool()
            target = beside(x, mask) if call == "all of the inputs" else beside(x)
            losses.append(F.mse_loss(alone(x, mask), target) * len(item["z"]) / sum(LENGTHS))
        return sum(losses)

    with planned(run, plan):
        return off_after_a_step(run, model, backward, alone, loss_alone)


def differences(call, plans):
    return [difference(call, plan) for plan in plans]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("call", CALLS)
def test_a_teacher_takes_what_inputs_makes_or_some_of_it(call):
    assert difference(call, "alone") < EXACT


@pytest.mark.deep
@pytest.mark.parametrize("call", [pytest.param("all of the inputs", marks=pytest.mark.deep), "some by position"])
def test_ranks_share_the_packs_of_a_teacher_of_latents(ranks, call):
    for found in ranks(2).run(with_check, differences, call, ("alone", "ulysses", "ring")):
        assert max(found) < EXACT


def test_a_teacher_may_have_another_name_for_its_only_argument():
    assert difference("some by position", "alone", Seeing) < EXACT


def test_a_call_without_an_argument_that_packs_are_not_exact_without_is_refused():
    assert difference("all of the inputs", "alone", Mixed) < EXACT
    with pytest.raises(InputError, match=r"Mixed, which is frozen, was called without mask=.*inputs\['mask'\]"):
        difference("some by name", "alone", Mixed)


def test_one_that_takes_other_arguments_is_refused_with_the_way_out():
    said = r"Wider, which is frozen, takes latents, noise, and inputs= makes x, mask; give it in a module"
    with pytest.raises(InputError, match=said):
        difference("some by position", "alone", Wider)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Latents, r"fails on a pack of \d+ slots.* dtype.*call it with what its forward takes"),
        (Wider, r"takes latents, noise, and without inputs= of prepare there are tokens alone \(idx\); give it in"),
    ],
)
def test_one_that_takes_no_tokens_is_not_told_to_limit_packs(kind, said):
    run = prepared(models.gpt(), [[1, 2, 3]] * 6, loss_columns=(), objective="next-token")
    with pytest.raises(InputError, match=said) as refused:
        run.frozen(built(kind))
    assert "max_tokens" not in str(refused.value)
    run.close()


class Whole(Latents):
    """Says one thing of all slots that it is given."""

    def forward(self, x, mask=None):
        return super().forward(x, mask).mean(1)


def test_one_that_returns_nothing_for_each_slot_is_refused():
    said = r"Whole returns the shape \(1, 4\) for 18 slots, and nothing for each, .*keep what it says as a column"
    with pytest.raises(CheckError, match=said):
        difference("some by name", "alone", Whole)
