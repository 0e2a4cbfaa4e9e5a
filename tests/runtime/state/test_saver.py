"""Checkpoints are written while training goes on, one at a time, and a write that fails harms none before it."""

import errno
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lengthwise.core.errors import CommunicationError, LengthwiseError
from lengthwise.core.wording import bytes_in_words
from lengthwise.runtime.state import checkpoint, checkpoint_files, saver
from lengthwise.runtime.state.saver import CheckpointSaver
from tests.runtime.state.saved import OPTIMIZERS, assert_same_tensors, loaded, name_of, train, trained, whole_contents
from tests.runtime.train.runs import local_world, new_state


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, OPTIMIZERS[3]),
        *(pytest.param(n, OPTIMIZERS[at], marks=pytest.mark.deep) for n, at in ((3, 0), (1, 0), (3, 3))),
    ],
    ids=lambda one: one if isinstance(one, int) else name_of(one),
)
def test_training_goes_on_while_a_checkpoint_is_written_of_the_state_as_it_was(ranks, tmp_path, settings, num_ranks):
    ranks(num_ranks).run(_check_background, str(tmp_path), settings)


def _check_background(path, settings):
    model, state = trained(settings=settings)
    expected = whole_contents(state)
    writer, may_write = CheckpointSaver(Path(path), state, keep=1), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", after(may_write, dcp.FileSystemWriter.write_data))
        writer.save({"step": 2}, wait=False)
        train(model, state, first=2, steps=3)
        assert not checkpoint.candidates(Path(path))
        may_write.set()
        writer.wait()
    assert checkpoint.latest(Path(path)).name == "step_00000002"
    _, other = loaded(path, settings=settings)
    assert_same_tensors(whole_contents(other), expected)
    assert not torch.equal(other.master, state.master)
    writer.close()


def after(event, function):
    def wait_and_call(*arguments):
        assert event.wait(50)
        return function(*arguments)

    return wait_and_call


@pytest.mark.deep
def test_every_one_of_many_checkpoints_in_a_row_holds_its_own_step(ranks, tmp_path):
    ranks(3).run(_check_many, str(tmp_path))


def _check_many(path):
    model, state = trained(steps=0)
    writer, expected = CheckpointSaver(Path(path), state, keep=20), []
    for step in range(5):
        train(model, state, first=step, steps=1)
        expected.append(whole_contents(state))
        writer.save({"step": step + 1}, wait=False)
    writer.close()
    found = checkpoint.candidates(Path(path))
    assert [item.name for item in found] == [f"step_{step:08}" for step in range(5, 0, -1)]
    for item, tensors in zip(reversed(found), expected):
        _, other = new_state(local_world(), torch.float64)
        checkpoint.load(item, other)
        assert_same_tensors(whole_contents(other), tensors)


def test_the_next_checkpoint_begins_when_the_one_before_is_complete(ranks, tmp_path):
    begun_and_done, nothing = ranks(2).run(_order_of_two, str(tmp_path))
    assert begun_and_done == ["begin step_00000002", "step_00000002 done", "begin step_00000003", "step_00000003 done"]
    assert nothing == []  # the first rank alone acts


def _order_of_two(path):
    _, state = trained()
    writer, may_write, seen = CheckpointSaver(Path(path), state, keep=1), threading.Event(), []

    begin, publish = checkpoint_files.begin, checkpoint_files.publish

    def seen_to_begin(folder, name):
        seen.append(f"begin {name}")
        return begin(folder, name)

    def seen_to_publish(partial, document, *, keep):
        final = publish(partial, document, keep=keep)
        seen.append(f"{final.name} done")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "begin", seen_to_begin)
        patch.setattr(checkpoint_files, "publish", seen_to_publish)
        patch.setattr(dcp.FileSystemWriter, "write_data", after(may_write, dcp.FileSystemWriter.write_data))
        writer.save({"step": 2}, wait=False)
        threading.Timer(0.2, may_write.set).start()
        writer.save({"step": 3}, wait=True)
    writer.close()
    return seen


