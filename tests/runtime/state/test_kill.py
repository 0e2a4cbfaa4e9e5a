"""kill -9 of any or all ranks at any moment: the newest complete checkpoint loads, and the run goes on undisturbed.

Real processes, real signals, asynchronous checkpoints at every step.
"""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lengthwise.core.json_lines import read_jsonl
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.train.step_metrics import Row
from tests.runtime.state.kills import SAVES, STARTED, TRAINS, Attempt, Nursery, unfinished_saves
from tests.sim.random_plans import SPEC

STEPS = 8
SETTINGS = {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 2}
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory) -> list[Row]:
    """Metrics of the undisturbed run on two ranks."""
    return undisturbed(nursery, tmp_path_factory.mktemp("undisturbed") / "run", num_ranks=2)


def undisturbed(nursery: Nursery, folder: Path, *, num_ranks: int) -> list[Row]:
    settings = {"steps": STEPS, "checkpoint_every": 0}
    assert set(nursery.run(Attempt(folder=folder, settings=settings, num_ranks=num_ranks))) == {0}
    return RunFolder(folder).read_metrics()


def test_ranks_killed_at_random_moments_lose_no_complete_checkpoint(nursery, whole, tmp_path):
    kill_at_random(nursery, whole, tmp_path, num_kills=2, num_ranks=2)


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_killed_at_many_more_random_moments_lose_no_complete_checkpoint(nursery, tmp_path, num_ranks):
    expected = undisturbed(nursery, tmp_path / "undisturbed", num_ranks=num_ranks)
    kill_at_random(nursery, expected, tmp_path, num_kills=300, num_ranks=num_ranks)


def kill_at_random(nursery, whole, path, *, num_kills, num_ranks):
    """Every other kill is to come while the first, second or third checkpoint is written; a tenth has to.

    A run that comes to its end is looked at and begun anew in another folder.
    """
    rng, run = random.Random(0), Run(path / "0", whole)
    attempts = killed = in_a_save = 0
    while killed < num_kills or in_a_save <= num_kills // 10:  # how many do is a matter of time
        attempts += 1
        assert attempts <= 20 * num_kills, f"{killed} kills of {attempts} attempts, {in_a_save} while saving"
        after = rng.choice([STARTED, TRAINS, SAVES, SAVES])
        attempt = Attempt(
            folder=run.folder,
            settings=SETTINGS,
            num_ranks=num_ranks,
            victims=tuple(rng.sample(range(num_ranks), rng.randint(1, num_ranks))),
            after=after,
            num_saves=rng.randint(1, 3),
            delay_s=rng.uniform(0.0, 0.03 if after == SAVES else 0.4),
        )
        stale = unfinished_saves(run.folder)
        ends = nursery.run(attempt)
        run.check(ends)
        killed += KILLED in ends
        in_a_save += not unfinished_saves(run.folder) <= stale
        if KILLED not in ends:
            run.check_finished()
            run = Run(path / str(attempts), whole)
    run.check(nursery.run(Attempt(folder=run.folder, settings=SETTINGS, num_ranks=num_ranks)))
    run.check_finished()


@pytest.mark.deep
def test_a_first_rank_killed_before_any_operation_on_files_loses_no_complete_checkpoint(nursery, whole, tmp_path):
    """Of a save into a folder as the kill before left it, and of the next one."""
    run = Run(tmp_path / "run", whole)
    for number in range(30):
        ends = nursery.run(Attempt(folder=run.folder, settings=SETTINGS, dies_before=number))
        run.check(ends)
        if ends[0] != KILLED:  # the last steps are less operations than that
            run.check_finished()
            run = Run(tmp_path / f"run after {number}", whole)
    run.check(nursery.run(Attempt(folder=run.folder, settings=SETTINGS)))
    run.check_finished()


class Run:
    """A run folder, and what must hold of it after every kill."""

    def __init__(self, folder: Path, whole: list[Row]) -> None:
        self.folder = folder
        self.losses = {row["step"]: row["loss/avg"] for row in whole}
        self.newest = 0
        """Step of the newest complete checkpoint that was seen."""

    def check(self, ends: list[int]) -> None:
        """Ranks were killed or ended by themselves; what is complete is intact; what was trained is the same."""
        assert set(ends) <= {0, 1, KILLED}, f"{ends}: {self.errors()}"
        if KILLED not in ends:
            assert set(ends) == {0}, self.errors()
        for row in read_jsonl(RunFolder(self.folder).metrics):
            assert row["loss/avg"] == self.losses[row["step"]], row["step"]
        checkpoints = RunFolder(self.folder).checkpoints
        found = checkpoint.candidates(checkpoints)
        if not found:
            assert not self.newest, f"the checkpoint of step {self.newest} is gone"
            return
        for path in found:
            assert path.name == f"step_{checkpoint.verify(path)['step']:08d}"
        newest = checkpoint.read_state(checkpoint.latest(checkpoints))["step"]
        assert newest >= self.newest
        assert sum(weight.numel() for weight in checkpoint.load_weights(found[0], SPEC).values()) == SPEC.num_params
        self.newest = newest

    def check_finished(self) -> None:
        """All steps are done, and the last checkpoint is of the last step."""
        assert [row["step"] for row in RunFolder(self.folder).read_metrics()] == list(range(STEPS))
        assert self.newest == STEPS

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("error_of_rank_*"))
