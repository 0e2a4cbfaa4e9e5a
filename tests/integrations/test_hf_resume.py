"""A run of lengthwise.Trainer goes on from its checkpoints with what its arguments say now."""

import logging

import numpy as np
import pytest
import torch

from tests.session import trainers
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


@pytest.mark.parametrize("words", CHANGES)
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
