"""The loop: resumes to the bit, stops when asked, keeps its records straight."""

import errno
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lengthwise.config.run_config import check
from lengthwise.core.errors import CommunicationError, InputError, LengthwiseError, Preempted
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.sliced_passes import slices_of
from lengthwise.core.zero_bubble import splits
from lengthwise.data.sampler import Sampler
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint, checkpoint_files
from lengthwise.runtime.train.stop import StopCause, StopRequest
from lengthwise.runtime.train.trainer import TrainingLoop
from lengthwise.runtime.train.training_engine import TransformerEngine
from tests.runtime.train.runs import RandomTokens, local_world, master_weights
from tests.sim.random_plans import SPEC, random_plan

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
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


def make_trainer(path: str, *, callbacks=(), optimizer: str = "adamw", **settings) -> TrainingLoop:
    """Seven sequences a step, planned at random but alike on every rank."""
    world = local_world()
    settings = {"steps": 8, "dtype": "float64", "checkpoint_every": 3, **settings}
    config = check({"train": settings, "optim": {"name": optimizer, "lr": 1e-2, "warmup_steps": 2}})
    index = LengthIndex(lengths=LENGTHS)
    source = RandomTokens(dict(enumerate(LENGTHS.tolist())))
    model = build_model(SPEC, dtype=torch.float64, seed=1)
    return TrainingLoop(
        config=config,
        engine=TransformerEngine(model, world, config=config, spec=SPEC, source=source),
        spec=SPEC,
        stream=Sampler(index, seed=4, sequences_per_step=7),
        planner=lambda batch: random_plan(random.Random(batch.step), batch, world.size),
        folder=RunFolder(Path(path)),
        world=world,
        callbacks=callbacks if world.is_first else (),
    )


def run_whole(path: str, **settings) -> dict[str, torch.Tensor]:
    trainer = make_trainer(path, **settings)
    trainer.fit()
    return master_weights(trainer.state)


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> tuple[str, dict[str, torch.Tensor]]:
    """The folder and the last weights of a run of two ranks that nothing happens to."""
    path = str(tmp_path_factory.mktemp("undisturbed"))
    return path, ranks(2).run(run_whole, path)[0]


def run_until_stopped(path: str, stop_after: int, **settings) -> None:
    trainer = make_trainer(path, callbacks=[Stop(stop_after)], **settings)
    with pytest.raises(Preempted, match=r"saved\. Go on with"):
        trainer.fit()


@pytest.mark.parametrize(("elsewhere", "kind"), [(StopCause.LAUNCHER_GONE, CommunicationError), (0, Preempted)])
def test_a_signal_that_torchrun_sends_as_it_lost_a_machine_is_no_request_to_stop(
    tmp_path, monkeypatch, elsewhere, kind
):
    """Ranks may see a while after the signal that their torchrun is gone: on the machine that hosted its store."""
    monkeypatch.setattr("lengthwise.runtime.train.trainer.gather_json", lambda world, value: [value, int(elsewhere)])
    loop = SimpleNamespace(
        world=SimpleNamespace(is_first=True), folder=RunFolder(tmp_path), next_step=3, validation=None
    )
    stop = StopRequest(tmp_path / "stop")
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.heed_launcher(lambda: True)  # later, and here a consequence of the signal
        error = TrainingLoop._stopped(loop, StopCause.SIGNAL, stop)
    finally:
        stop.close()
    assert type(error) is kind and "saved. Go on with" in str(error)


def test_a_stop_request_knows_when_the_last_step_is_done(ranks, tmp_path):
    assert ranks(2).run(moments_of, str(tmp_path / "done"), 9) == [["begun", "trained"]] * 2
    assert ranks(2).run(moments_of, str(tmp_path / "stopped"), 1) == [["begun"]] * 2


def moments_of(path: str, stop_after: int) -> list[str]:
    """What a run notes of its steps, which is stopped after ``stop_after`` ones if it has so many."""
    moments: list[str] = []
    trainer = make_trainer(path, callbacks=[Stop(stop_after)], steps=2)
    notes = {"on_begin": lambda: moments.append("begun"), "on_end": lambda: moments.append("trained")}
    trainer.stop = StopRequest(Path(path) / "stop", end_start=lambda cause: None, **notes)
    try:
        with suppress(Preempted):
            trainer.fit()
    finally:
        trainer.stop.close()
    return moments


def run_on(path: str, stop_after: int, **settings) -> dict[str, torch.Tensor]:
    trainer = make_trainer(path, **settings)
    trainer.resume(checkpoint.latest(Path(path) / "checkpoints"))
    assert trainer.next_step == stop_after
    trainer.fit()
    return master_weights(trainer.state)


