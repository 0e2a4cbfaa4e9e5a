"""The loop: resumes to the bit, stops when asked, keeps its records straight."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from lengthwise.config import check
from lengthwise.core.errors import InputError, Preempted
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.sampler import Sampler
from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.train.trainer import Trainer
from tests.runtime.train.runs import SPEC, RandomTokens, local_world, random_plan

LENGTHS = np.random.default_rng(0).integers(1, 25, 40)


class Stop:
    """A callback that asks this process to stop after a step, as a scheduler would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, row):
        if row["step"] + 1 == self.after:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self):
        pass


def make_trainer(path: str, *, callbacks=(), **settings) -> Trainer:
    """Seven sequences a step, planned at random but alike on every rank."""
    world = local_world()
    settings = {"steps": 8, "dtype": "float64", "checkpoint_every": 3, **settings}
    config = check({"train": settings, "optim": {"lr": 1e-2, "warmup_steps": 2}})
    index = LengthIndex(lengths=LENGTHS)
    return Trainer(
        config=config,
        spec=SPEC,
        model=build_model(SPEC, dtype=torch.float64, seed=1),
        source=RandomTokens(dict(enumerate(LENGTHS.tolist()))),
        stream=Sampler(index, seed=4, sequences_per_step=7),
        planner=lambda batch: random_plan(random.Random(batch.step), batch, world.size),
        folder=RunFolder(Path(path)),
        world=world,
        callbacks=callbacks if world.is_first else (),
    )


def run_whole(path: str) -> torch.Tensor:
    trainer = make_trainer(path)
    trainer.fit()
    return trainer.state.weights.clone()


def run_in_parts(path: str, stop_after: int) -> torch.Tensor:
    first = make_trainer(path, callbacks=[Stop(stop_after)])
    with pytest.raises(Preempted, match=r"saved\. Go on with"):
        first.fit()
    second = make_trainer(path)
    second.resume(checkpoint.latest(Path(path) / "checkpoints"))
    assert second.next_step == stop_after
    second.fit()
    return second.state.weights.clone()


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_run_that_is_stopped_and_resumed_ends_at_the_same_weights_to_the_bit(ranks, tmp_path, stop_after):
    whole = ranks(2).run(run_whole, str(tmp_path / "whole"))
    parts = ranks(2).run(run_in_parts, str(tmp_path / "parts"), stop_after)
    for expected, actual in zip(whole, parts):
        assert torch.equal(expected, actual)
    records = [RunFolder(tmp_path / name).read_metrics() for name in ("whole", "parts")]
    assert [row["step"] for row in records[1]] == list(range(8))
    assert [row["loss/avg"] for row in records[0]] == [row["loss/avg"] for row in records[1]]
    assert [row["plan/id"] for row in records[0]] == [row["plan/id"] for row in records[1]]


def test_every_step_leaves_metrics_a_plan_and_a_timeline_of_all_ranks(ranks, tmp_path):
    ranks(2).run(run_whole, str(tmp_path))
    folder = RunFolder(tmp_path)
    plans, timelines, rows = folder.read_plans(), folder.read_timelines(), folder.read_metrics()
    assert sorted(plans) == sorted(timelines) == [row["step"] for row in rows] == list(range(8))
    for row in rows:
        plan, timeline = plans[row["step"]], timelines[row["step"]]
        assert row["plan/id"] == plan.digest
        assert row["perf/step_time_s"] == pytest.approx(timeline.step_time_s, abs=1e-5)
        computed = {(s.rank, s.name) for s in timeline.spans if s.kind == "compute"}
        assert len(computed) == sum(len(p.micro_batches) * p.scheme.degree for p in plan.pipelines)


def test_the_newest_checkpoints_are_kept_and_the_others_removed(ranks, tmp_path):
    ranks(2).run(run_whole, str(tmp_path))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["latest", "step_00000006", "step_00000008"]
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step_00000008"


def test_a_checkpoint_of_other_data_is_refused(ranks, tmp_path):
    ranks(2).run(_check_other_data, str(tmp_path))


def _check_other_data(path):
    trainer = make_trainer(path, steps=1)
    trainer.fit()
    other = make_trainer(path)
    other.stream = Sampler(LengthIndex(lengths=LENGTHS + 1), seed=4, sequences_per_step=7)
    with pytest.raises(InputError):
        other.resume(checkpoint.latest(Path(path) / "checkpoints"))
