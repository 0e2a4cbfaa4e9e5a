"""A run of lengthwise.Trainer goes on from its checkpoints with what its arguments say now."""

import errno
import json
import logging
import os
import shutil

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from lengthwise.core.errors import InputError, LengthwiseError
from tests.session import trainers
from tests.session.test_prepare import assert_equal_weights
from tests.session.trainer_hooks import SGD, rates
from tests.session.trainers import train

LINEAR = SGD | {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2, "save_only_model": False}
CHANGES = {
    "learning_rate 0.02 (0.1 in the checkpoint)": {"learning_rate": 0.02},
    "lr_scheduler_type cosine (linear in the checkpoint)": {"lr_scheduler_type": "cosine"},
    "lr_scheduler_kwargs {num_cycles: 2} (": {
        "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2},
    },
    "warmup steps 4 (0 in the checkpoint)": {"warmup_steps": 4},
    "number of steps 5 (6 in the checkpoint)": {"max_steps": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, LINEAR)


def resume(tmp_path, checkpoint, options, **others):
    return train(tmp_path, LINEAR | {"save_strategy": "no"} | options, resume=str(checkpoint), **others)


def scheduled(options):
    """The rate of each step by the scheduler of transformers."""
    from transformers import get_scheduler

    options = LINEAR | options
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=options["learning_rate"])
    scheduler = get_scheduler(
        options["lr_scheduler_type"], optimizer, options.get("warmup_steps", 0), options["max_steps"],
        options.get("lr_scheduler_kwargs"),
    )  # fmt: skip
    found = []
    for _ in range(options["max_steps"]):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "lengthwise"]


def test_a_schedule_that_nobody_changed_goes_on_to_the_bit_and_in_silence(whole, tmp_path, caplog):
    folder, trainer = whole
    with caplog.at_level(logging.WARNING, "lengthwise"):
        found = resume(tmp_path, folder / "checkpoint-2", {}, model=trainers.gpt2(seed=9))
    assert not [words for words in warnings_of(caplog) if "resumed with" in words]
    np.testing.assert_array_equal(rates(found.state.log_history), rates(trainer.state.log_history))
    for name, value in trainers.weights_of(trainer.model).items():
        np.testing.assert_array_equal(trainers.weights_of(found.model)[name], value, err_msg=name)


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.deep] * (number in (1, 3))) for number, words in enumerate(CHANGES)],
)
def test_a_schedule_that_the_arguments_change_counts_from_the_next_step(words, whole, tmp_path, caplog):
    folder, _ = whole
    with caplog.at_level(logging.WARNING, "lengthwise"):
        found = resume(tmp_path, folder / "checkpoint-2", CHANGES[words])
    np.testing.assert_array_equal(rates(found.state.log_history)[2:], scheduled(CHANGES[words])[2:])
    [line] = [line for line in warnings_of(caplog) if "resumed with" in line]
    assert words in line


def own_schedule(decays, factor=0.5):
    """A subclass whose scheduler is of a class of its own, or one whose factors no argument has."""
    import lengthwise as lw

    class Decays(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            return [group["lr"] * factor for group in self.optimizer.param_groups]

    class Changed(lw.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            known = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + factor * step))
            self.lr_scheduler = Decays(self.optimizer) if decays else known
            return self.lr_scheduler

    return Changed


def test_the_state_of_a_scheduler_that_cannot_be_made_anew_is_kept_with_a_warning(tmp_path, caplog):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path, LINEAR | options, trainer_class=own_schedule(decays=True))
    with caplog.at_level(logging.WARNING, "lengthwise"):
        found = resume(
            tmp_path, tmp_path / "checkpoint-2", {"max_steps": 4, "learning_rate": 5.0},
            trainer_class=own_schedule(decays=True),
        )  # fmt: skip
    np.testing.assert_array_equal(rates(found.state.log_history), rates(whole.state.log_history))
    [line] = [line for line in warnings_of(caplog) if "resumed with" in line]
    assert (
        "learning_rate 5 (0.1 in the checkpoint)" in line
        and "the state of the Decays is that of the checkpoint" in line
    )


