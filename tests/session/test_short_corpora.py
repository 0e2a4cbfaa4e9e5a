"""Models with a row for each position of a short corpus and no more: lengths that are tried are those of the corpus."""

from itertools import pairwise
from math import gcd
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.loop.synthetic_batches import FEWEST, LENGTHS, traced_lengths
from lengthwise.runtime.verify.compute_settings import short_lengths
from lengthwise.runtime.verify.stage_check import check_stages, cuts_of
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through

OPTIONS = {
    "lr": 0.1, "optimizer": torch.optim.SGD, "clip_norm": 0.0, "steps": 1, "sequences_per_step": 6, "memory_gib": 40,
    "cost": SimpleCost(capacity=1000), "packing": "always", "verbose": False,
}  # fmt: skip
EXACT = 1e-11


def model_of(num_positions):
    torch.manual_seed(0)
    return models.GPT(max_length=num_positions).double()


def rows_up_to(longest):
    lengths = [longest, 2, longest - 1, longest, max(2, longest - 3), 2]
    return [np.random.default_rng(number).integers(0, models.VOCAB, length) for number, length in enumerate(lengths)]


def after_a_step(longest):
    """The weights after one step of a run."""
    as_started_by_torchrun()
    model, rows = model_of(longest), rows_up_to(longest)
    run = lw.prepare(model, rows, **OPTIONS)
    step_through(run)
    run.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def after_a_step_alone(longest):
    model, rows = model_of(longest), rows_up_to(longest)
    num_targets = sum(len(row) - 1 for row in rows)
    for row in rows:
        tokens = torch.as_tensor(row)[None]
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        (loss * (len(row) - 1) / num_targets).backward()
    torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"]).step()
    return dict(model.named_parameters())


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("num_ranks", "longest"), [(1, 3), (1, 8), pytest.param(2, 6, marks=pytest.mark.deep)])
def test_a_model_without_further_positions_is_trained_in_packs(ranks, num_ranks, longest):
    expected = after_a_step_alone(longest)
    for weights in [after_a_step(longest)] if num_ranks == 1 else ranks(num_ranks).run(after_a_step, longest):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=EXACT, atol=EXACT)


def test_its_stages_slices_teachers_and_shared_prefixes_are_checked_at_these_lengths():
    run = lw.prepare(model_of(6), rows_up_to(6), frozen=model_of(6).requires_grad_(False), **OPTIONS)
    check_stages(run, [1, 2], slices=True)
    run.close()
    answers = [{"input_ids": [1, 2, last, 4, 5, 6], "labels": [-100, -100, last, 4, 5, 6]} for last in (7, 8)]
    lw.prepare(model_of(6), [tuple(answers)] * 6, share_prefixes=True, **OPTIONS).close()


class LookingUp(models.Block):
    """The first layer leaves its input, which the last one looks up, as layers that share keys do."""

    def forward(self, x, number, shared):
        if number == 0:
            shared["keys"] = x
        return super().forward(x + 0.1 * shared["keys"] if number == 2 else x)


class SharedKeys(models.GPT):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(LookingUp(24, 4) for _ in range(3))

    def forward(self, idx, targets=None):
        x, shared = self.tokens(idx) + self.places(torch.arange(idx.shape[1])), {}
        for number, block in enumerate(self.blocks):
            x = block(x, number, shared)
        logits = self.head(self.norm(x))
        return logits, torch.nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-100)


def test_what_later_stages_look_up_is_said_to_pass_between_layers():
    run = lw.prepare(SharedKeys().double(), rows_up_to(20), **{**OPTIONS, "recompute": "none"})
    reason = (
        r"in stages of \[1, 1, 1\] layers \(KeyError: 'keys'\), .* more than hidden states passes between its layers"
    )
    with pytest.raises(CheckError, match=reason):
        check_stages(run, [1, 1, 1])
    run.close()


def test_positions_that_the_corpus_needs_and_a_model_lacks_are_counted():
    with pytest.raises(
        InputError, match=r"sequences of 8 and 5 slots .* each slot of the longest sequence, 8; or set max_le"
    ):
        lw.prepare(model_of(7), rows_up_to(8), **OPTIONS)


@pytest.mark.parametrize("longest", [None, *range(1, 30)])
@pytest.mark.parametrize("max_degree", [1, 2, 8, 16, 64, 1000])
def test_short_packs_are_ragged_and_have_slots_for_every_rank(longest, max_degree):
    collator = SimpleNamespace(longest=longest, compared_lengths=())
    first, second = traced_lengths(collator)
    assert gcd(first, second) == 1 and 2 <= second < first
    assert (first, second) == LENGTHS or longest <= LENGTHS[0]
    lengths = short_lengths(collator, max_degree)
    assert lengths[1:3] == (first, second) and sum(lengths) >= max_degree
    assert longest is None or max(lengths) <= max(longest, FEWEST)


@pytest.mark.parametrize("first", range(FEWEST, LENGTHS[0] + 1))
def test_slices_of_the_compared_pack_follow_one_another_and_none_is_empty(first):
    lengths = traced_lengths(SimpleNamespace(longest=first, compared_lengths=()))
    cuts = cuts_of(*lengths)
    assert cuts[0].start == 0 and cuts[-1] == range(sum(lengths) - 1, sum(lengths)) and all(map(len, cuts))
    assert all(before.stop == after.start for before, after in pairwise(cuts))
    assert any(cut.start < first < cut.stop for cut in cuts) and any(len(cut) == 1 for cut in cuts[:-1])
