"""Packs are compared again where items that a loop brings have what the examples of ``prepare`` had not."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InfeasibleError
from lengthwise.session import stock_comparison
from tests.session import models
from tests.session.structure_runs import OPTIONS
from tests.session.structures import Plain

SEPARATOR, ODD = 5, 50
EXAMPLES = [np.random.default_rng(number).integers(10, 40, length) for number, length in enumerate((13, 5, 21, 8, 17))]
BROUGHT = {**OPTIONS, "sequences_per_step": 5, "steps": 16, "step_max_length": 32}


class Segments(Plain):
    """Counts the separators before a token."""

    def embed(self, idx):
        return super().embed(idx) * (1.0 + (idx == SEPARATOR).cumsum(1))[..., None]


def with_token(token):
    rows = [row.copy() for row in EXAMPLES]
    rows[2][4] = token
    return [{"input_ids": row} for row in rows]


def run_of(kind, items=EXAMPLES, **options):
    torch.manual_seed(0)
    model = kind().double()
    return model, lw.prepare(model, items, **{**BROUGHT, **options})


def train(run, model, items):
    step = run.step(items)
    for micro_batch in step:
        step.backward(model(**micro_batch.inputs)[1])
    step.update()


def test_a_token_that_no_example_had_is_compared_before_it_is_trained():
    model, run = run_of(Segments)
    train(run, model, with_token(EXAMPLES[0][0]))
    for _ in range(3):  # and each time that the step is tried again
        with pytest.raises(
            CheckError, match=r"the items have 1 token that no example had \(5; give prepare such items"
        ):
            run.step(with_token(SEPARATOR))
    run.close()


@pytest.mark.parametrize("items", [with_token(SEPARATOR), EXAMPLES * 9], ids=["tokens", "sizes"])
def test_what_there_is_no_memory_to_compare_with_is_warned_of_once(monkeypatch, caplog, items):
    def without_memory(*_arguments, **_options):
        raise InfeasibleError("no memory")

    model, run = run_of(Plain)
    with run:
        monkeypatch.setattr(stock_comparison, "_check_ways", without_memory)
        for _ in range(3):
            train(run, model, items)
    assert caplog.text.count("packs were not compared again: no memory") == 1


def mean_of_its_own(output, micro_batch):
    losses = F.cross_entropy(output[0][0], micro_batch.labels, reduction="none")
    weights = micro_batch.column("weights", of="targets")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-3)


def test_a_weight_of_zero_that_no_example_had_is_compared_before_it_is_trained():
    def weighted(weights_of):
        return [{"input_ids": row, "weights": weights_of(len(row))} for row in EXAMPLES]

    options = {"loss": mean_of_its_own, "loss_columns": ("weights",)}
    _, run = run_of(Plain, weighted(np.ones), **options)
    with pytest.raises(CheckError, match="the items have values of columns that no example had"):
        run.step(weighted(lambda length: (np.arange(length) % 3 != 1).astype(float)))
    run.close()


def test_ever_new_tokens_are_compared_at_growing_distances():
    model, run = run_of(Plain)
    compared, check = [], run.check_again
    run.check_again = lambda: (compared.append(run.next_step), check())
    for number in range(10):
        train(run, model, with_token(models.VOCAB - 1 - number))
    assert compared == [0, 1, 3, 7]
    run.close()


def test_without_a_check_nothing_is_compared():
    model, run = run_of(Segments, check=False)
    train(run, model, with_token(SEPARATOR))
    run.close()


def test_a_class_that_no_example_had_is_compared_before_it_is_trained():
    class OfClass(Plain):
        """A class changes the whole pack."""

        def forward(self, idx, kind, targets):
            logits = super().forward(idx)[0] * (1.0 + (kind == 3).any())
            return logits, F.cross_entropy(logits[0], targets[0])

    def inputs(micro_batch):
        kind = micro_batch.column("kind")[None]
        return {"idx": micro_batch.tokens[None], "kind": kind, "targets": micro_batch.labels[None]}

    def of_classes(*kinds):
        return [{"input_ids": row, "kind": kinds[number % len(kinds)]} for number, row in enumerate(EXAMPLES)]

    model, run = run_of(OfClass, of_classes(1, 2, 4, 5), inputs=inputs, loss_columns=("kind",))
    train(run, model, of_classes(5, 4, 2))
    with pytest.raises(CheckError, match="the items have values of columns that no example had"):
        run.step(of_classes(1, 2, 3))
    run.close()
