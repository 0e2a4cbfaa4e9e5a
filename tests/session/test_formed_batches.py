"""Batches that are formed for the ranks there are: every sequence once, whichever ranks go on."""

from collections import Counter
from functools import partial

import numpy as np
import pytest

import lengthwise as lw
from tests.session import models
from tests.session.loops import as_started_by_torchrun

pytestmark = pytest.mark.usefixtures("unchecked")

OPTIONS = {
    "form_batches": True, "epochs": 1, "sequences_per_step": 6, "policy": "dcp-inter", "cost": models.mixed_cost(),
    "memory_gib": 40, "verbose": False,
}  # fmt: skip


def rows():
    rng = np.random.default_rng(0)
    return [rng.integers(0, models.VOCAB, length) for length in rng.integers(2, 60, 24)]


def train(folder, steps):
    """The sequences of each step of up to ``steps``, from the checkpoint that there is, and those of the ledger."""
    as_started_by_torchrun()
    run = lw.prepare(model := models.gpt(), rows(), **OPTIONS)
    if folder.exists():
        run.resume(folder)
    computed = Counter()
    for step in run.steps():
        computed.update(i for p in step.plan.pipelines for m in p.micro_batches for i in m.pack.ids)
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        if run.next_step == steps:
            run.save(folder)
            break
    run.close()
    return computed, run.ledger.sequences


@pytest.mark.parametrize(
    ("first", "then"), [(1, 2), *(pytest.param(*n, marks=pytest.mark.deep) for n in ((3, 1), (1, 3)))]
)
def test_a_run_that_goes_on_with_other_ranks_computes_every_sequence_once(ranks, tmp_path, first, then):
    before, _ = ranks(first).run(partial(train, tmp_path / "steps", 2))[0]
    after, num_counted = ranks(then).run(partial(train, tmp_path / "steps", None))[0]
    assert before + after == Counter(range(24)) and num_counted == 24 and before and after
