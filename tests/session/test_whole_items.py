"""Models that need an item whole, its columns and what is looked up by its number, are compared on whole items."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.synthetic_batches import synthetic, varied
from tests.runtime.harness import with_check
from tests.session.latents import (
    CHANNELS,
    LENGTHS,
    WIDTH,
    Attended,
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
POOLED = 3
BINS = [torch.tensor(np.random.default_rng(n).normal(size=(length // POOLED, 2))) for n, length in enumerate(LENGTHS)]
"""Kept beside the items, by their number."""


class Gridded(Latents):
    """Places rows and columns of a grid, whose product is the number of slots."""

    def place(self, x):
        rows, columns = self.sizes
        return (self.places.weight[:rows, None] + self.places.weight[None, 32 : 32 + columns]).flatten(0, 1)

    def forward(self, x, sizes):
        self.sizes = sizes.tolist()
        return super().forward(x)


class Pooled(nn.Module):
    """Predicts a vector for each three slots; with its targets the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(CHANNELS, WIDTH, POOLED, POOLED), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Attended() for _ in range(2))

    def forward(self, x, bins=None):
        h = self.first(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.last(h) if bins is None else F.mse_loss(self.last(h), bins)


class Encoded(Latents):
    """Its layers see the slots alone that are not hidden, of which the last is one."""

    def forward(self, x, mask):
        seen = torch.nonzero(~mask[0])[:, 0]
        h = (self.first(x) + self.place(x))[:, seen]
        h = h + h[:, -1][:, None]
        for block in self.blocks:
            h = block(h)
        return self.last(self.hidden.weight[None].expand(1, x.shape[1], -1).index_copy(1, seen, h) + self.place(x))


def grid_of(rng, number, length):
    rows = 3 if length % 9 == 0 else 1
    return {"at": np.stack(np.divmod(np.arange(length), length // rows), -1)}


def mask_of(rng, number, length):
    return {"mask": (np.arange(length) < length - 1).astype(np.uint8)}


def sizes_of(at):
    return at.max(0).values + 1


CASES = {
    "coordinates": (
        Gridded, grid_of, ("at",), squares,
        lambda m: {"x": m.column("z")[None], "sizes": sizes_of(m.column("at"))},
        lambda model, item, number: F.mse_loss(
            model(tensor_of(item, "z"), sizes_of(tensor_of(item, "at")[0])), tensor_of(item, "y")
        ),
    ),
    "looked up": (
        Pooled, lambda rng, number, length: {}, (), None,
        lambda m: {"x": m.column("z")[None], "bins": torch.cat([BINS[n] for n in m.sequence_ids])[None]},
        lambda model, item, number: model(tensor_of(item, "z"), BINS[number][None]),
    ),
    "hidden slots": (
        Encoded, mask_of, ("mask",), squares,
        lambda m: {"x": m.column("z")[None], "mask": m.column("mask").bool()[None]},
        lambda model, item, number: F.mse_loss(
            model(tensor_of(item, "z"), tensor_of(item, "mask").bool()), tensor_of(item, "y")
        ),
    ),
}  # fmt: skip


def as_prepared(model, case, **options):
    _, columns, names, loss, inputs, _ = CASES[case]
    return prepared(model, items_of(columns), inputs=inputs, loss=loss, loss_columns=("z", "y", *names), **options)


def difference(case, **options):
    kind, columns, _, loss, _, of_item = CASES[case]
    model, items = built(kind), items_of(columns)
    alone = copy.deepcopy(model)

    def backward(step, micro_batch):
        output = model(**micro_batch.inputs)
        step.backward(output if loss is None else loss(output, micro_batch))

    def loss_alone(alone):
        shares = [len(item["z"]) / sum(LENGTHS) for item in items]
        return sum(of_item(alone, item, number) * share for number, (item, share) in enumerate(zip(items, shares)))

    with as_prepared(model, case, **options) as run:
        assert run.collator.compared_lengths == (18, 3, 12)
        return off_after_a_step(planned(run, "alone"), model, backward, alone, loss_alone)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("case", CASES)
def test_models_that_need_an_item_whole_are_trained_sequence_by_sequence(caplog, case):
    assert difference(case) < EXACT
    assert "is computed sequence by sequence" in caplog.text and "; change that line" not in caplog.text


def test_their_passes_are_measured_on_whole_items_as_well(tmp_path):
    assert difference("coordinates", cost=None, profile=tmp_path / "profile.json", memory_gib=40) < EXACT


def test_ranks_train_them_alike(ranks):
    for found in ranks(2).run(with_check, difference, "looked up"):
        assert found < EXACT


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("made_up", [synthetic, varied])
def test_sequences_that_are_compared_are_items_of_their_lengths_each_another_one(made_up):
    lengths = (18, 3, 12, 9, 9)
    with as_prepared(built(Gridded), "coordinates") as run, made_up(run, lengths):
        assert run.collator.items(range(5)) == [LENGTHS.index(length) for length in (*lengths[:4], 9)]
        for number, length in enumerate(lengths):
            item = items_of(grid_of)[LENGTHS.index(length)]
            np.testing.assert_array_equal(run.collator.loss_columns["at"](number), item["at"])
            assert len(run.collator.source.tokens(number)) == length


def test_outputs_of_other_shapes_with_a_loss_beside_the_forward_are_refused_with_what_works():
    said = (
        r"output of Pooled has for a sequence of 18 slots the shape \(1, 6, 2\) and for one of 3 slots the shape "
        r"\(1, 1, 2\), without an axis of slots.*return the mean loss over them, without loss="
    )
    with pytest.raises(InputError, match=said):
        prepared(
            built(Pooled), items_of(), inputs=lambda m: {"x": m.column("z")[None]},
            loss=lambda output, m: F.mse_loss(output, m.column("y")[None, ::POOLED, :2]),
        )  # fmt: skip


def test_a_teacher_beside_one_is_computed_sequence_by_sequence_as_well():
    _, columns, _, _, _, _ = CASES["coordinates"]
    model, teacher, items = built(Gridded), built(Gridded).requires_grad_(False), items_of(columns)
    with torch.no_grad():
        teacher.last.weight.mul_(0.5)
    alone, beside = copy.deepcopy(model), copy.deepcopy(teacher)

    def backward(step, micro_batch):
        output, target = (each(**micro_batch.inputs)[0] for each in (model, teacher))
        step.backward(micro_batch.mean((output - target).pow(2).mean(-1), over="tokens"), mean_over="step")

    def loss_alone(alone):
        losses = []
        for item in items:
            inputs = tensor_of(item, "z"), sizes_of(tensor_of(item, "at")[0])
            losses.append(F.mse_loss(alone(*inputs), beside(*inputs)) * len(item["z"]) / sum(LENGTHS))
        return sum(losses)

    with as_prepared(model, "coordinates", frozen=[teacher]) as run:
        assert off_after_a_step(planned(run, "alone"), model, backward, alone, loss_alone) < EXACT
