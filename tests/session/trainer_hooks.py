"""What users change of transformers' Trainer: methods of subclasses, callbacks, samplers, datasets and collators."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import LengthwiseError
from tests.session import trainers

SGD = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "max_steps": 6}


def subclass(base, hook):
    """A subclass of a trainer with one method of its own."""
    return type("Changed", (base,), HOOKS[hook]())


def step_schedule():
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        return self.lr_scheduler

    return {"create_scheduler": create_scheduler}


def schedule_by_group():
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda k: 1 / (1 + k)] * 2)
        return self.lr_scheduler

    return {"create_scheduler": create_scheduler}


def one_cycle():
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer or self.optimizer, 0.1, total_steps=num_training_steps + 1, cycle_momentum=False
        )
        return self.lr_scheduler

    return {"create_scheduler": create_scheduler}


def weighted_sampler():
    def _get_train_sampler(self, train_dataset=None):
        weights = [1.0, 2.0, 0.0] * (len(train_dataset) // 3)
        return torch.utils.data.WeightedRandomSampler(weights, 11, generator=torch.Generator().manual_seed(0))

    return {"_get_train_sampler": _get_train_sampler}


def curriculum():
    class EasyFirst(torch.utils.data.Sampler):
        """Reads how far the training is."""

        def __init__(self, trainer):
            self.trainer = trainer

        def __len__(self):
            return 10

        def __iter__(self):
            return iter([(place + self.trainer.state.global_step) % 18 for place in range(10)])

    return {"_get_train_sampler": lambda self, train_dataset=None: EasyFirst(self)}


def shard_of_a_rank():
    def _get_train_sampler(self, train_dataset=None):
        return range(self.args.process_index, len(train_dataset), self.args.world_size)

    return {"_get_train_sampler": _get_train_sampler}


def context():
    class Counting:
        entered = 0

        def __enter__(self):
            Counting.entered += 1

        def __exit__(self, *error):
            pass

    return {"compute_loss_context_manager": lambda self: Counting(), "counting": Counting}


HOOKS = {
    "a schedule by steps": step_schedule,
    "a schedule by group": schedule_by_group,
    "one cycle": one_cycle,
    "a weighted sampler": weighted_sampler,
    "a curriculum": curriculum,
    "a rank's share": shard_of_a_rank,
    "a context": context,
}


class EachEpochOther:
    """A dataset whose items are others in each epoch, also as long as others."""

    def __init__(self, shift=1):
        self.rows, self.epoch, self.shift = trainers.dataset(), None, shift

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[(number + self.shift * self.epoch) % len(self.rows)]
        return {"input_ids": [(token + self.epoch) % 60 for token in row["input_ids"]], "labels": row["labels"]}


def pad(items):
    """A collator of transformers' kind."""
    width = max(len(item["input_ids"]) for item in items)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**item, "attention_mask": [1] * len(item["input_ids"])} for item in items]
    return {
        key: torch.tensor([list(row[key]) + [value] * (width - len(row[key])) for row in rows])
        for key, value in fill.items()
    }


def changes(kind):
    """What makes a callback that changes the training while it runs."""
    import transformers

    class Changes(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **others):
            if kind == "rate before a step" and state.global_step in (1, 4):
                set_rate(optimizer, 0.03)
            if kind == "norm":
                args.max_grad_norm = 0.2 + state.global_step
            if kind == "norm of a rank" and args.process_index:
                args.max_grad_norm = 0.1
            if kind == "accumulation" and state.global_step == 2:
                args.gradient_accumulation_steps = 1

        def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **others):
            if kind == "rate after a step" and state.global_step in (2, 3):
                set_rate(optimizer, 0.01 * state.global_step)
            if kind == "decay" and state.global_step == 2:
                for group in optimizer.param_groups:
                    group["weight_decay"] *= 5
            if kind == "rate of a rank" and args.process_index:
                set_rate(optimizer, 0.01)
            if kind == "rate of a group" and state.global_step == 2:
                optimizer.param_groups[0]["lr"] = 0.7
            if kind == "scheduler" and state.global_step == 2:
                lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]
            if kind == "skips a rate" and state.global_step == 2:
                lr_scheduler.step()

        def on_optimizer_step(self, args, state, control, optimizer=None, **others):
            if kind == "rate of an update" and state.global_step == 2:
                set_rate(optimizer, optimizer.param_groups[0]["lr"] / 3)

    return Changes


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def changed(folder, options, *, stock=False, hook=None, kind=None, epochs=False, **others):
    """Log and weights of a training that is changed in one of these ways."""
    trainer = changed_trainer(folder, options, stock=stock, hook=hook, kind=kind, epochs=epochs, **others)
    return trainer.state.log_history, trainers.weights_of(trainer.model)


def refused_change(*arguments, **options):
    """What refuses such a training."""
    with pytest.raises(LengthwiseError) as raised:
        changed(*arguments, **options)
    return str(raised.value)


def changed_trainer(folder, options, *, stock=False, hook=None, kind=None, epochs=False, **others):
    """The trainer after such a training."""
    import transformers

    import lengthwise as lw

    base = transformers.Trainer if stock else lw.Trainer
    others |= {"train_dataset": EachEpochOther()} if epochs else {}
    others |= {"callbacks": [changes(kind)]} if kind else {}
    others |= {"data_collator": pad} if stock else {}
    others["trainer_class"] = subclass(base, hook) if hook else base
    options = SGD | options
    if stock:
        options["per_device_train_batch_size"] = options.get("per_device_train_batch_size", 1)
    return trainers.train(folder, options, stock=stock, **others)


def rates(log):
    """The learning rates of a log."""
    return np.array([row["learning_rate"] for row in log if "learning_rate" in row])