def test_factors_that_a_subclass_changes_count_from_the_next_step(tmp_path, caplog):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path, LINEAR | options, trainer_class=own_schedule(decays=False))
    with caplog.at_level(logging.WARNING, "lengthwise"):
        found = resume(
            tmp_path, tmp_path / "checkpoint-2", {"max_steps": 4}, trainer_class=own_schedule(decays=False, factor=2)
        )
    np.testing.assert_allclose(rates(found.state.log_history)[2:], [0.1 / 5, 0.1 / 7], rtol=1e-12)
    assert any(
        "resumed with a schedule of other rates: the rate of the next step is 0.02" in line
        for line in warnings_of(caplog)
    )


def copied(whole, tmp_path):
    """The checkpoints of the run in a folder of their own."""
    return shutil.copytree(whole[0], tmp_path / "copied")


def truncate(checkpoint):
    file = next(checkpoint.glob("lengthwise/*/*.distcp"))
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    "harm", ["a file is cut", "the folder is half written", "the state is lost", "the state is cut"]
)
def test_a_damaged_checkpoint_is_refused_with_the_newest_intact_one_beside_it(harm, whole, tmp_path):
    folder = copied(whole, tmp_path)
    newest = folder / "checkpoint-6"
    if harm == "a file is cut":
        truncate(newest)
    elif harm == "the folder is half written":
        next(newest.glob("lengthwise/*/state.json")).unlink()
    elif harm == "the state is lost":
        (newest / "trainer_state.json").unlink()
    else:
        (newest / "trainer_state.json").write_text('{"global_step":')
    truncate(folder / "checkpoint-4")
    way_out = f'go on from the newest intact checkpoint beside it: resume_from_checkpoint="{folder / "checkpoint-2"}"'
    with pytest.raises(InputError) as refused:
        resume(folder, newest, {})
    assert str(refused.value).endswith(way_out) and "checkpoint-6" in str(refused.value)
    shutil.rmtree(folder / "checkpoint-2")
    with pytest.raises(InputError, match=r"no other checkpoint-N that can be resumed from lies beside it: train anew$"):
        resume(folder, newest, {})


