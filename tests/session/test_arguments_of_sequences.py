"""Arguments that belong to a sequence and not to its slots: texts of lengths of their own, attended jointly."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InfeasibleError, InputError, LengthwiseError
from tests.plan.costs import SimpleCost
from tests.session.item_numbers import (
    LONGEST,
    TEXTS,
    inputs,
    loss_of,
    model,
    numbers_of_brought,
    numbers_of_units,
    texts_of_items,
)
from tests.session.structure_runs import LENGTHS, LR, OPTIONS, rows
from tests.session.structures import Plain

pytestmark = pytest.mark.usefixtures("unchecked")


def weights_of_a_loop():
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for row, text in zip(rows(), TEXTS):
        tokens = torch.as_tensor(row)
        output = alone(tokens[None], text[None], 0.5)[0]
        loss = F.cross_entropy(output[:-1], tokens[1:], reduction="sum") / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
    optimizer.step()
    return list(alone.parameters())


def prepared(kind):
    return lw.prepare(kind, rows(), steps=1, inputs=inputs, loss=loss_of, **OPTIONS)


CALLS = {
    "as they are made": lambda model, micro_batch: model(**micro_batch.inputs),
    "by position": lambda model, micro_batch: model(*inputs(micro_batch).values()),
    "some made anew": lambda model, micro_batch: model(
        text=inputs(micro_batch)["text"], **{k: v for k, v in micro_batch.inputs.items() if k != "text"}
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_sequence_has_its_own(call):
    joint = model()
    run = prepared(joint)
    assert run.wrapped_model.by_sequence is not None, "their numbers of tokens are not those of the slots"
    for step in run.steps():
        for micro_batch in step:
            step.backward(loss_of(call(joint, micro_batch), micro_batch))
        step.update()
    off = [float((a - b).detach().abs().max()) for a, b in zip(weights_of_a_loop(), joint.parameters())]
    assert max(off) < 1e-12
    run.close()


def test_one_that_is_not_what_was_made_is_refused_by_name():
    joint = model()
    run = prepared(joint)
    with pytest.raises(InputError, match=r"argument 'text' is another one for each.*micro_batch.inputs\['text'\]"):
        for step in run.steps():
            for micro_batch in step:
                output = joint(**micro_batch.inputs | {"text": 2.0 * micro_batch.inputs["text"]})
                step.backward(loss_of(output, micro_batch))
    run.close()


def test_one_that_is_the_same_for_all_may_be_another_in_a_call():
    joint = model()
    run = prepared(joint)
    for step in run.steps():
        for micro_batch in step:
            output, other = (joint(**micro_batch.inputs | {"scale": scale}) for scale in (0.5, 0.25))
            assert not torch.equal(output, other)
            step.backward(loss_of(output, micro_batch))
        step.update()
    run.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_they_are_looked_up_by_the_numbers_of_items_whatever_is_left_out_or_cut(ranks, num_ranks):
    for over_length in ("drop", "truncate", "split"):
        for off in ranks(num_ranks).run(texts_of_items, over_length):
            assert off < 1e-12, over_length


def test_members_of_units_have_the_number_of_their_item(ranks):
    longest = LENGTHS.index(max(LENGTHS))
    expected = [(n, tuple(each.tolist())) for n, row in enumerate(rows()) for each in (row, row[::-1]) if n != longest]
    assert sorted(itertools.chain(*ranks(2).run(numbers_of_units))) == sorted(expected)


def test_items_of_a_loop_are_numbered_from_those_of_rank_0(ranks):
    expected = {(number, tuple(row.tolist())) for number, row in enumerate(rows())}
    assert set(itertools.chain(*ranks(2).run(numbers_of_brought, (len(LENGTHS) - 2, 2)))) == expected


def prepared_of(items, **options):
    torch.manual_seed(0)
    return lw.prepare(Plain().double(), items, max_length=LONGEST, over_length="drop", **OPTIONS | options)


def test_messages_name_items_by_what_the_user_gave(caplog):
    items = [{"input_ids": row, "loss_mask": np.ones(len(row), int)} for row in rows()]
    last = {"input_ids": np.arange(4), "loss_mask": np.zeros(4, int)}
    run = prepared_of([*items, last], sequences_per_step=1, steps=5)
    assert [len(row) > LONGEST for row in rows()].count(True) == 2
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        step.update()
    run.close()
    assert "no token of its 1 sequences (6) has a loss" in caplog.text


def test_a_sequence_that_does_not_fit_is_named_by_its_item():
    with pytest.raises(InfeasibleError, match=rf"sequence 4 \({LENGTHS[4]} tokens\)"):
        prepared_of(
            [rows()[2], *rows()[2:4], rows()[5], rows()[4]], cost=SimpleCost(capacity=7), steps=1, recompute="none"
        )


def test_items_that_processes_cannot_read_are_named():
    class Failing:
        """Its last item cannot be read once a run has begun."""

        is_gone = False

        def __len__(self):
            return len(LENGTHS)

        def __getitem__(self, number):
            if self.is_gone and number == 4:
                raise OSError("the disk is gone")
            return rows()[number]

    items = Failing()
    run = prepared_of(items, workers=1, steps=1)
    items.is_gone = True
    with pytest.raises(LengthwiseError, match="item 4 could not be read: OSError: the disk is gone"):
        for step in run.steps():
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1])
    run.close()
