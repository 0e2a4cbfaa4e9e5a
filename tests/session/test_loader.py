"""Workers that read ahead: of a user's ``DataLoader`` with our batch sampler, and of a prepared run."""

import json
import os

import numpy as np
import pytest
from torch.utils.data import DataLoader

import lengthwise as lw
from lengthwise.core.errors import LengthwiseError
from lengthwise.integrations.dataloader import BatchSampler
from tests.session import models
from tests.session.loops import step_through, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights, loop_on_one_device

pytestmark = pytest.mark.usefixtures("unchecked")

LENGTHS = np.random.default_rng(5).integers(1, 40, 60)


class Rows:
    """Row i is its number, as often as it is long."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, item):
        return np.full(LENGTHS[item], item)


def sampler_of(rank, num_ranks):
    return BatchSampler(
        LENGTHS, tokens_per_micro_batch=80, sequences_per_step=12, rank=rank, num_ranks=num_ranks, seed=3
    )


def loader_of(sampler):
    return DataLoader(
        Rows(), batch_sampler=sampler, num_workers=2, persistent_workers=True, prefetch_factor=3, collate_fn=list
    )


def steps_of(sampler, batches):
    """(step, rows) of every micro-batch; each is what the sampler says of it at that moment."""
    found = []
    for batch in sampler.follow(batches):
        ids = [int(row[0]) for row in batch]
        assert all(len(row) == LENGTHS[id] for row, id in zip(batch, ids))
        found.append((sampler.step, ids, sampler.weight, sampler.is_last))
    return found


def rows_by_step(found):
    """The rows of each step that have a weight, whichever rank and micro-batch they are in."""
    steps = {}
    for step, ids, weight, _ in found:
        steps.setdefault(step, []).extend(ids if weight else [])
    return {step: sorted(ids) for step, ids in steps.items()}


def test_an_epoch_stopped_in_the_middle_goes_on_with_the_same_steps_on_another_number_of_ranks():
    """Workers have read beyond the stop; the state is that of the step that was computed last."""
    whole = sampler_of(0, 1)
    loader = loader_of(whole)
    expected = rows_by_step([one for _ in range(2) for one in steps_of(whole, loader)])
    assert sorted(expected) == list(range(10))

    sampler = sampler_of(0, 2)
    for _ in sampler.follow(loader_of(sampler)):
        if (sampler.step, sampler.is_last) == (2, True):
            break
    state = json.loads(json.dumps(sampler.state_dict()))

    rest = []
    for rank in range(3):
        sampler = sampler_of(rank, 3)
        sampler.load_state_dict(state)
        loader = loader_of(sampler)  # its workers serve the rest of this epoch and all of the next
        rest += [one for _ in range(2) for one in steps_of(sampler, loader)]
    assert rows_by_step(rest) == {step: ids for step, ids in expected.items() if step > 2}


class Items:
    """Rows with labels that, once told so, only other processes may read."""

    def __init__(self, rows, labels):
        self.rows, self.labels, self.barred = rows, labels, None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        assert os.getpid() != self.barred, f"item {item} was read by the process that computes"
        return {"input_ids": self.rows[item].tolist(), "labels": self.labels[item].tolist()}


def test_a_prepared_run_whose_items_other_processes_read_trains_what_one_device_does():
    rows = models.rows()
    labels = [np.where(np.arange(len(row)) < len(row) // 2, -100, row) for row in rows]
    losses, weights = loop_on_one_device(labels=labels)
    model, items = models.gpt(), Items(rows, labels)
    run = lw.prepare(model, items, cost=models.mixed_cost(), memory_gib=40, workers=2, **OPTIONS)
    items.barred = os.getpid()
    np.testing.assert_allclose(step_through(run)[0], losses, rtol=EXACT)
    assert_equal_weights(weights_of(model), weights)
    run.close()


class OfEpoch:
    epoch = 0

    def __len__(self):
        return 6

    def __getitem__(self, item):
        return (np.arange(8) + item + self.epoch) % models.VOCAB


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_change_with_the_epoch_are_refused_whoever_reads_them(workers):
    items = OfEpoch()
    options = {"tokens_per_step": 24, "epochs": 2, "steps": None, "cost": models.mixed_cost(), "memory_gib": 40}
    run = lw.prepare(model := models.gpt(), items, workers=workers, **OPTIONS | options)
    with run, pytest.raises(LengthwiseError, match="is another one each time that it is read"):
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            items.epoch = run.next_step // 2
    assert run.next_step == 2
