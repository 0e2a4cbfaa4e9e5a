"""A loss of one number or class of each sequence has the weights of ``mean_over=``, whatever the plan is."""

import copy
import logging
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session.numbers_of_sequences import LOSSES, Pooled, inputs, items, model, trained
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import Plain

EXACT = 1e-10
CASES = [
    (kind, mean_over, made)
    for kind in ("number", "class")
    for mean_over in (None, "targets", "tokens", "units")
    for made in LOSSES
    if mean_over is not None or made == "as it is"
]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_each_mean_is_that_of_a_plain_loop(ranks, num_ranks):
    for outcomes in ranks(num_ranks).run(trained, CASES):
        assert {case: off for case, off in outcomes.items() if isinstance(off, str) or off > EXACT} == {}


def prepared(kind, **options):
    pooled = model(OfAny)
    options = {"inputs": inputs, "loss_columns": ("value",), "steps": 1, **OPTIONS} | options
    return pooled, lw.prepare(pooled, items(kind), **options)


class OfAny(Pooled):
    """Takes labels, or lists of what is to be found in each sequence, as detection does."""

    def forward(self, idx, labels):
        if isinstance(labels, list):
            labels = torch.stack([found["boxes"].mean() for found in labels])
        return super().forward(idx, labels)


def listed(micro_batch):
    boxes = micro_batch.column_by_sequence("value")
    return {"idx": micro_batch.tokens[None], "labels": [{"boxes": box + torch.zeros(2, 1)} for box in boxes]}


def test_another_function_of_a_mean_over_sequences_is_refused():
    for function in (torch.exp, lambda loss: (loss - 0.1).abs()):
        pooled, run = prepared("number")
        with pytest.raises(InputError, match="take that function of the loss of each sequence, in the forward"):
            for step in run.steps():
                for micro_batch in step:
                    step.backward(function(pooled(**micro_batch.inputs)), mean_over="units")
        run.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"loss": lambda output, micro_batch: output}, {"inputs": listed}],
    ids=["a number", "a number and loss=", "lists"],
)
def test_regression_is_told_of_its_weights(options, caplog):
    with caplog.at_level(logging.WARNING):
        prepared("number", **options)[1].close()
    said = r"the loss of OfAny depends on labels, of which a sequence has one .* mean_over='units'"
    assert any(re.search(said, record.getMessage()) for record in caplog.records)


def test_a_class_is_not_told_of_its_weight(caplog):
    with caplog.at_level(logging.WARNING):
        prepared("class")[1].close()
    assert not [record for record in caplog.records if "depends on" in record.getMessage()]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("mean_over", ["units", "tokens"])
def test_a_mean_over_the_targets_of_a_pack_is_none_over_units_or_tokens(mean_over):
    for made in (lambda loss: loss, lambda loss: 2 * loss):
        torch.manual_seed(0)
        plain = Plain().double()
        run = lw.prepare(plain, rows(), steps=1, **OPTIONS)
        assert run.wrapped_model.by_sequence is None
        with pytest.raises(CheckError, match=rf"mean_over='{mean_over}' is made of the loss that the forward returned"):
            for step in run.steps():
                for micro_batch in step:
                    step.backward(made(plain(**micro_batch.inputs)[1]), mean_over=mean_over)
        run.close()


def test_a_loss_of_units_made_of_logits_is_taken_in_packs():
    torch.manual_seed(0)
    plain = Plain().double()
    run = lw.prepare(plain, rows(), steps=1, **OPTIONS)
    for step in run.steps():
        for micro_batch in step:
            losses = F.cross_entropy(plain(**micro_batch.inputs)[0][0], micro_batch.labels, reduction="none")
            step.backward(micro_batch.per_sequence(losses).mean(), mean_over="units")
        step.update()
    run.close()


def test_numbers_of_sequences_of_a_class_of_transformers_are_trained_as_its_refusal_says():
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        **sizes, intermediate_size=16, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    bert = BertForSequenceClassification(config).double()
    alone, corpus = copy.deepcopy(bert), items("number")
    options = {**OPTIONS, "steps": 1, "loss_columns": ("value",)}
    with pytest.raises(InputError, match=r"labels.*column_by_sequence.*output\.loss.*mean_over='units'"):
        lw.prepare(bert, corpus, **options)

    def made(micro_batch):
        return {"input_ids": micro_batch.tokens[None], "labels": micro_batch.column_by_sequence("value")}

    run = lw.prepare(bert, corpus, inputs=made, loss=lambda output, micro_batch: output.loss, **options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(bert(**micro_batch.inputs).loss, mean_over="units")
        step.update()
    run.close()
    of_step = corpus[: OPTIONS["sequences_per_step"]]
    for item in of_step:
        ids, value = torch.from_numpy(item["input_ids"])[None], torch.tensor([item["value"]])
        (alone(input_ids=ids, labels=value).loss / len(of_step)).backward()
    for (name, found), expected in zip(bert.named_parameters(), alone.parameters(), strict=True):
        moved = torch.zeros_like(expected) if expected.grad is None else OPTIONS["lr"] * expected.grad
        torch.testing.assert_close(found, expected - moved, rtol=0, atol=EXACT, msg=name)
