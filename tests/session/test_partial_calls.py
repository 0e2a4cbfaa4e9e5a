"""A loop's call that leaves out some of ``micro_batch.inputs`` trains what the complete call trains, or is refused."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import PLAIN_SGD
from tests.session.test_shifting_modules import Shifting
from tests.session.trainers import dataset, gpt2

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT = 1e-12
"""float64; both calls compute the same."""
ROWS = [{"input_ids": item["input_ids"]} for item in dataset(8)]


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": models.VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **options)).double()


def taking_no_shifted():
    model = gpt2()
    usual = model.loss_function
    model.loss_function = lambda logits, labels, vocab_size, **options: usual(logits, labels, vocab_size)
    return model


class Placed(models.GPT):
    """Counts positions by itself only where it is given none."""

    def forward(self, idx, targets=None, pos=None):
        pos = torch.tensor([list(range(idx.shape[1]))]) if pos is None else pos
        x = self.tokens(idx) + self.places(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def module(kind):
    torch.manual_seed(0)
    return kind().double()


def complete(model, micro_batch, *, leave_out=()):
    output = model(**{name: value for name, value in micro_batch.inputs.items() if name not in leave_out})
    return output[1] if isinstance(output, tuple) else output.loss


def train(model, call=complete, items=None, **options):
    as_started_by_torchrun()
    defaults = {
        "order": "corpus",
        "optimizer": PLAIN_SGD,
        "lr": 0.1,
        "clip_norm": 0.0,
        "verbose": False,
        "check": False,
    }
    planned = {"cost": models.mixed_cost(), "memory_gib": 40, "policy": "dcp-intra", "sequences_per_step": 4}
    run = lw.prepare(model, dataset(8) if items is None else items, steps=2, **defaults | planned | options)
    try:
        for step in run.steps():
            for micro_batch in step:
                step.backward(call(model, micro_batch))
            step.update()
    finally:
        run.close()
    return weights_of(model)


def assert_equal(weights, others):
    for name, values in others.items():
        torch.testing.assert_close(torch.from_numpy(weights[name]), torch.from_numpy(values), rtol=0, atol=EXACT)


def embedded(model, micro_batch):
    inputs = dict(micro_batch.inputs)
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    return model(inputs_embeds=embeddings, labels=inputs["labels"]).loss


CALLS = {
    "tokens and labels": lambda model, m: model(input_ids=m.inputs["input_ids"], labels=m.inputs["labels"]).loss,
    "by position": lambda model, m: model(m.inputs["input_ids"], labels=m.inputs["labels"]).loss,
    "a tuple": lambda model, m: model(m.inputs["input_ids"], labels=m.inputs["labels"], return_dict=False)[0],
    "nothing for positions": lambda model, m: model(**m.inputs | {"position_ids": None, "shift_labels": None}).loss,
    "copies": lambda model, m: model(input_ids=m.tokens[None].clone(), labels=m.labels[None].clone()).loss,
    "each token's own labels": lambda model, m: model(input_ids=m.tokens[None], labels=m.unshifted_labels[None]).loss,
    "embeddings": embedded,
    "no positions": partial(complete, leave_out=("position_ids",)),
    "no shifted labels": partial(complete, leave_out=("shift_labels",)),
    "no cache": partial(complete, leave_out=("use_cache",)),
}
FEW_CALLS = (
    "by position",
    "a tuple",
    "nothing for positions",
    "each token's own labels",
    "embeddings",
    "no shifted labels",
)
"""What no other call does as well."""
BUILDERS = {"GPT-2": gpt2, "Llama": llama, "GPT-2 that takes no shifted labels": taking_no_shifted}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.deep] * (k != "Llama")) for k in BUILDERS])
def test_a_call_with_a_part_of_the_inputs_trains_what_the_complete_call_trains(kind):
    expected = train(BUILDERS[kind]())
    for name in CALLS if kind != "Llama" else FEW_CALLS:
        assert_equal(train(BUILDERS[kind](), CALLS[name]), expected)


def test_ranks_that_share_sequences_may_leave_out_inputs_too(ranks):
    expected = train(gpt2())
    for weights in ranks(2).run(train_by_part):
        assert_equal(weights, expected)


def train_by_part():
    return train(gpt2(), CALLS["tokens and labels"], cost=models.SimpleCost(capacity=32, loss=0.4, c_s=0.05))


def test_labels_that_are_the_tokens_are_shifted_within_sequences():
    calls = [CALLS["tokens and labels"], lambda model, m: model(m.tokens[None], labels=m.tokens[None]).loss]
    for options in ({}, {"packing": "never"}):
        expected = train(gpt2(), items=ROWS)
        for call in calls:
            assert_equal(train(gpt2(), call, ROWS, **options), expected)


def test_a_sequence_by_sequence_model_takes_labels_of_either_form():
    expected = train(gpt2(), packing="never")
    for call in (
        lambda model, m: model(m.tokens[None], labels=m.labels[None]).loss,
        lambda model, m: model(m.tokens[None], labels=m.unshifted_labels[None]).loss,
    ):
        assert_equal(train(gpt2(), call, packing="never"), expected)


def test_a_loss_of_logits_alone_needs_no_positions_in_its_call():
    def loss_of(output, micro_batch):
        return F.cross_entropy(output.logits[0], micro_batch.labels, ignore_index=-100)

    def call(model, micro_batch):
        return loss_of(model(micro_batch.inputs["input_ids"]), micro_batch)

    assert_equal(train(gpt2(), call, loss=loss_of), train(gpt2()))


def test_a_module_of_ones_own_is_given_the_positions_that_a_call_leaves_out():
    items = models.rows(8, longest=40)
    calls = [
        lambda model, m: model(m.inputs["idx"], m.inputs["targets"])[1],
        lambda model, m: model(idx=m.tokens[None], targets=m.targets[None], pos=None)[1],
    ]
    for call in calls:
        assert_equal(train(module(Placed), call, items), train(module(Placed), items=items))


@pytest.mark.deep
def test_a_module_that_shifts_labels_takes_them_shifted_too_or_whole():
    items = models.rows(8, longest=40)
    expected = train(module(Shifting), items=items)
    for labels_of in (lambda m: m.targets, lambda m: m.tokens, lambda m: m.unshifted_labels):
        calls = lambda model, m, labels_of=labels_of: model(m.tokens[None], labels_of(m)[None])[1]  # noqa: E731
        assert_equal(train(module(Shifting), calls, items), expected)


def test_a_teacher_is_given_the_positions_that_a_call_leaves_out():
    def distilled(make):
        teacher = gpt2(1)

        def call(model, micro_batch):
            output = model(**micro_batch.inputs)
            other = teacher(**make(micro_batch)).logits
            gap = (output.logits.log_softmax(-1) - other.log_softmax(-1)).square().mean(-1)
            return output.loss, micro_batch.mean(gap, over="tokens")

        as_started_by_torchrun()
        model = gpt2()
        run = lw.prepare(
            model, ROWS, steps=1, frozen=(teacher,), sequences_per_step=4, cost=models.mixed_cost(), memory_gib=40,
            optimizer=PLAIN_SGD, lr=0.1, order="corpus", policy="static", verbose=False, check=False,
        )  # fmt: skip
        for step in run.steps():
            for micro_batch in step:
                loss, side = call(model, micro_batch)
                step.backward(loss, side=side)
            step.update()
        run.close()
        return weights_of(model)

    expected = distilled(lambda micro_batch: micro_batch.inputs)
    assert_equal(distilled(lambda micro_batch: {"input_ids": micro_batch.inputs["input_ids"]}), expected)


def hidden(labels):
    """Labels of which every third is left out."""
    return labels.masked_fill(torch.arange(labels.shape[-1]) % 3 == 0, -100)


REFUSED = {
    "other labels": (
        lambda model, m: model(m.tokens[None], labels=hidden(m.labels[None])).loss,
        InputError,
        r"GPT2LMHeadModel was called with labels .*without shift_labels, so it would shift them across the ends",
    ),
    "labels that are not used": (
        lambda model, m: model(**m.inputs | {"labels": hidden(m.labels[None])}).loss,
        InputError,
        r"labels that are neither shift_labels nor the micro-batch's, and it uses shift_labels alone",
    ),
    "fewer targets": (
        lambda model, m: model(**m.inputs | dict.fromkeys(("labels", "shift_labels"), hidden(m.labels[None]))).loss,
        CheckError,
        r"labels that have \d+ targets, and its micro-batch has \d+.*mean_over='step'",
    ),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_labels_of_other_targets_are_refused_before_weights_change(kind):
    call, error, match = REFUSED[kind]
    model = gpt2()
    before = copy.deepcopy(weights_of(model))
    with pytest.raises(error, match=match):
        train(model, call)
    assert_equal(weights_of(model), before)


def test_other_tokens_and_other_labels_of_as_many_targets_are_the_users_to_give():
    def call(model, micro_batch):
        tokens = (micro_batch.inputs["input_ids"] + 1) % models.VOCAB
        labels = micro_batch.labels[None]
        labels = torch.where(labels == -100, labels, (labels + 3) % models.VOCAB)
        return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    shifted = [
        {
            "input_ids": [(token + 1) % models.VOCAB for token in item["input_ids"]],
            "labels": [label if label == -100 else (label + 3) % models.VOCAB for label in item["labels"]],
        }
        for item in dataset(8)
    ]
    assert_equal(train(gpt2(), call), train(gpt2(), items=shifted))
