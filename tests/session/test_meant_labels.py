"""Labels of items that are no tokens, or next tokens already, are not shifted in silence."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import VOCAB, Plain

LONG = [row for row in rows() if len(row) > 2]


def prepared(items, **options):
    torch.manual_seed(0)
    lw.prepare(Plain().double(), items, steps=1, **OPTIONS | options).close()


def items_of(labels_of):
    return [{"input_ids": row, "labels": labels_of(np.asarray(row))} for row in LONG]


def hidden(row):
    return np.where(np.arange(len(row)) % 3 == 1, (row + 1) % VOCAB, -100)


def test_pairs_that_are_shifted_already_are_refused_with_the_objective_that_takes_them():
    pairs = [{"input_ids": row[:-1], "labels": row[1:]} for row in LONG]
    with pytest.raises(InputError, match=r"next tokens already, and Plain would learn.*objective='every-token'"):
        prepared(pairs)
    prepared(pairs, objective="every-token")


@pytest.mark.first_cells(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("labels_of", [hidden, lambda row: row % 5], ids=["hidden tokens", "tags"])
def test_labels_that_are_no_tokens_are_warned_of_unless_the_objective_is_said(caplog, labels_of):
    prepared(items_of(labels_of))
    assert "labels of items are other than their tokens at" in caplog.text and "every-token" in caplog.text
    for objective in ("every-token", "next-token"):
        caplog.clear()
        prepared(items_of(labels_of), objective=objective)
        assert "other than their tokens" not in caplog.text


def test_labels_of_chats_are_taken_as_they_are(caplog):
    prepared(items_of(lambda row: np.where(np.arange(len(row)) < len(row) // 2, -100, row)))
    assert "other than their tokens" not in caplog.text


class Squared(Plain):
    """Its loss is a mean over all of its tokens, of what they are alone."""

    def forward(self, idx):
        return super().forward(idx)[0].square().mean()


class Unlabelled(Plain):
    def forward(self, idx):
        return super().forward(idx)[0]


def test_a_loss_that_uses_no_targets_is_warned_of_unless_the_objective_is_said(caplog):
    torch.manual_seed(0)
    for options, is_said in (({"packing": "never"}, True), ({"objective": "every-token"}, False)):
        lw.prepare(Squared().double(), LONG, steps=1, **OPTIONS | options).close()
        assert ("the loss of Squared uses no targets" in caplog.text) == is_said, options
        caplog.clear()
    model = Unlabelled().double()
    with pytest.raises(
        CheckError, match="mean over the targets of a micro-batch, and it uses none: say objective='every"
    ):
        loss = {"loss": lambda output, micro_batch: output[0].square().mean()}
        lw.prepare(model, LONG, steps=1, packing="always", **OPTIONS | loss)
    prepared(LONG)
    assert "uses no targets" not in caplog.text


def test_a_loss_that_is_divided_by_a_number_of_its_own_is_refused_with_the_way_to_make_it_in_the_loop():
    def masked(output, micro_batch):
        mask = micro_batch.column("mask")
        return (output[0].square().mean(-1) * mask).sum() / mask.sum()

    items = [{"input_ids": row, "mask": 1.0 + np.arange(len(row)) % 2} for row in LONG]
    options = {"loss": masked, "loss_columns": ("mask",), "objective": "every-token", "packing": "always"}
    said = (
        r"a mean over all tokens of a micro-batch\. A sum that is divided .*step\.backward\(micro_batch\.sum.*'step'\)"
    )
    torch.manual_seed(0)
    with pytest.raises(CheckError, match=said) as refused:
        lw.prepare(Unlabelled().double(), items, steps=1, **OPTIONS | options)
    assert "say objective=" not in str(refused.value)