@pytest.mark.parametrize(
    ("stop_after", "is_async"),
    [(1, True), *(pytest.param(*p, marks=pytest.mark.deep) for p in ((5, False), (1, False), (5, True)))],
)
def test_a_run_that_is_stopped_and_resumed_ends_at_the_same_weights_to_the_bit(
    ranks, undisturbed, tmp_path, stop_after, is_async
):
    (whole, expected), parts = undisturbed, str(tmp_path)
    ranks(2).run(run_until_stopped, parts, stop_after, checkpoint_async=is_async)
    for found in ranks(2).run(run_on, parts, stop_after, checkpoint_async=is_async):
        for name, weight in expected.items():
            assert torch.equal(weight, found[name]), name
    for column in ("step", "loss/avg", "plan/id", "lr"):
        assert column_of(parts, column) == column_of(whole, column)


def column_of(path: str, name: str) -> list:
    return [row[name] for row in RunFolder(Path(path)).read_metrics()]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("adamw", 2, 3),
        *(pytest.param(*p, marks=pytest.mark.deep) for p in (("adafactor", 3, 1), ("adamw", 1, 4), ("sgd", 3, 2))),
    ],
)
def test_a_run_resumed_on_other_ranks_with_other_strategies_goes_on_exactly(
    ranks, undisturbed, tmp_path, optimizer, before, after
):
    (whole, expected), parts = undisturbed, str(tmp_path / "parts")
    if (optimizer, before) != ("adamw", 2):
        whole = str(tmp_path / "whole")
        expected = ranks(before).run(run_whole, whole, optimizer=optimizer)[0]
    ranks(before).run(run_until_stopped, parts, 4, optimizer=optimizer)
    for found in ranks(after).run(run_on, parts, 4, optimizer=optimizer):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=EXACT, atol=EXACT)
    for column in ("step", "lr", "data/num_tokens", "data/max_len"):
        assert column_of(parts, column) == column_of(whole, column)
    assert column_of(parts, "loss/avg") == pytest.approx(column_of(whole, "loss/avg"), rel=EXACT)
    assert column_of(parts, "plan/id")[4:] != column_of(whole, "plan/id")[4:]


