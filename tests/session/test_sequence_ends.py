"""Packs are compared in which sequences meet as those of the corpus do: a forward may read two neighbours."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.session.sequence_ends import SequenceEnds
from tests.session.models import VOCAB
from tests.session.structure_runs import OPTIONS
from tests.session.structures import Plain

NEWLINE = 10
FLAGS = {
    "equal": lambda before, now: now == before,
    "empty line": lambda before, now: (before == NEWLINE) & (now == NEWLINE),
}
RAN = {**OPTIONS, "sequences_per_step": 6, "packing": "always"}


class Flagged(Plain):
    """Doubles the embedding of a token by what it and the one before it are."""

    flag = "equal"

    def embed(self, idx):
        flags = F.pad(FLAGS[self.flag](idx[:, :-1], idx[:, 1:]), (1, 0))
        return super().embed(idx) * (1.0 + flags)[..., None]


def flagged(flag="equal"):
    torch.manual_seed(0)
    model = Flagged().double()
    model.flag = flag
    return model


def lines(first=NEWLINE, last=NEWLINE):
    numbers, rows = np.random.default_rng(0), []
    for length in (13, 5, 21, 4, 8, 17):
        row = numbers.integers(NEWLINE + 1, VOCAB, length)
        row[0], row[-1] = first, last
        rows.append(row)
    return rows


@pytest.mark.parametrize("flag", FLAGS)
def test_what_two_neighbours_are_together_is_noticed_where_sequences_meet_so(flag):
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(flagged(flag), lines(), **RAN, steps=1)


def test_packs_stay_where_no_sequence_meets_another_so():
    with lw.prepare(flagged(), lines(first=2, last=3), **RAN, steps=1) as run:
        assert run.wrapped_model.by_sequence is None


def test_sequences_that_are_cut_may_meet_anywhere():
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(flagged(), lines(first=2, last=3), **RAN, steps=1, max_length=6, over_length="split")


def test_items_of_a_loop_that_meet_as_no_example_does_are_compared_before_they_are_trained():
    with lw.prepare(flagged(), lines(first=2, last=3), **RAN, steps=2) as run:
        message = r"begin with a token that others end with, as no example does \(2, 3; .*learns something else"
        with pytest.raises(CheckError, match=message):
            run.step(lines(first=3, last=2)[:1] + lines(first=2, last=3)[1:])


class Jumping(Plain):
    """Doubles the embedding where a number is much less than the one before it."""

    def forward(self, idx, targets=None, numbers=None):
        flags = F.pad(numbers[:, 1:] < numbers[:, :-1] - 6.0, (1, 0))
        logits = self.head(self.run(self.embed(idx) * (1.0 + flags)[..., None], idx))
        return logits, F.cross_entropy(logits[0], targets[0], ignore_index=-100)


def test_numbers_that_jump_where_sequences_meet_are_noticed():
    items = []
    for number, row in enumerate(lines(first=2, last=3)):
        numbers = np.random.default_rng(len(row)).normal(size=len(row))
        numbers[0], numbers[-1] = (-4.0, 1.0) if number == 2 else (-1.0, 4.0 if number == 4 else 1.0)
        items.append({"input_ids": row, "numbers": numbers})

    def inputs(micro_batch):
        numbers = micro_batch.column("numbers")[None].double()
        return {"idx": micro_batch.tokens[None], "targets": micro_batch.targets[None], "numbers": numbers}

    torch.manual_seed(0)
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(Jumping().double(), items, **RAN, steps=1, loss_columns=("numbers",), inputs=inputs)


def test_sequences_begin_and_end_as_those_that_were_added():
    ends = SequenceEnds()
    assert ends.borders(9, are_all=True) == ()
    ends.add({"tokens": np.array([1, 2, 3, 4, 5, 6, 1])}, (0, 3, 7))
    borders = [border["tokens"].tolist() for border in ends.borders(5, are_all=True)]
    met = {(before[-1], after[0]) for before, after in pairwise(borders)}
    assert met == {(1, 1), (3, 1), (3, 4), (1, 4)} and ends.meeting == {1}
    assert {tuple(border[:2]) for border in borders} <= {(1, 2), (4, 5)} and {*map(len, borders)} == {4}
    assert ends.borders(1, are_all=True) == ()
