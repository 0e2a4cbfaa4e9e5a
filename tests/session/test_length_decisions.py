"""Forwards that branch on a length that packs have, or that few sequences have, are as exact as others."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.verify.decision_packs import _PacksOfDegree
from tests.session.models import VOCAB
from tests.session.structure_runs import OPTIONS
from tests.session.structures import Plain

LENGTHS = (41, 49, 5, 36, 30, 32, 39, 20, 7, 19, 25, 35, 26, 11, 6, 4, 12, 59, 14, 40, 46, 17)
"""Of a corpus: multiples of much among them."""


class Branching(Plain):
    """Adds the mean of all slots to each, where it decides so."""

    decide = staticmethod(lambda num_slots: False)

    def run(self, x, idx):
        x = super().run(x, idx)
        return x + x.mean(1, keepdim=True) if self.decide(x.shape[1]) else x


DECISIONS = {
    "multiples": lambda n: n % 14 == 0,
    "exactly": lambda n: n == 36,
    "within": lambda n: n > 8 and n % 9 == 4 and n % 5 == 1,
    "not seen": lambda n: {35: True}.get(n, False),
}


def rows(lengths=LENGTHS):
    return [np.random.default_rng(number).integers(0, VOCAB, length) for number, length in enumerate(lengths)]


def branching(decide, kind=Branching):
    torch.manual_seed(0)
    model = kind().double()
    model.decide = decide
    return model


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", DECISIONS)
def test_packs_are_refused_where_tokens_meet_at_some_lengths_alone(name):
    with pytest.raises(CheckError, match=r"learns something else from packs .* slots in one pack"):
        lw.prepare(branching(DECISIONS[name]), rows(), **OPTIONS, packing="always")


def test_decisions_of_one_token_are_compared_where_items_have_one():
    items = [{"input_ids": row, "labels": row} for row in rows((1, 5, 1, 9, 12, 3))]
    with pytest.raises(CheckError, match="sequences of 1, "):
        lw.prepare(branching(lambda n: n == 1), items, **OPTIONS, packing="always", objective="every-token")


def test_decisions_of_a_loss_of_the_users_are_compared():
    def loss(output, micro_batch):
        logits = output[0][0]
        if logits.shape[0] % 13 == 0:
            logits = logits + logits.mean(0)
        return F.cross_entropy(logits, micro_batch.targets.flatten())

    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(branching(lambda n: False), rows(), **OPTIONS, packing="always", loss=loss)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("decide", [lambda n: 300 < n < 400, lambda n: int(n**0.5) == 12])
def test_packs_are_as_large_as_the_longest_sequence_where_larger_ones_decide_otherwise(decide, caplog):
    run = lw.prepare(branching(decide), rows([50, 31] * 8), **OPTIONS, packing="always")
    assert run.wrapped_model.most_slots == 50 and "packs have at most 50 tokens" in caplog.text
    run.close()


class Alike(Branching):
    """Decides, and computes the same in another way."""

    def run(self, x, idx):
        x = Plain.run(self, x, idx)
        num_slots = x.shape[1]
        return x.unflatten(1, (-1, 14)).flatten(1, 2) if num_slots % 14 == 0 else x + max(0, 1 - num_slots)


def test_a_model_that_decides_and_computes_the_same_keeps_its_packs():
    run = lw.prepare(branching(None, Alike), rows(), **OPTIONS, packing="always")
    assert run.wrapped_model.most_slots is None
    run.close()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_way_of_a_rank_meets_every_way_of_a_sequence_in_some_pack(degree):
    numbers = np.arange(301)
    ways, lengths = (numbers % 13 == 0) + 2 * (numbers > 100) + 4 * (numbers == 36), np.array([5, 7, 26, 36, 59])
    packs = _PacksOfDegree(ways, lengths, degree=degree, largest=300, longest=59)
    chosen = packs.missing([(2, 11, 7)])
    met = {pair for pack in [(2, 11, 7), *chosen] for pair in packs._met_in(pack)}
    reachable = {int(way) for way in ways[2 : 300 // degree + 1]}
    missing = {(way, other) for way in reachable for other in (0, 1, 4)} - met
    assert all(len(pack) > 1 and sum(pack) <= 300 and max(pack) <= 59 for pack in chosen)
    assert missing == ({(4, 4)} if degree == 1 else set())  # such a sequence is its pack
    assert packs.missing([(2, 11, 7), *chosen]) == []


def test_decisions_are_looked_for_again_where_a_loop_compares():
    model = branching(lambda n: False)
    run = lw.prepare(model, rows(), **OPTIONS, packing="always")
    run.compare()
    model.decide = DECISIONS["multiples"]
    with pytest.raises(CheckError, match="learns something else from packs"):
        run.compare()
    run.close()


class Scaling(Branching):
    """Doubles what it returns, where it decides so."""

    def run(self, x, idx):
        x = Plain.run(self, x, idx)
        return 2 * x if self.decide(x.shape[1]) else x


EXAMPLES = [np.arange(first, first + 12) % VOCAB for first in range(0, VOCAB, 12)]
"""All tokens, in sequences of one length."""
BROUGHT = {
    "packs": (
        Branching,
        lambda n: n > 130,
        (12,) * 20,
        r"make packs of 240 tokens, and all examples together had \d+ ",
    ),
    "lengths": (
        Scaling,
        lambda n: n == 3,
        (12, 3, 12),
        r"lengths at which the forward decides otherwise .*example \(3;",
    ),
}


@pytest.mark.parametrize("case", BROUGHT)
def test_sizes_that_only_a_loop_brings_are_compared_before_they_are_trained(case):
    kind, decide, lengths, reason = BROUGHT[case]
    options = OPTIONS | {"policy": "packed", "steps": 2, "packing": "always"}
    message = rf"step 0: since prepare, sequences .*{reason}.* learns something else"
    with lw.prepare(branching(decide, kind), EXAMPLES, **options) as run, pytest.raises(CheckError, match=message):
        next(iter(run.step(rows(lengths))))


def test_sizes_that_change_nothing_are_compared_once():
    options = OPTIONS | {"policy": "packed", "steps": 4, "packing": "always"}
    with lw.prepare(branching(lambda n: n > 130, Plain), EXAMPLES, **options) as run:
        again, run.check_again = run.check_again, lambda: called.append(True) or again()
        called = []
        for lengths in ((12,) * 20, (12,) * 30, (5, 12)):
            step = run.step([np.array([0, *row[1:-1], 11]) for row in rows(lengths)])  # which meet as examples do
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1])
            step.update()
        assert len(called) == 1