OWNERS = {"checkpoint_files": checkpoint_files, "saver": saver, "FileSystemWriter": dcp.FileSystemWriter}


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, "FileSystemWriter.write_data"),
        pytest.param(0, "checkpoint_files.publish", marks=pytest.mark.deep),
        pytest.param(0, "checkpoint_files.begin", marks=pytest.mark.deep),
        pytest.param(1, "saver._digests", marks=pytest.mark.deep),
    ],
)
def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all_and_harms_none_before(ranks, tmp_path, rank, where):
    ranks(2).run(_check_failure, str(tmp_path), rank, where)


def _check_failure(path, rank, where):
    folder = Path(path)
    model, state = trained()
    writer = CheckpointSaver(folder, state, keep=1)
    writer.save({"step": 2}, wait=True)
    expected = whole_contents(state)
    train(model, state, first=2, steps=1)
    with pytest.MonkeyPatch.context() as patch:
        if state.world.rank == rank:
            owner, name = where.split(".")
            patch.setattr(OWNERS[owner], name, _no_space)
        writer.save({"step": 3}, wait=False)
        with pytest.raises(
            LengthwiseError, match=rf"step 3 could not be written to .*rank {rank}: .*No space left"
        ) as told:
            writer.wait()
    assert "complete ones are as they were" in str(told.value)
    num_bytes = sum(tensor.nbytes for tensor in whole_contents(state).values())
    assert f"): it takes {bytes_in_words(num_bytes)}, and the disk has " in str(
        told.value
    ) and " free; complete ones" in str(told.value)
    assert isinstance(told.value.__cause__, OSError)
    assert not writer.has_failed
    assert [item.name for item in checkpoint.candidates(folder)] == ["step_00000002"]
    assert_same_tensors(whole_contents(loaded(path)[1]), expected)
    writer.save({"step": 3}, wait=True)
    writer.close()
    assert_same_tensors(whole_contents(loaded(path)[1]), whole_contents(state))
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "step_00000003"]


def _no_space(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_written_in_the_place_of_a_folder_that_is_removed_while_a_checkpoint_is_written(
    ranks, tmp_path, num_ranks
):
    ranks(num_ranks).run(_check_removed, str(tmp_path))


def _check_removed(path):
    _, state = trained(steps=1)
    run = Path(path) / "run"
    if local_world().is_first:
        run.mkdir()
    writer, check_shared = CheckpointSaver(run / "checkpoints", state, keep=1), saver.check_shared

    def checked_and_removed(*arguments, is_first):
        check_shared(*arguments, is_first=is_first)
        if is_first:
            run.rename(Path(path) / "trash")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "check_shared", checked_and_removed)
        with pytest.raises(LengthwiseError, match="is gone, and its checkpoints with it"):
            writer.save({"step": 1}, wait=True)
    assert not run.exists()
    writer.close()


def test_a_rank_that_is_gone_while_a_checkpoint_is_written_is_no_matter_of_files(ranks, tmp_path):
    ranks(1).run(_check_lost, str(tmp_path))


def _check_lost(path):
    writer = CheckpointSaver(Path(path), trained()[1], keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_write", _lose_a_rank)
        writer.save({"step": 3}, wait=False)
        with pytest.raises(CommunicationError, match=r"the checkpoint of step 3 failed: .*Connection reset by peer"):
            writer.wait()
    writer.close()


def _lose_a_rank(*_, **__):
    raise RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc] Read error: Connection reset by peer")


def test_a_run_that_went_back_counts_only_the_checkpoints_that_led_to_where_it_is(ranks, tmp_path):
    assert ranks(2).run(_names_after_going_back, str(tmp_path))[0] == [5, 4, 2]


def _names_after_going_back(path):
    state = trained(steps=0)[1]
    for step in (2, 4):
        checkpoint.save(Path(path), state, {"step": step}, keep=9)
    checkpoint.load(Path(path) / "step_00000002", state)  # because the other is damaged, say
    checkpoint.save(Path(path), state, {"step": 5}, keep=2)
    return [checkpoint_files.step_of(item) for item in checkpoint.candidates(Path(path))]
