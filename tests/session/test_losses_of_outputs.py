"""Losses that ``loss=`` makes of the model's own train what a plain loop trains, in packs and sequence by sequence."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.models import gpt
from tests.session.structure_runs import OPTIONS, rows
from tests.session.test_made_labels import llama
from tests.session.test_partial_calls import taking_no_shifted

VOCAB, STEPS, WEIGHT = 71, 2, 0.1
SAME = 1e-6
"""Losses of transformers are float32, and so are the gradients of its logits."""


def mamba():
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCAB, **sizes))


def of_logits(logits, labels):
    """The mean of squared log-sum-exps over the tokens that have a target."""
    has_target = labels != -100
    return torch.where(has_target, logits.logsumexp(-1).square(), 0.0).sum() / has_target.sum()


def with_its_own(output, micro_batch):
    return output.loss + WEIGHT * of_logits(output.logits[0], micro_batch.labels)


def plain_loop(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"])
    tokens = [torch.as_tensor(np.asarray(row)) for row in rows()]
    for _ in range(STEPS):
        count = sum(len(row) - 1 for row in tokens)
        for row in tokens:
            output = model(input_ids=row[None], labels=row[None])
            loss = output.loss + WEIGHT * of_logits(output.logits[0, :-1], row[1:])
            (loss * (len(row) - 1) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("make", "packing"),
    [
        (llama, "always"),
        pytest.param(taking_no_shifted, "always", marks=pytest.mark.deep),
        (mamba, "auto"),
        pytest.param(llama, "never", marks=pytest.mark.deep),
    ],
)
def test_a_loss_that_adds_to_the_models_own_trains_what_a_plain_loop_trains(make, packing):
    torch.manual_seed(0)
    model = make().double()
    stock = copy.deepcopy(model)
    plain_loop(stock)
    run = lw.prepare(model, rows(), loss=with_its_own, packing=packing, **OPTIONS | {"steps": STEPS})
    for step in run.steps():
        for micro_batch in step:
            step.backward(with_its_own(model(**micro_batch.inputs), micro_batch))
        step.update()
    run.close()
    for name, value in stock.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=SAME)


def classifier():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {"classifier_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=VOCAB, num_labels=3, **sizes, **options)
    ).double()


def smoothed(output, labels):
    return output.loss + F.cross_entropy(output.logits, labels, label_smoothing=0.1)


def test_a_loss_of_a_sequences_class_trains_what_a_plain_loop_trains():
    torch.manual_seed(0)
    model = classifier()
    stock = copy.deepcopy(model)
    items = [{"input_ids": row, "label": number % 3} for number, row in enumerate(rows())]
    for item in items:
        label = torch.tensor([item["label"]])
        loss = smoothed(stock(input_ids=torch.as_tensor(item["input_ids"])[None], labels=label), label)
        (loss / len(items)).backward()

    def loss(output, micro_batch):
        return smoothed(output, micro_batch.labels[micro_batch.labels != -100])

    run = lw.prepare(model, items, loss=loss, **OPTIONS | {"steps": 1})
    for step in run.steps():
        for micro_batch in step:
            step.backward(loss(model(**micro_batch.inputs), micro_batch))
        step.update()
    run.close()
    for name, value in stock.named_parameters():
        expected = value - OPTIONS["lr"] * value.grad if value.grad is not None else value
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=0, atol=1e-10)


class Pooled(models.GPT):
    """Predicts one of three classes from the mean of all tokens of a row."""

    def forward(self, idx, labels=None):
        logits = super().forward(idx)[0].mean(1)[:, :3]
        return logits if labels is None else F.cross_entropy(logits, labels)


def test_a_loss_of_an_output_by_sequence_is_refused_and_what_is_advised_trains_what_a_plain_loop_trains():
    torch.manual_seed(0)
    model = Pooled().double()
    stock = copy.deepcopy(model)
    items = [{"input_ids": row, "class": number % 3} for number, row in enumerate(rows())]
    options = OPTIONS | {"steps": 1, "loss_columns": ("class",), "packing": "never"}

    def loss(output, micro_batch):
        return F.cross_entropy(output, micro_batch.column_by_sequence("class"))

    advised = (
        r"make loss= of its outputs by token, or let the forward return the loss of its sequence, from an argument"
    )
    with pytest.raises(InputError, match=rf"has one value for each of several sequences.*; {advised} labels that inp"):
        lw.prepare(model, items, inputs=lambda batch: {"idx": batch.tokens[None]}, loss=loss, **options)
    for item in items:
        label = torch.tensor([item["class"]])
        (stock(torch.as_tensor(item["input_ids"])[None], label) / len(items)).backward()

    def inputs(micro_batch):
        return {"idx": micro_batch.tokens[None], "labels": micro_batch.column_by_sequence("class")}

    run = lw.prepare(model, items, inputs=inputs, **options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs))
        step.update()
    run.close()
    for name, value in stock.named_parameters():
        expected = value - OPTIONS["lr"] * value.grad if value.grad is not None else value
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("packing", "together"), [("always", "packs"), ("never", "micro-batches of several sequences")]
)
def test_a_loss_that_is_no_mean_over_targets_is_refused_by_that(packing, together):
    refused = rf"learns something else from {together} than .*loss= makes has to be a mean over the targets"
    with pytest.raises(CheckError, match=refused):
        lw.prepare(llama().double(), rows(), loss=lambda o, m: o.loss.square(), packing=packing, steps=1, **OPTIONS)


def scaled_loss(factor, output, micro_batch):
    return F.cross_entropy(output[0][0] * factor, micro_batch.labels)


mean_loss = partial(scaled_loss, 1.0)


@pytest.mark.parametrize(
    "make",
    [pytest.param(nn.Parameter, marks=pytest.mark.deep), lambda value: value.requires_grad_()],
    ids=["parameter", "tensor"],
)
@pytest.mark.usefixtures("unchecked")
def test_trained_tensors_that_are_no_parameters_of_the_model_are_refused_wherever_a_loss_reads_them(make):
    temperature = make(torch.ones((), dtype=torch.float64))
    refused = r"the loss of GPT reads a tensor \[\] that requires a gradient and is no parameter of the model"
    with pytest.raises(InputError, match=refused):
        lw.prepare(gpt(), rows(), loss=partial(scaled_loss, temperature), steps=1, **OPTIONS)
    assert temperature.grad is None
    model = gpt()
    run = lw.prepare(model, rows(), loss=mean_loss, steps=3, **OPTIONS)
    with pytest.raises(InputError, match=refused):
        for step in run.steps():
            for micro_batch in step:
                step.backward(scaled_loss(temperature, model(**micro_batch.inputs), micro_batch))
            step.update()
    run.close()


@pytest.mark.parametrize("loss", [lambda *call: mean_loss(*call).detach(), lambda *call: torch.tensor(3.0)])
def test_losses_without_a_gradient_are_refused_before_training(loss):
    with pytest.raises(InputError, match=r"the loss has no gradient: it was detached"):
        lw.prepare(gpt(), rows(), loss=loss, steps=1, **OPTIONS)
