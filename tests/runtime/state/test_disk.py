"""Disks that are full, folders that are gone or not shared, weights that are no numbers: what was safe stays safe."""

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from lengthwise.core.errors import InputError, LengthwiseError, Preempted
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state import checkpoint, checkpoint_files, saver, shared_folder
from lengthwise.runtime.state.saver import CheckpointSaver
from tests.runtime.state.kills import OPERATIONS
from tests.runtime.state.saved import assert_same_tensors, loaded, save_trained, train, trained, whole_contents
from tests.runtime.train.runs import master_weights
from tests.runtime.train.test_trainer import make_trainer


def test_a_checkpoint_in_a_folder_that_ranks_do_not_share_is_refused_and_nothing_is_left(ranks, tmp_path):
    told = ranks(3).run(_save_apart, str(tmp_path))
    assert len(set(told)) == 1
    assert "is not one folder for all ranks: rank 2 on " in told[0] and "what rank 0 on " in told[0]
    assert [path.name for path in (tmp_path / "shared").iterdir()] == []
    assert not (tmp_path / "local").exists()


def _save_apart(path) -> str:
    _, state = trained()
    folder = Path(path) / ("local" if state.world.rank == 2 else "shared")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as refused:
        patch.setattr(shared_folder, "PATIENCE_S", 0.2)
        checkpoint.save(folder, state, {"step": 2}, keep=1)
    return str(refused.value).replace("/shared/", "/").replace("/local/", "/")


def test_a_folder_that_another_process_saves_to_is_refused_and_what_that_writes_is_left_alone(ranks, tmp_path):
    (tmp_path / "step_00000002.partial").mkdir()
    with checkpoint_files.lock_of_save(tmp_path).held():
        for told in ranks(2).run(_save_beside, str(tmp_path)):
            assert "could not be written" in told and f"in use by another save: process {os.getpid()} on " in told
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002.partial"]
    ranks(2).run(save_trained, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002"]


def _save_beside(path) -> str:
    _, state = trained()
    with pytest.raises(LengthwiseError) as refused:
        checkpoint.save(Path(path), state, {"step": 2}, keep=1)
    return str(refused.value)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_weights_that_are_not_finite_on_any_rank_make_no_checkpoint(ranks, tmp_path, num_ranks):
    for told in ranks(num_ranks).run(_save_broken, str(tmp_path)):
        assert "the weights after step 3 are not finite" in told and f"on rank {num_ranks - 1}" in told
        assert "the newest is step_00000002" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002"]


def _save_broken(path) -> str:
    model, state = trained()
    writer = CheckpointSaver(Path(path), state, keep=1)
    writer.save({"step": 2}, wait=True)
    train(model, state, first=2, steps=1)
    if state.world.rank == state.world.size - 1:
        state.master[-1] = float("inf")
    writer.save({"step": 3}, wait=False)
    with pytest.raises(LengthwiseError) as told:
        writer.wait()
    assert not isinstance(told.value.__cause__, OSError)
    writer.close()
    return str(told.value)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("change", "__1_0.distcp has changed"),
        *(
            pytest.param(*harm, marks=pytest.mark.deep)
            for harm in (("lose", "__1_0.distcp is missing"), ("cut", "__1_0.distcp has .* bytes of"))
        ),
    ],
)
def test_a_file_that_is_not_as_its_rank_wrote_it_makes_no_checkpoint(ranks, tmp_path, harm, reason):
    ranks(2).run(_save_and_harm, str(tmp_path), harm, reason)
    assert not list(tmp_path.iterdir())


def _save_and_harm(path, harm, reason):
    _, state = trained()
    digests = saver._digests

    def then_harmed(partial, world):
        listed = digests(partial, world)
        if world.rank == 1:
            file = partial / "__1_0.distcp"
            content = file.read_bytes()
            file.write_bytes(content[:-1] + (b"" if harm == "cut" else b"?"))
            if harm == "lose":
                file.unlink()
        return listed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_digests", then_harmed)
        with pytest.raises(LengthwiseError, match=rf"(?s)could not be written .*{reason}.*nothing to go on from"):
            checkpoint.save(Path(path), state, {"step": 2}, keep=1)


