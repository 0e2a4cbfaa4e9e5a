"""Frozen models of transformers that say one thing of each sequence: teachers of classifiers, and reward models."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.runtime.harness import with_check
from tests.session.latents import OPTIONS, as_started_by_torchrun, off_after_a_step

EXACT = 1e-10
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
ROWS = [list(range(1 + i, 6 + 2 * i)) for i in range(5)]


def built(kind, seed, **options):
    torch.manual_seed(seed)
    if kind is transformers.BertForSequenceClassification:
        options |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(kind.config_class(**SIZES | options)).double()


def classifier(seed=0, **options):
    return built(transformers.BertForSequenceClassification, seed, num_labels=3, **options)


def reward(seed=5, **options):
    return built(transformers.LlamaForSequenceClassification, seed, num_labels=1, **options)


def alone_of(model, row):
    return model(input_ids=torch.tensor(row)[None])


def prepared(model, items, **options):
    as_started_by_torchrun()
    return lw.prepare(model, items, **OPTIONS | {"sequences_per_step": 5, "steps": 1} | options)


def off(run, model, alone, loss_of, loss_alone):
    """How far a step with ``loss_of`` each micro-batch is from one of a loop over sequences with ``loss_alone``."""

    def backward(step, micro_batch):
        step.backward(loss_of(micro_batch), mean_over="units")

    found = off_after_a_step(run, model, backward, alone, lambda alone: loss_alone())
    run.close()
    return found


def divergence(logits, teachers):
    return F.kl_div(logits.log_softmax(-1), teachers.softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("given", ["inputs", "tokens"])
def test_a_classifier_learns_from_a_frozen_one_of_its_class(given):
    model, teacher = classifier(), classifier(1, hidden_size=32)
    alone, beside = copy.deepcopy(model), copy.deepcopy(teacher).requires_grad_(False)
    items = [{"input_ids": row, "labels": number % 3} for number, row in enumerate(ROWS)]
    run = prepared(model, items, frozen=[teacher])

    def loss_of(micro_batch):
        inputs = micro_batch.inputs if given == "inputs" else {"input_ids": micro_batch.inputs["input_ids"]}
        return divergence(model(**micro_batch.inputs).logits, teacher(**inputs).logits)

    def loss_alone():
        return divergence(*(torch.cat([alone_of(m, row).logits for row in ROWS]) for m in (alone, beside)))

    assert off(run, model, alone, loss_of, loss_alone) < EXACT


class Scores(nn.Module):
    """What a reward model says of each slot."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, input_ids, position_ids=None):
        return self.of.score(self.of.model(input_ids, position_ids=position_ids).last_hidden_state)


def rewarded_step(packing):
    """How far a step is whose loss weighs sequences by a frozen reward; in packs ``Scores`` says it of each slot."""
    model, judge = built(transformers.LlamaForCausalLM, 0), reward()
    alone, beside = copy.deepcopy(model), copy.deepcopy(judge).requires_grad_(False)
    frozen = judge if packing == "never" else Scores(judge)
    run = prepared(model, ROWS, frozen=[frozen], packing=packing)

    def loss_of(micro_batch):
        if packing == "never":
            rewards = frozen(**micro_batch.inputs).logits[:, 0]
        else:
            of_slots = frozen(micro_batch.inputs["input_ids"])[0, :, 0]
            rewards = micro_batch.per_sequence(of_slots * micro_batch.is_last)
        logits_t = model(**micro_batch.inputs).logits[0]
        labels = micro_batch.labels
        return (micro_batch.per_sequence(F.cross_entropy(logits_t, labels, reduction="none")) * rewards).mean()

    def loss_alone():
        losses = []
        for row in ROWS:
            logits, targets = alone_of(alone, row).logits[0, :-1], torch.tensor(row[1:])
            losses.append(F.cross_entropy(logits, targets, reduction="sum") * alone_of(beside, row).logits[0, 0])
        return sum(losses) / len(ROWS)

    return off(run, model, alone, loss_of, loss_alone)


def test_a_frozen_reward_model_scores_sequences_beside_a_language_model_that_is_computed_one_by_one():
    assert rewarded_step("never") < EXACT


@pytest.mark.deep
def test_the_way_out_of_a_reward_model_beside_packs_is_exact(ranks):
    assert max(ranks(2).run(with_check, rewarded_step, "always")) < EXACT


def test_a_reward_model_beside_packs_is_refused_with_the_way_out():
    said = r"LlamaForSequenceClassification returns the shape \(1, 1\) for .*self\.of\.score.*micro_batch\.is_last"
    with pytest.raises(CheckError, match=said):
        prepared(built(transformers.LlamaForCausalLM, 0), ROWS, frozen=[reward()])


def test_a_classifier_that_fails_on_its_labels_is_not_told_to_limit_packs():
    teacher = built(transformers.BertForSequenceClassification, 1, num_labels=2)
    run = prepared(classifier(), [{"input_ids": row, "labels": 2} for row in ROWS], frozen=[teacher])
    step = next(run.steps())
    with pytest.raises(InputError, match=r"fails on a sequence of .*Target 2 is out of bounds.*what its") as refused:
        for micro_batch in step:
            teacher(**micro_batch.inputs)
    assert "max_tokens" not in str(refused.value)
    run.close()
