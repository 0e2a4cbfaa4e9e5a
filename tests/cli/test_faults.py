"""Whatever happens to a run, it goes on to the weights it would have had, or says what is wrong and how to go on."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from lengthwise.config.run_config import load
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.corpus import open_corpus
from lengthwise.runtime.state.checkpoint import candidates
from lengthwise.session.planning import make_sampler
from tests.cli.runs import Run, lengthwise, make_corpus, settings, wait_until, weights
from tests.runtime.harness import free_port

STEPS, EVERY = 8, 4
ROUNDING = 1e-10
"""Other ranks add the same float64 numbers in another order."""
MID_STEP_S = 0.03
SAVED_AT_ONCE = "train.checkpoint_async=false"
"""So that the checkpoint before a step is complete when the step is trained."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def options(corpus, folder, *more):
    own = [f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}", "train.dtype=float64", "plan.policy=static"]
    return settings(corpus, folder, *own, "data.max_length=200", "data.tokens_per_step=600", *more)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> Path:
    """The folder of a run of two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    lengthwise("train", *options(corpus, folder), "--nproc", 2)
    return folder


@pytest.fixture
def start(corpus, tmp_path):
    """Start the run again in a folder of its own; what is left of it ends with the test."""
    runs = []

    def start_run(*more, num_ranks=2, torchrun=()):
        if torchrun:
            launcher = ["torch.distributed.run", "--nproc-per-node", num_ranks, *torchrun, "-m", "lengthwise", "train"]
        else:
            launcher = ["lengthwise", "train", "--nproc", num_ranks]
        command = ["-m", *launcher, *options(corpus, tmp_path / "run"), *more]
        runs.append(Run(tmp_path / "run", *command, num_ranks=num_ranks))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill_everything()


def assert_same_run(folder: RunFolder, undisturbed: Path, *, tolerance: float = 0.0) -> None:
    """Every step once in each file, with the losses and at last the weights of the undisturbed run."""
    found, expected = weights(folder.path), weights(undisturbed)
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)
    rows, wanted = folder.read_metrics(), RunFolder(undisturbed).read_metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["loss/avg"] for row in rows] == pytest.approx([row["loss/avg"] for row in wanted], rel=tolerance, abs=0)
    assert sorted(folder.read_plans()) == list(range(STEPS))
    assert folder.read_json("status.json")["state"] == "done"


@pytest.mark.deep  # by default: while ranks meet, below
def test_when_a_rank_is_killed_all_are_started_again(start, undisturbed):
    """Here before there is a checkpoint, unless the machine is slow to kill it."""
    run = start("--max-restarts", 3)
    run.wait_for(0)
    time.sleep(MID_STEP_S)
    run.kill(1)
    code, printed = run.end()
    assert code == 0, printed[-3000:]
    assert printed.count("restart 1: going on from ") == 1 and "restart 2" not in printed
    is_early = f"no checkpoint is complete yet (train.checkpoint_every={EVERY}" in printed
    assert is_early == ("from the first step" in printed)
    assert run.folder.read_json("status.json")["attempt"] == 1
    assert_same_run(run.folder, undisturbed)
    assert sorted(run.folder.read_timelines()) == list(range(STEPS))


@pytest.mark.deep
def test_when_all_ranks_are_killed_bare_torchrun_starts_them_again(start, undisturbed):
    run = start(SAVED_AT_ONCE, torchrun=["--max-restarts", 3, "--master-port", free_port()])
    run.wait_for(EVERY)
    time.sleep(MID_STEP_S)
    run.kill(0, 1)
    code, printed = run.end()
    assert code == 0, printed[-3000:]
    assert printed.count("restart 1: going on from step_") == 1 and "restart 2" not in printed
    assert_same_run(run.folder, undisturbed)


def test_when_a_rank_is_killed_while_ranks_meet_all_are_started_again(start, undisturbed):
    """torchrun signals the other one, which takes it for no request to stop."""
    run = start("--max-restarts", 1)
    wait_until(lambda: (run.folder.path / "ranks.lock").exists() and list(run.process.ranks.glob("1.*")))
    (second,) = run.process.ranks.glob("1.*")
    os.kill(int(second.suffix[1:]), signal.SIGKILL)
    code, printed = run.end()
    assert code == 0 and "stop" not in printed, printed[-3000:]
    assert printed.count("restart 1: going on from ") == 1 and "restart 2" not in printed
    assert run.folder.read_json("status.json")["attempt"] == 1
    assert_same_run(run.folder, undisturbed)
    assert sorted(run.folder.read_timelines()) == list(range(STEPS))


def assert_saved_and_ended(run: Run, code: int) -> None:
    ended, printed = run.end()
    assert ended == code, printed[-3000:]
    assert f"Go on with: lengthwise train --resume {run.folder.path}" in printed
    assert "restart" not in printed and "Traceback" not in printed
    assert run.status() == ("preempted", code)
    assert not run.folder.stop.exists()
    assert candidates(run.folder.checkpoints)[0].name == f"step_{len(run.steps()):08}"


@pytest.mark.deep  # by default: a stop in test_resume_anywhere, a kill below
def test_a_run_goes_on_with_any_number_of_ranks_after_it_was_stopped_or_killed(start, undisturbed):
    run = start("--max-restarts", 2)  # a run that was asked to stop is not started again
    run.wait_for(1)
    run.process.send_signal(signal.SIGTERM)
    assert_saved_and_ended(run, 75)
    rows = len(run.steps())
    assert rows < STEPS

    again = Run(run.folder.path, "-m", "lengthwise", "train", "--resume", run.folder.path, "--nproc", 3, num_ranks=3)
    again.wait_for(0, after=rows)
    time.sleep(MID_STEP_S)
    again.kill(2)
    code, printed = again.end()
    assert code == 1
    assert "error: rank 2 was killed by SIGKILL" in printed
    assert f". Go on with: lengthwise train --resume {run.folder.path}" in printed

    lengthwise("train", "--resume", run.folder.path)
    assert_same_run(run.folder, undisturbed, tolerance=ROUNDING)


def test_a_run_that_is_interrupted_saves_itself(start):
    run = start("--max-restarts", 2, "train.steps=1000", num_ranks=1)
    run.wait_for(0)
    run.process.send_signal(signal.SIGINT)
    assert_saved_and_ended(run, 130)


def test_ranks_whose_launcher_is_killed_save_and_end(start):
    """Before there is a checkpoint: ranks met for those while there was a launcher."""
    run = start("train.steps=1000", "train.checkpoint_every=0", num_ranks=1)
    run.wait_for(1)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(300)
    wait_until(lambda: run.folder.read_json("status.json").get("state") != "running")
    assert run.status() == ("crashed", 1), run.folder.read_json("status.json")["error"]
    assert "the process that started some ranks is gone" in run.folder.read_json("status.json")["error"]
    assert candidates(run.folder.checkpoints)[0].name == f"step_{len(run.folder.read_metrics()):08}"
    wait_until(lambda: "error: the process that started some ranks is gone" in run.log.read_text())
    assert "frame #0" not in run.log.read_text(), "a stack of torch, whose store is gone"


def test_a_mistake_is_not_tried_again(start):
    """A loss that diverges would diverge again, as a wrong setting would be wrong again."""
    settings = ["optim.lr=1000", "optim.clip_norm=0", "optim.schedule=constant", "train.dtype=float32"]
    run = start("--max-restarts", 3, *settings, num_ranks=1)
    code, printed = run.end()
    assert code == 1
    assert printed.count("are not both finite; weights are unchanged") == 1
    assert "restart" not in printed and "Traceback" not in printed
    status = run.folder.read_json("status.json")
    assert (status["state"], status["attempt"]) == ("failed", 0)


@pytest.fixture
def refused(corpus, tmp_path, monkeypatch):
    """Train in this process as the only rank: the exit code and the reason."""
    from lengthwise.cli.worker import run_worker

    class LeftError(Exception):
        pass

    def leave(number):
        raise LeftError(number)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def train(*more, folder=tmp_path / "run", resume=False):
        found = RunFolder(folder)
        with pytest.raises(LeftError) as left:
            run_worker(load(None, options(corpus, folder, *more)), found, resume=resume)
        status = found.read_json("status.json")
        assert (status["state"], (status["exit_code"],)) == ("failed", left.value.args)
        if not resume:
            assert not found.checkpoints.exists() and not found.read_metrics()
            shutil.rmtree(folder)
        return status["exit_code"], status["error"]

    return train


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_if_asked(undisturbed, tmp_path, refused):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    newest, older = candidates(folder / "checkpoints")
    code, error = refused("model.preset=llama-mini", folder=folder, resume=True)
    assert code == 2 and "holds another model" in error
    assert "--fall-back" not in error  # older ones are of the same model

    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    file.write_bytes(content)
    code, error = refused(folder=folder, resume=True)
    assert code == 2 and str(file) in error and f"With --fall-back, {older.name} is used instead" in error
    assert (folder / "config.yaml").read_bytes() == (undisturbed / "config.yaml").read_bytes()

    done = lengthwise("train", "--resume", folder, "--fall-back")
    assert f"warning: {file}" in done.stderr and f"Going on from an older one: {older}" in done.stderr
    assert_same_run(RunFolder(folder), undisturbed, tolerance=ROUNDING)


def plan(corpus, tmp_path, *more):
    file = tmp_path / "plans.jsonl"
    lengthwise("plan", *options(corpus, tmp_path / "run", "cluster.name=1xcpu", *more), "--out", file)
    return file


def test_plans_that_do_not_fit_the_run_are_refused(corpus, tmp_path, refused):
    file = plan(corpus, tmp_path)
    whole = file.read_text()

    code, error = refused(f"plan.file={file}", "seed=1")
    assert code == 4
    assert f"{file} was made for other batches: plan for step 0 loses [(" in error and "plan again" in error

    file.write_text(whole[:-20])
    code, error = refused(f"plan.file={file}")
    last = STEPS - 1
    assert code == 2 and f"no plan for step {last}: it has {last} plans and a last line that is cut off" in error

    file.write_text(whole)
    code, error = refused(f"plan.file={file}", f"train.steps={STEPS + 3}")
    needed = f"it has {STEPS} plans, the run needs those of steps 0 to {STEPS + 2}"
    assert code == 2 and f"no plan for step {STEPS}: {needed}" in error

    file.write_text(whole.replace('"lr_factor": 1.0', '"lr_factor": 3.0', 1))
    code, error = refused(f"plan.file={file}")
    assert code == 4 and f"{file}:1, step 0: plan for step 0 has digest" in error

    documents = [json.loads(line) for line in whole.splitlines()]
    idle = {**documents[0]["pipelines"][0], "ranks": [1], "micro_batches": []}
    documents[0] = {**documents[0], "pipelines": [*documents[0]["pipelines"], idle]}
    del documents[0]["digest"]
    file.write_text(json.dumps(documents))
    code, error = refused(f"plan.file={file}")
    assert code == 2 and "plan for step 0 is for 2 ranks, the run has 1" in error


def test_batches_do_not_depend_on_where_plans_come_from(corpus, undisturbed):
    config = load(undisturbed / "config.yaml", [])
    sampler = make_sampler(config, open_corpus(config.data))
    plans = RunFolder(undisturbed).read_plans()
    for step in range(STEPS):
        plans[step].check_covers(next(sampler))