class Refusing:
    """A disk that refuses the operations on files from one on, or that one alone."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, *, is_lasting: bool) -> None:
        self.num_done, self.first, self.is_lasting, self.has_refused = 0, first, is_lasting, False
        patch.setattr(os, "fsync", lambda descriptor: None)  # refused in its turn, but not done: it takes long
        for name in (*OPERATIONS, "open", "stat"):
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation):
        def do_or_refuse(*arguments, **options):
            number, self.num_done = self.num_done, self.num_done + 1
            if number == self.first or (self.is_lasting and number > self.first):
                self.has_refused = True
                raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))
            return operation(*arguments, **options)

        return do_or_refuse


@pytest.mark.parametrize(
    "is_lasting", [pytest.param(False, marks=pytest.mark.deep), True], ids=["once", "from then on"]
)
def test_a_disk_that_refuses_any_operation_of_a_save_leaves_the_checkpoint_before_it(ranks, tmp_path, is_lasting):
    assert ranks(1).run(_refuse_each, str(tmp_path), is_lasting)[0] > 10


def _refuse_each(path, is_lasting) -> int:
    folder, before = Path(path) / "checkpoints", Path(path) / "before"
    model, state = trained()
    writer = CheckpointSaver(folder, state, keep=1)
    writer.save({"step": 2}, wait=True)
    expected = whole_contents(state)
    shutil.copytree(folder, before)
    train(model, state, first=2, steps=1)
    number, num_failed, has_refused = 0, 0, True
    while has_refused:
        with pytest.MonkeyPatch.context() as patch:
            disk = Refusing(patch, number, is_lasting=is_lasting)
            try:
                writer.save({"step": 3}, wait=True)
                failed = False
            except LengthwiseError as error:
                assert "step 3 could not be written" in str(error) and "No space left" in str(error)
                failed = True
        has_refused, number, num_failed = disk.has_refused, number + 1, num_failed + failed
        newest = checkpoint.latest(folder)
        assert checkpoint.verify(newest)["step"] in ((2, 3) if failed else (3,))
        if newest.name == "step_00000003":  # as it was before the save
            shutil.rmtree(folder)
            shutil.copytree(before, folder)
        elif not is_lasting:
            assert not [item for item in folder.iterdir() if item.suffix == ".partial"]
    assert_same_tensors(whole_contents(loaded(str(folder))[1]), expected)
    writer.close()
    return num_failed


def test_a_file_of_a_checkpoint_that_stops_growing_at_any_byte_is_refused_as_what_it_is(ranks, tmp_path):
    """Also where torch raises that a position is unexpected: the disk is to blame, and nothing is tried again."""
    told = ranks(1).run(_limit_files, str(tmp_path / "checkpoints"))[0]
    assert len(told) == 6
    for num_bytes, error, cause, words in told:
        assert (error, cause) == ("NotSavedError", "OSError"), (num_bytes, words)
        assert "step 3 could not be written" in words and "File too large" in words, (num_bytes, words)
        assert "the newest is step_00000002" in words and "Traceback" not in words, (num_bytes, words)


def _limit_files(path) -> list[tuple[int, str, str, str]]:
    folder = Path(path)
    model, state = trained()
    writer = CheckpointSaver(folder, state, keep=1, makes_parents=True)
    writer.save({"step": 2}, wait=True)
    writer.close()
    writer = CheckpointSaver(folder, state, keep=1)
    train(model, state, first=2, steps=1)
    largest = max(file.stat().st_size for file in folder.rglob("*.distcp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # it takes long
        told = [_save_with_files_of_at_most(writer, part * (largest - 1) // 5) for part in range(6)]
    writer.close()
    return told


def _save_with_files_of_at_most(writer, num_bytes) -> tuple[int, str, str, str]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with pytest.raises(LengthwiseError) as refused:
            writer.save({"step": 3}, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = refused.value
    return num_bytes, type(error).__name__, type(error.__cause__).__name__, str(error)


def test_a_run_whose_disk_is_full_ends_with_the_step_that_is_safe(ranks, tmp_path):
    told = ranks(1).run(_fill_disk, str(tmp_path))[0]
    assert "File too large" in told and "the newest is step_00000003" in told and "Traceback" not in told
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000003"]
    checkpoint.verify(tmp_path / "checkpoints" / "step_00000003")


def _fill_disk(path) -> str:
    """A real limit of the system: no file may grow beyond what metrics.jsonl has after four steps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill:
        def on_step(self, row):
            if row["step"] == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (RunFolder(Path(path)).plans.stat().st_size + 1, before[1]))

        def close(self):
            pass

    trainer = make_trainer(path, callbacks=[Fill()], checkpoint_async=False)
    try:
        with pytest.raises(LengthwiseError) as told:
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(told.value.__cause__, OSError)  # so that it is not tried again
    return str(told.value)


