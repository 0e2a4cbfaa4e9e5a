"""A loop may change tensors of a micro-batch in place: what is trained is what torch trains, or it is refused."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.loops import weights_of
from tests.session.test_partial_calls import assert_equal, dataset, gpt2, llama, module, train

pytestmark = pytest.mark.usefixtures("unchecked")

ITEMS = dataset(8)
OWN = models.rows(8, longest=40)


class Ignoring(models.GPT):
    """Leaves targets of -100 out of its loss."""

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def hide(labels):
    """Leave some targets out, in place."""
    labels[labels % 3 == 0] = -100
    return labels


def without_hidden(rows):
    """Items that have no loss where :func:`hide` leaves targets out."""
    return [{"input_ids": row.tolist(), "labels": hide(torch.as_tensor(row).clone()).tolist()} for row in rows]


def test_labels_that_are_changed_after_the_forward_are_not_learned():
    items = [item | {"labels": [-100] * 2 + item["labels"][2:]} for item in ITEMS]
    kept = lambda model, m: model(**{**m.inputs, "input_ids": m.inputs["input_ids"].clone()}).loss  # noqa: E731

    def changed(model, micro_batch):
        inputs = micro_batch.inputs
        output = model(**inputs | {"input_ids": inputs["input_ids"].clone()})
        for labels in (inputs["labels"], micro_batch.targets, micro_batch.unshifted_labels):
            labels[labels == -100] = 0
        return output.loss

    expected = train(llama().float(), kept, items)
    assert_equal(train(llama().float(), changed, items), expected)
    expected = train(llama().float(), kept, items, recompute="all")
    assert_equal(train(llama().float(), changed, items, recompute="all"), expected)


@pytest.mark.parametrize("policy", ["dcp-intra", pytest.param("static", marks=pytest.mark.deep)])
def test_targets_that_are_left_out_in_place_before_the_forward_are_not_counted(policy):
    def call(model, micro_batch):
        inputs = micro_batch.inputs
        hide(inputs["targets"])
        return model(**inputs)[1]

    expected = train(module(Ignoring), items=without_hidden(OWN), policy=policy)
    assert_equal(train(module(Ignoring), call, OWN, policy=policy), expected)


def test_labels_of_transformers_that_are_left_out_in_place_are_not_counted():
    rows = [torch.as_tensor(item["input_ids"]).numpy() for item in ITEMS]
    items = [{"input_ids": row.tolist()} for row in rows]

    def call(model, micro_batch):
        hide(micro_batch.inputs["labels"])
        return model(**micro_batch.inputs).loss

    by_name = lambda model, m: model(m.tokens[None], labels=hide(m.inputs["labels"])).loss  # noqa: E731
    by_numpy = lambda model, m: (hide(m.labels.numpy()), model(**m.inputs).loss)[1]  # noqa: E731
    expected = train(gpt2(), items=without_hidden(rows))
    for changed in (call, by_name, by_numpy):
        assert_equal(train(gpt2(), changed, items), expected)


def made_by_loop(model, micro_batch):
    logits, _ = model(micro_batch.tokens[None])
    return F.cross_entropy(logits[0], hide(micro_batch.targets))


def put_in(model, micro_batch):
    micro_batch.inputs["targets"] = hide(micro_batch.inputs["targets"].clone())
    return model(**micro_batch.inputs)[1]


REFUSED = {
    "a loss of the loop's": (made_by_loop, {"loss": lambda output, m: F.cross_entropy(output[0][0], m.targets)}),
    "another tensor in the inputs": (put_in, {}),
    "sequence by sequence": (
        lambda model, m: model(m.tokens[None], hide(m.inputs["targets"]))[1],
        {"packing": "never"},
    ),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_other_targets_whose_weight_is_not_known_are_refused(kind):
    call, options = REFUSED[kind]
    with pytest.raises(CheckError, match=r"changed in place|labels that have \d+ targets"):
        train(module(Ignoring), call, OWN, **options)


def test_means_beside_those_over_changed_targets_are_refused():
    def call(model, micro_batch):
        hide(micro_batch.inputs["targets"])
        micro_batch.mean(torch.zeros(len(micro_batch.tokens)), over="tokens")
        return model(**micro_batch.inputs)[1]

    with pytest.raises(InputError, match="changed labels in place"):
        train(module(Ignoring), call, OWN)

    def over_targets(model, micro_batch):
        hide(micro_batch.targets)
        return micro_batch.mean(torch.zeros(len(micro_batch.tokens)), over="targets")

    with pytest.raises(InputError, match="changed in place"):
        train(module(Ignoring), over_targets, OWN)


def test_logits_that_were_not_used_before_an_update_are_refused_after_it():
    kept = []

    def call(model, micro_batch):
        output = model(**micro_batch.inputs)
        kept.append(output.logits)
        return output.loss

    model = llama()
    train(model, call, ITEMS)
    assert weights_of(model)
    with pytest.raises(InputError, match="first used when"):
        kept[0].argmax(-1)