def run_without_room(path: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The engine finds no room for the first plan of the third step."""
    trainer, planned = make_trainer(path), []
    compute, plan_of = trainer.engine.compute_step, trainer.planner
    trainer.planner = lambda batch: planned.append(batch.step) or plan_of(batch)
    trainer.engine.compute_step = lambda plan, clock, *, lr: (
        None if plan.step == 2 and planned.count(2) == 1 else compute(plan, clock, lr=lr)
    )
    trainer.fit()
    return master_weights(trainer.state), planned


@pytest.mark.deep  # by default: test_out_of_memory, and tests/session/test_memory_limit.py
def test_a_step_that_does_not_fit_is_planned_again_on_the_same_batch(ranks, undisturbed, tmp_path):
    _, expected = undisturbed
    weights, planned = ranks(2).run(run_without_room, str(tmp_path / "again"))[0]
    assert planned == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.items())
    assert column_of(str(tmp_path / "again"), "step") == list(range(8))


def test_a_run_whose_checkpoint_cannot_be_written_ends_on_all_ranks_before_the_next_step(ranks, tmp_path):
    assert ranks(2).run(_fail_to_write, str(tmp_path)) == [4] * 2
    assert [path.name for path in checkpoint.candidates(tmp_path / "checkpoints")] == []


def _fail_to_write(path):
    """Rank 1 cannot write the checkpoint after step 3; that it failed is known when step 4 is done."""
    trainer = make_trainer(path)
    if trainer.world.is_first:
        trainer.callbacks = [WaitForSaver(trainer)]
    with pytest.MonkeyPatch.context() as patch:
        if trainer.world.rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", _no_space)
        with pytest.raises(LengthwiseError, match=r"step 3 could not be written .*rank 1: OSError: .*No space left"):
            trainer.fit()
    return trainer.next_step


def _no_space(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


class WaitForSaver:
    """A callback that ends step 4 when the checkpoint of step 3 has been given up."""

    def __init__(self, trainer: TrainingLoop) -> None:
        self.saver = trainer._saver

    def on_step(self, row):
        if row["step"] == 3:
            self.saver._thread.join(50)

    def close(self):
        pass


def test_a_stop_right_after_a_checkpoint_waits_for_it_and_writes_no_second(ranks, tmp_path):
    assert ranks(2).run(_saves_until_stopped, str(tmp_path)) == [["step_00000003"], []]


def _saves_until_stopped(path):
    begun, begin = [], checkpoint_files.begin

    def seen_to_begin(folder, name):
        begun.append(name)
        return begin(folder, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "begin", seen_to_begin)
        run_until_stopped(path, 3)
    assert checkpoint.latest(Path(path) / "checkpoints").name == "step_00000003"
    return begun


def test_every_step_leaves_metrics_a_plan_and_a_timeline_of_all_ranks(undisturbed):
    folder = RunFolder(Path(undisturbed[0]))
    plans, timelines, rows = folder.read_plans(), folder.read_timelines(), folder.read_metrics()
    assert sorted(plans) == sorted(timelines) == [row["step"] for row in rows] == list(range(8))
    for row in rows:
        plan, timeline = plans[row["step"]], timelines[row["step"]]
        assert row["plan/id"] == plan.digest
        assert row["perf/step_time_s"] == pytest.approx(timeline.step_time_s, abs=1e-5)
        assert {(s.rank, s.name) for s in timeline.spans if s.kind == "compute"} == passes_of(plan)


def passes_of(plan) -> set[tuple[int, str]]:
    """The passes of every micro-batch, or of its slices, on every rank of its pipeline."""
    return {
        (rank, f"{name} {part.name}")
        for pipeline in plan.pipelines
        for part in slices_of(pipeline)
        for stage in range(pipeline.scheme.num_stages)
        for rank in pipeline.ranks_of(stage)
        for name in ("forward", "backward", "weights")
        if name != "weights" or splits(pipeline, stage, part.number)
    }


def test_records_that_a_kill_cut_off_in_a_line_are_mended_when_the_run_goes_on(ranks, tmp_path):
    """And what the kill lost is written again, as the steps behind the checkpoint are trained again. Rows of steps that
    the run has left behind, as it once went back to an older checkpoint, are gone.
    """
    ranks(2).run(run_until_stopped, str(tmp_path), 5)
    files = [tmp_path / "metrics.jsonl", tmp_path / "plans.jsonl", *(tmp_path / "timeline").iterdir()]
    assert len(files) == 4
    for file in files:
        file.write_text('{"step": 99}\n' + file.read_text()[:-20])
    ranks(2).run(run_on, str(tmp_path), 5)
    folder = RunFolder(tmp_path)
    for steps in (folder.read_metrics(), folder.read_plans(), folder.read_timelines()):
        assert [row["step"] if isinstance(row, dict) else row for row in steps] == [0, 1, 2, 3, 5, 6, 7]


def test_the_newest_checkpoints_are_kept_and_the_others_removed(undisturbed):
    checkpoints = Path(undisturbed[0]) / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000006", "step_00000008"]
    assert checkpoint.latest(checkpoints).name == "step_00000008"


def test_a_checkpoint_of_other_data_is_refused(ranks, tmp_path):
    ranks(2).run(_check_other_data, str(tmp_path))


def _check_other_data(path):
    trainer = make_trainer(path, steps=1)
    trainer.fit()
    other = make_trainer(path)
    other.stream = Sampler(LengthIndex(lengths=LENGTHS + 1), seed=4, sequences_per_step=7)
    with pytest.raises(InputError):
        other.resume(checkpoint.latest(Path(path) / "checkpoints"))


def stamps(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("settings", [{}, {"keep_checkpoints": 1, "timeline": True}, {"steps": 1}])
def test_a_resume_of_a_complete_run_writes_nothing(ranks, tmp_path, settings):
    ranks(2).run(run_whole, str(tmp_path), steps=2, timeline=False)
    before = stamps(tmp_path)
    weights = ranks(1).run(run_on, str(tmp_path), 2, **{"steps": 2, "timeline": False, **settings})[0]
    assert stamps(tmp_path) == before and weights


def test_a_resume_that_is_stopped_before_its_first_step_saves_nothing(ranks, tmp_path):
    ranks(2).run(run_whole, str(tmp_path), steps=2)
    before = stamps(tmp_path / "checkpoints")
    ranks(2).run(_stop_at_once, str(tmp_path))
    assert stamps(tmp_path / "checkpoints") == before
    ranks(1).run(run_on, str(tmp_path), 2, steps=3)


def _stop_at_once(path: str) -> None:
    trainer = make_trainer(path, steps=3)
    trainer.resume(checkpoint.latest(Path(path) / "checkpoints"))
    trainer.folder.stop.touch()
    with pytest.raises(Preempted, match=r"before step 3; saved\. Go on with"):
        trainer.fit()
