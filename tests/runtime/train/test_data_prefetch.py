"""Tensors made ahead of computing are those made on the spot; what cannot be read is told where it is computed."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from lengthwise.core.batch import Pack
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.sliced_passes import slices_of
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.train.data_prefetch import Prefetcher, packs_of
from lengthwise.runtime.train.micro_batch_tensors import feed
from lengthwise.sim.schedule_check import OperationKind, operations
from tests.runtime.train.runs import master_weights
from tests.runtime.train.test_trainer import make_trainer
from tests.sim.random_plans import random_batch, random_plan

CPU = torch.device("cpu")
MASKING = TokenMasking(seed=11, vocab_size=61, mask_token_id=60)


class Source:
    """Sequences as long as their id says; a record of what was read, and a gate that reading waits for."""

    def __init__(self, *, broken=(), is_open=True):
        self.read, self.broken, self.gate, self.asked = [], broken, threading.Event(), threading.Event()
        if is_open:
            self.gate.set()

    def tokens(self, sequence):
        self.asked.set()
        self.gate.wait(50)
        self.read.append(sequence)
        if sequence in self.broken:
            raise OSError(5, "Input/output error")
        return np.random.default_rng(sequence).integers(0, 60, sequence).astype(np.uint16)


def packs_like(*ids):
    return [Pack(ids=(id, id + 1), lengths=(id, id + 1)) for id in ids]


def assert_made(prefetcher, packs, *, masking=None):
    for pack in packs:
        found, expected = prefetcher.take(pack), feed(Source(), pack, CPU, masking=masking)
        assert torch.equal(found.tokens_T, expected.tokens_T) and torch.equal(found.targets_T, expected.targets_T)
        assert found.cu_seqlens == expected.cu_seqlens


def read_by(prefetcher, source, count=6):
    """All that is read, once ``count`` sequences are."""
    end = time.monotonic() + 50
    while len(source.read) < count and time.monotonic() < end:
        time.sleep(0.001)
    assert prefetcher._jobs.empty()
    return source.read


@pytest.fixture
def made():
    """Prefetchers that end with the test."""
    prefetchers = []

    def make(source, **options):
        prefetchers.append(Prefetcher(source, CPU, **options))
        return prefetchers[-1]

    yield make
    for prefetcher in prefetchers:
        prefetcher.close()


def test_the_micro_batches_of_a_rank_are_those_of_its_forwards_in_their_order():
    rng = random.Random(3)
    for step in range(40):
        num_ranks = rng.randint(1, 5)
        plan = random_plan(rng, random_batch(rng, step), num_ranks)
        lists = operations(plan, rng.choice(list(PipelineSchedule)))
        for rank in range(num_ranks):
            forwards = [one for _, of_ranks in lists for one in of_ranks[rank] if one.kind is OperationKind.FORWARD]
            assert packs_of(plan, rank) == [
                plan.pipelines[one.pipeline].micro_batches[one.micro_batch].pack
                for one in forwards
                if not slices_of(plan.pipelines[one.pipeline])[one.number].part  # later slices are of the same tensors
            ]


@pytest.mark.parametrize("masking", [None, MASKING])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_what_is_made_ahead_is_what_is_made_on_the_spot(made, depth, masking):
    source = Source()
    prefetcher = made(source, masking=masking, depth=depth)
    steps = [packs_like(3, 9, 1), [], packs_like(4), packs_like(7, 2, 5, 6)]
    for step, after in zip(steps, [*steps[1:], []]):
        prefetcher.start(step, following=lambda after=after: after)
        assert_made(prefetcher, step, masking=masking)
    assert source.read == [id for step in steps for pack in step for id in pack.ids]  # each once, in order


def test_another_step_than_was_expected_is_made_anew(made):
    prefetcher = made(Source(), depth=2)
    prefetcher.start(packs_like(3), following=lambda: packs_like(8, 9))
    assert_made(prefetcher, packs_like(3))
    prefetcher.start(packs_like(8, 4))
    assert_made(prefetcher, packs_like(8, 4))


def test_as_many_are_read_ahead_as_asked_for_and_no_more(made):
    source = Source()
    prefetcher = made(source, depth=2)
    prefetcher.start(packs_like(10, 20, 30, 40, 50))
    assert_made(prefetcher, packs_like(10))
    assert read_by(prefetcher, source) == [10, 11, 20, 21, 30, 31]


def test_the_step_after_is_read_while_the_last_micro_batch_of_this_one_is_computed_if_its_plan_is_known(made):
    source, plans = Source(), []
    prefetcher = made(source, depth=2)
    prefetcher.start(packs_like(10, 20), following=lambda: plans)
    assert_made(prefetcher, packs_like(10))
    plans += packs_like(30)
    assert_made(prefetcher, packs_like(20))
    assert read_by(prefetcher, source) == [10, 11, 20, 21, 30, 31]


def test_what_cannot_be_read_is_raised_at_its_micro_batch_with_the_sequence(made):
    prefetcher = made(Source(broken={20}), depth=3)
    prefetcher.start(packs_like(10, 20, 30))
    assert_made(prefetcher, packs_like(10))
    with pytest.raises(LengthwiseError, match=r"sequence 20 \(20 tokens\) could not be read: OSError: .*Input/output"):
        prefetcher.take(packs_like(20)[0])
    assert_made(prefetcher, packs_like(30))


def test_a_sequence_of_another_length_than_planned_is_told(made):
    prefetcher = made(Source(), depth=1)
    pack = Pack(ids=(1,), lengths=(4,))  # one token would fill any place
    prefetcher.start([pack])
    with pytest.raises(LengthwiseError, match="sequence 1 has 1 tokens, its plan says 4; the data has changed"):
        prefetcher.take(pack)


def test_closing_does_not_wait_for_a_source_that_hangs():
    source = Source(is_open=False)
    prefetcher = Prefetcher(source, CPU, depth=2)
    prefetcher.start(packs_like(10, 20))
    assert source.asked.wait(50)
    closing = threading.Thread(target=prefetcher.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and prefetcher._thread.is_alive() and prefetcher._thread.daemon
    source.gate.set()
    prefetcher._thread.join(20)
    assert not prefetcher._thread.is_alive()
    assert source.read == [10, 11]  # what was not begun is left


def test_a_run_that_reads_ahead_is_the_same_to_the_bit_and_says_how_long_it_waited(ranks, tmp_path):
    (ahead, rows), (on_the_spot, _) = (ranks(2).run(_train, str(tmp_path / str(depth)), depth)[0] for depth in (2, 0))
    for name, weight in on_the_spot.items():
        assert torch.equal(weight, ahead[name]), name
    for row in rows:
        assert 0 <= row["time/data_wait_s"] <= row["perf/step_time_s"]
        assert row["data/wait_frac"] == row["time/data_wait_s"] / row["perf/step_time_s"]
    assert ranks(1).run(_fails_to_read, str(tmp_path / "broken")) == [1]


class Rows(list):
    def on_step(self, row):
        self.append(row)

    def close(self):
        pass


def _trainer(path, depth):
    rows = Rows()
    trainer = make_trainer(path, steps=3, callbacks=[rows])
    trainer.config = trainer.config.model_copy(
        update={"data": trainer.config.data.model_copy(update={"prefetch": depth})}
    )
    return trainer, rows


def _train(path, depth):
    trainer, rows = _trainer(path, depth)
    trainer.fit()
    assert all(thread.name != "prefetch" for thread in threading.enumerate())
    return master_weights(trainer.state), list(rows)


def _fails_to_read(path):
    """What the second step computes first cannot be read; how many steps were done."""
    trainer, _ = _trainer(path, 2)
    read = trainer.engine.source.tokens

    def tokens(sequence):
        if trainer.next_step == 1:
            raise OSError(5, "Input/output error")
        return read(sequence)

    trainer.engine.source.tokens = tokens
    with pytest.raises(LengthwiseError, match=r"sequence \d+ \(\d+ tokens\) could not be read"):
        trainer.fit()
    return trainer.next_step
