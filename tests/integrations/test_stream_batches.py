"""Streams without length: every item once, in batches that no number of ranks changes, also after a stop."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import IterableDataset

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.pairs import prepared

NUM_ITEMS = 61


class Numbers(IterableDataset):
    """Items whose first token is their number."""

    def __init__(self, count=NUM_ITEMS):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            length = 1 + int(np.random.default_rng(number).geometric(0.2))
            yield {"input_ids": np.array([number % models.VOCAB, *[number * 7 % models.VOCAB] * (length - 1)])}


def run_at(step=0, rank=0, size=1):
    return SimpleNamespace(next_step=step, world=SimpleNamespace(rank=rank, size=size))


def numbers_of(batches):
    return [[int(item["input_ids"][0]) for item in batch] for batch in batches]


@pytest.mark.parametrize("look_ahead", [0, 1, 7, 1000])
@pytest.mark.parametrize("size", [{"tokens_per_step": 30}, {"sequences_per_step": 8}])
def test_every_item_comes_once_on_any_number_of_ranks_and_after_any_step(size, look_ahead):
    options = size | {"look_ahead": look_ahead, "seed": 3}
    whole = numbers_of(lw.StreamBatches(run_at(), Numbers(), **options))
    in_order = list(chain(*whole))
    assert sorted(in_order) == list(range(NUM_ITEMS))
    assert (in_order == sorted(in_order)) == (look_ahead == 0)
    for num_ranks in (2, 3):
        shares = [
            numbers_of(lw.StreamBatches(run_at(0, rank, num_ranks), Numbers(), **options)) for rank in range(num_ranks)
        ]
        assert [sorted(chain(*of_step)) for of_step in zip(*shares, strict=True)] == list(map(sorted, whole))
    for step in range(len(whole) + 1):
        assert numbers_of(lw.StreamBatches(run_at(step), Numbers(), **options)) == whole[step:]


def test_batches_stay_within_their_tokens_and_differ_by_seed():
    batches = list(lw.StreamBatches(run_at(), Numbers(), tokens_per_step=20, look_ahead=9))
    tokens = [sum(len(item["input_ids"]) for item in batch) for batch in batches]
    assert all(count <= 20 or len(batch) == 1 for count, batch in zip(tokens, batches)) and np.mean(tokens) > 12
    other = lw.StreamBatches(run_at(), Numbers(), tokens_per_step=20, look_ahead=9, seed=1)
    assert numbers_of(other) != numbers_of(batches)
    pairs = [tuple({"input_ids": [1] * 5} for _ in range(2))] * 4
    assert [len(batch) for batch in lw.StreamBatches(run_at(), pairs, tokens_per_step=20)] == [2, 2]


@pytest.mark.parametrize(
    ("stream", "options", "said"),
    [
        (iter([[1]]), {"sequences_per_step": 1}, "list_iterator can be read only once"),
        ([[1]], {}, "give one of them"),
        ([[1]], {"sequences_per_step": 1, "tokens_per_step": 1}, "give one of them"),
        ([[1]], {"sequences_per_step": 1, "look_ahead": -1}, "look_ahead=-1"),
        ([{"text": "a"}], {"tokens_per_step": 8}, "an item of the stream has text"),
    ],
)
def test_what_is_no_stream_of_items_is_refused(stream, options, said):
    with pytest.raises(InputError, match=said):
        list(lw.StreamBatches(run_at(), stream, **options))


@pytest.mark.parametrize(
    ("options", "num_steps"), [({"steps": 2}, 2), pytest.param({"epochs": 1}, 4, marks=pytest.mark.deep)]
)
def test_steps_of_a_stream_end_after_as_many_as_were_asked_for(ranks, tmp_path, options, num_steps):
    for numbers in ranks(2).run(steps_of_stream, tmp_path, options):
        assert numbers == [list(range(num_steps)), []]


def steps_of_stream(folder, options):
    """Numbers of the steps of a stream of four batches, and of those that are left when the run is over."""
    run = prepared(list(Numbers(12)), step_max_length=40, sequences_per_step=9, **options)
    batches = lw.StreamBatches(run, Numbers(12), sequences_per_step=3)
    numbers = [[], []]
    for number in numbers:
        for step in run.steps(batches, plan_ahead=True):
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1])
            step.update()
            number.append(step.number)
    run.close()
    return numbers


STREAM = {"sequences_per_step": 9, "look_ahead": 5}


def learn(folder, *, first, last):
    """Numbers of items and losses of steps up to ``last``; the second step is left by an error, and comes again."""
    run = prepared(list(Numbers(12)), step_max_length=40)
    if first:
        assert run.resume(folder) == first
    seen, losses, fails = [], [], first == 0
    for step in run.steps(lw.StreamBatches(run, Numbers(), **STREAM)):
        try:
            for micro_batch in step:
                if fails and step.number == 1:
                    raise RuntimeError("once")
                step.backward(run.model(**micro_batch.inputs)[1])
            losses.append(step.update().loss)
        except RuntimeError:
            fails = False
            continue
        seen.append(sum(len(m.pack.ids) for p in step.plan.pipelines for m in p.micro_batches))
        if step.number == last - 1:
            run.save(folder)
            break
    run.close()
    return seen, losses


def test_a_run_that_is_stopped_goes_on_with_the_items_that_it_has_not_had(ranks, tmp_path):
    (whole, expected), *_ = ranks(2).run(learn, str(tmp_path / "whole"), first=0, last=100)
    assert sum(whole) == NUM_ITEMS
    (before, losses), *_ = ranks(2).run(learn, str(tmp_path / "parts"), first=0, last=3)
    (after, more), *_ = ranks(1).run(learn, str(tmp_path / "parts"), first=3, last=100)
    assert before + after == whole
    np.testing.assert_allclose(losses + more, expected, rtol=1e-10)