def test_a_run_whose_folder_is_removed_ends_and_writes_nothing_in_its_place(ranks, tmp_path):
    told = ranks(1).run(_remove_folder, str(tmp_path / "run"))[0]
    assert "No such file or directory" in told and "run is gone, and its checkpoints with it" in told
    assert not (tmp_path / "run").exists()


def _remove_folder(path) -> str:
    class Remove:
        def on_step(self, row):
            if row["step"] == 3:
                shutil.rmtree(path)

        def close(self):
            pass

    trainer = make_trainer(path, callbacks=[Remove()], checkpoint_async=False)
    with pytest.raises(LengthwiseError) as told:
        trainer.fit()
    return str(told.value)


def test_a_run_whose_folder_is_removed_before_a_checkpoint_does_not_make_it_again(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    for told in ranks(2).run(_save_into_nothing, str(tmp_path / "run" / "checkpoints")):
        assert "could not be written" in told and "is gone, and its checkpoints with it" in told
    assert not (tmp_path / "run").exists()


def _save_into_nothing(path) -> str:
    _, state = trained()
    if state.world.is_first:
        shutil.rmtree(Path(path).parent)
    writer = CheckpointSaver(Path(path), state, keep=1)
    with pytest.raises(LengthwiseError) as told:
        writer.save({"step": 2}, wait=True)
    writer.close()
    return str(told.value)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("every", "poisoned_after", "safe"),
    [(1, 4, "step_00000003"), (3, 3, None), pytest.param(3, 5, "step_00000003", marks=pytest.mark.deep)],
)
def test_a_run_that_diverges_goes_back_to_the_checkpoint_before_the_weights_that_diverged(
    ranks, tmp_path, every, poisoned_after, safe
):
    outcomes = ranks(2).run(_diverge, str(tmp_path), every, poisoned_after)
    told = outcomes[0][0]
    assert {outcome[0] for outcome in outcomes} == {told}
    assert f"step {poisoned_after}: loss" in told and "are not both finite" in told
    if safe is None:
        assert "the only checkpoint, step_00000003, holds the weights of that loss: start anew" in told
        return
    assert safe in told
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest.name == safe
    for name, weight in ranks(2).run(_weights_of, str(tmp_path))[0].items():
        assert torch.equal(weight, outcomes[0][1][name]), name


def _diverge(path, every, poisoned_after):
    """After so many steps weights are finite, but no loss of them is; what they were at the last safe checkpoint."""
    trainer, safe = make_trainer(path, checkpoint_every=every, keep_checkpoints=1), {}
    step = trainer.state.step

    def then_poisoned(**options):
        step(**options)
        if (trainer.next_step + 1) == 3:
            safe.update(master_weights(trainer.state))
        if trainer.next_step + 1 == poisoned_after:
            trainer.state.master.mul_(1e200)
            trainer.state.forget_weights()

    trainer.state.step = then_poisoned
    with pytest.raises(LengthwiseError) as told:
        trainer.fit()
    return str(told.value), safe


def test_a_run_stopped_before_its_first_loss_after_a_resume_keeps_the_last_good_checkpoint(ranks, tmp_path):
    """The newest checkpoint holds finite weights whose loss is not, and nobody has computed that loss yet."""
    told = ranks(2).run(_resume_twice, str(tmp_path))[0]
    assert "step_00000004 holds the weights of that loss, so the latest checkpoint is now step_00000003" in told
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step_00000003"


def _resume_twice(path) -> str:
    options = {"checkpoint_every": 1, "keep_checkpoints": 1}
    trainer = make_trainer(path, steps=4, **options)
    step = trainer.state.step

    def then_poisoned(**rates):
        step(**rates)
        if trainer.next_step + 1 == 4:
            trainer.state.master.mul_(1e200)
            trainer.state.forget_weights()

    trainer.state.step = then_poisoned
    trainer.fit()
    trainer = make_trainer(path, steps=8, **options)
    trainer.resume(checkpoint.latest(trainer.folder.checkpoints))
    trainer.folder.stop.touch()
    with pytest.raises(Preempted):
        trainer.fit()
    trainer = make_trainer(path, steps=8, **options)
    trainer.resume(checkpoint.latest(trainer.folder.checkpoints))
    with pytest.raises(LengthwiseError) as told:
        trainer.fit()
    return str(told.value)


def _weights_of(path):
    trainer = make_trainer(path, checkpoint_every=1, keep_checkpoints=1)
    trainer.resume(checkpoint.latest(trainer.folder.checkpoints))
    return master_weights(trainer.state)