@pytest.mark.parametrize(
    ("given", "words"), [("", "has no folder 'lengthwise'"), ("checkpoint-8", "there is no folder")]
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_the_newest_one_there_is(given, words, whole, tmp_path):
    way_out = f'or go on with resume_from_checkpoint="{whole[0] / "checkpoint-6"}"'
    with pytest.raises(InputError, match=words) as refused:
        resume(tmp_path, whole[0] / given, {})
    assert str(refused.value).endswith(way_out)


def test_the_weights_of_one_step_are_not_resumed_with_the_state_of_another(whole, tmp_path):
    folder = copied(whole, tmp_path)
    shutil.copy(folder / "checkpoint-2" / "trainer_state.json", folder / "checkpoint-4")
    with pytest.raises(InputError, match=r"checkpoint-4 is of step 2 by its trainer_state\.json and of step 4 by its"):
        resume(folder, folder / "checkpoint-4", {})


REFUSED = {
    r'holds the state of sgd, this run has optim="adamw_torch"; set optim="sgd", or .* \(from_pretrained\)': {
        "optim": "adamw_torch",
    },
    r"per_device_train_batch_size x gradient_accumulation_steps x ranks: 4 in the state, 2 here": {
        "gradient_accumulation_steps": 2,
    },
    r"train_sampling_strategy: 'corpus' in the state, 'shuffled' here": {"train_sampling_strategy": "random"},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_checkpoint_cannot_be_resumed_with_is_named_as_the_trainer_takes_it(words, whole, tmp_path):
    with pytest.raises(InputError, match=words):
        resume(tmp_path, whole[0] / "checkpoint-2", REFUSED[words])


def test_options_and_models_that_a_checkpoint_cannot_be_resumed_with_are_named_as_the_trainer_takes_them(
    whole, tmp_path
):
    checkpoint = whole[0] / "checkpoint-2"
    with pytest.raises(InputError, match=r'lengthwise=\{"tokens_per_step": \.\.\.\}: None in the state, 200 here'):
        resume(tmp_path, checkpoint, {}, lengthwise=trainers.planned(tokens_per_step=200))
    smaller = type(trainers.gpt2())(trainers.gpt2().config.__class__(vocab_size=64, n_embd=8, n_layer=2, n_head=4))
    smaller.loss_function = trainers.exact_loss
    with pytest.raises(InputError, match=r"resume with the model of the run that saved it, or start a new run"):
        resume(tmp_path, checkpoint, {}, model=smaller.double())


def test_a_resumed_run_of_which_no_step_is_left_says_so(whole, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lengthwise"):
        found = resume(tmp_path, whole[0] / "checkpoint-4", {"max_steps": 3})
    assert found.state.global_step == 4
    assert any("nothing is left to train: the checkpoint is of step 4" in line for line in warnings_of(caplog))


@pytest.mark.deep  # by default: steps without a loss in test_hf_trainer, logs of resumed runs above
def test_a_run_resumed_among_steps_without_a_loss_logs_the_last_one_that_is_known(tmp_path):
    rows = trainers.dataset(10)
    for number in (0, 1, 5, 6, 7):
        rows[number]["labels"] = [-100] * len(rows[number]["labels"])
    options = SGD | {"gradient_accumulation_steps": 1, "max_steps": 10, "save_strategy": "steps", "save_steps": 6}
    whole = train(tmp_path, options | {"logging_steps": 2}, train_dataset=rows)
    *log, summary = whole.state.log_history
    every = train(tmp_path / "every", options | {"save_strategy": "no"}, train_dataset=rows).state.log_history[:-1]
    losses = [entry["loss"] for entry in every]
    assert losses[:2] == [0, 0] and losses[4] == losses[5] == losses[6] == losses[7] > 1
    assert [entry["loss"] for entry in log] == pytest.approx(
        [0, *(np.mean(losses[k : k + 2]) for k in (2, 4, 6, 8))], rel=1e-12
    )
    assert summary["train_loss"] == pytest.approx(np.mean(losses[2:]), rel=1e-12), "steps before any loss are left out"
    options |= {"logging_steps": 2}
    resumed = train(tmp_path, options, train_dataset=rows, resume=str(tmp_path / "checkpoint-6"))
    assert [entry["loss"] for entry in resumed.state.log_history[:-1]] == [entry["loss"] for entry in log]

    three = train(tmp_path / "three", options | {"save_strategy": "no", "logging_steps": 3}, train_dataset=rows)
    assert three.state.log_history[0]["loss"] == losses[2], "the first two of three steps have none"
    file = tmp_path / "checkpoint-6" / "lengthwise" / "losses.json"
    assert json.loads(file.read_text()) == {"latest": losses[5]}
    file.unlink()  # of an older version: the last loss that was logged
    older = train(tmp_path, options, train_dataset=rows, resume=str(tmp_path / "checkpoint-6"))
    assert older.state.log_history[3]["loss"] == log[2]["loss"]


@pytest.mark.deep
@pytest.mark.parametrize("optim", [pytest.param("sgd", marks=pytest.mark.deep), "adamw_torch"])
def test_a_second_training_of_one_trainer_says_if_the_optimizer_loses_its_state(tmp_path, caplog, optim):
    weights = []
    for stock in (True, False):
        trainer = train(tmp_path, {"optim": optim, "lr_scheduler_type": "linear"}, stock=stock)
        assert "begins anew" not in caplog.text
        trainer.train()
        weights.append(trainers.weights_of(trainer.model))
    assert ("train() again: the optimizer (adamw) begins anew" in caplog.text) == (optim == "adamw_torch")
    if optim == "sgd":  # keeps nothing
        assert_equal_weights(*weights)


def test_a_checkpoint_that_cannot_be_written_names_the_one_to_go_on_from(tmp_path, monkeypatch):
    """Each lies in a folder of its own, so that the folder that could not be written knows of no other."""
    write, full = FileSystemWriter.write_data, []

    def fills_the_disk(self, *args, **options):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full.append("after the first checkpoint")
        return write(self, *args, **options)

    monkeypatch.setattr(FileSystemWriter, "write_data", fills_the_disk)
    with pytest.raises(LengthwiseError, match=r"step 4 could not be written .*No space left on device") as refused:
        train(tmp_path, LINEAR)
    argument = f'resume_from_checkpoint="{tmp_path / "checkpoint-2"}"'
    assert str(refused.value).endswith(f"complete ones are as they were. Once the cause is gone, go on with {argument}")
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(LengthwiseError, match="no checkpoint is complete yet, so that there is nothing to go on from"):
        train(tmp_path, LINEAR)
