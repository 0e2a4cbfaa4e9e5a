"""What users change of transformers' Trainer trains the same under lengthwise.Trainer, or is refused by name."""

import logging

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InputError, LengthwiseError
from tests.session import trainer_hooks, trainers
from tests.session.test_prepare import EXACT, assert_equal_weights
from tests.session.trainer_hooks import SGD, changed, changed_trainer, refused_change

EPOCHS = {"max_steps": -1, "num_train_epochs": 2}


def both(tmp_path, options, **ways):
    """The log and the weights of transformers' trainer, those of ours, which are compared, and its trainer."""
    expected, weights = changed(tmp_path / "stock", options, stock=True, **ways)
    trainer = changed_trainer(tmp_path / "ours", options, **ways)
    assert_equal_weights(trainers.weights_of(trainer.model), weights)
    assert len(trainer.state.log_history) == len(expected)
    return expected, weights, trainer


def deep(value):
    return pytest.param(value, marks=pytest.mark.deep)


@pytest.mark.parametrize(
    "hook", ["a schedule by group", *(deep(hook) for hook in ["a schedule by steps", "one cycle"])]
)
def test_the_schedule_of_a_subclass_is_followed(hook, tmp_path):
    log, _, trainer = both(tmp_path, {}, hook=hook)
    assert len(set(trainer_hooks.rates(log))) > 4
    np.testing.assert_allclose(trainer_hooks.rates(trainer.state.log_history), trainer_hooks.rates(log), rtol=EXACT)


def test_a_scheduler_that_is_passed_in_is_refused_with_the_way_out(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InputError, match=r"lr_scheduler: the StepLR sets rates of another optimizer.*create_scheduler"):
        changed(tmp_path, {}, optimizers=(None, scheduler))


@pytest.mark.deep
def test_a_scheduler_that_transformers_made_before_the_training_is_made_anew(tmp_path):
    import lengthwise as lw

    def run(make_first):
        trainer = lw.Trainer(
            model=trainers.gpt2(), args=trainers.arguments(tmp_path, **SGD, lr_scheduler_type="linear"),
            train_dataset=trainers.dataset(), lengthwise=trainers.planned(),
        )  # fmt: skip
        if make_first:
            trainer.create_scheduler(99, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
        trainer.train()
        return trainers.weights_of(trainer.model)

    assert_equal_weights(run(make_first=True), run(make_first=False))


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def cycled_momentum(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


def of_groups(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])


def of_another(optimizer):
    another = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return torch.optim.lr_scheduler.StepLR(another, 1)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (plateau, "rates of ReduceLROnPlateau depend on what is learned"),
        (cycled_momentum, "OneCycleLR changes betas from"),
        (of_groups, "LambdaLR gives groups of parameters different rates, 0.05 and 0.1"),
        (of_another, "StepLR sets rates of another optimizer"),
        (lambda optimizer: None, "create_scheduler made no scheduler"),
    ],
)
def test_schedules_that_are_no_rate_for_each_step_are_refused(make, named, tmp_path):
    import lengthwise as lw

    class Changed(lw.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = make(self.optimizer)

    with pytest.raises(InputError, match=named):
        trainers.train(tmp_path, SGD | {"optim": "adamw_torch"}, trainer_class=Changed)


IGNORED = [
    "training_step", "compute_loss", "get_train_dataloader", "get_batch_samples", "create_optimizer",
    "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs", "_inner_training_loop", "_clip_grad_norm",
    "_get_num_items_in_batch", "_prepare_inputs", "_remove_unused_columns", "_wrap_model", "_get_learning_rate",
    "_run_epoch", "_track_num_input_tokens", "set_initial_training_values",
]  # fmt: skip


def test_methods_that_training_would_ignore_are_refused_on_classes_and_on_objects(tmp_path):
    import transformers

    import lengthwise as lw

    names = [name for name in IGNORED if hasattr(transformers.Trainer, name)]
    assert len(names) > 10
    methods = {name: lambda self, *args, **options: None for name in names}
    mixin = type("Mixin", (), methods)
    of_another = type("Another", (transformers.Trainer,), methods)
    for bases in ((mixin, lw.Trainer), (lw.Trainer, of_another)):  # of which the latter's come behind those here
        with pytest.raises(InputError) as refused:
            trainers.train(tmp_path, SGD, trainer_class=type("Changed", bases, {}))
        for name in names:
            assert f"Changed.{name}: " in str(refused.value), name

    trainer = lw.Trainer(
        model=trainers.gpt2(), args=trainers.arguments(tmp_path, **SGD), train_dataset=trainers.dataset()
    )
    trainer._clip_grad_norm = lambda model: None
    with pytest.raises(InputError, match=r"Trainer\._clip_grad_norm: gradients are summed"):
        trainer.train()


def test_a_method_that_a_later_transformers_calls_in_training_is_refused(tmp_path, monkeypatch):
    import transformers

    import lengthwise as lw
    from lengthwise.integrations import hf_overrides

    names_read = hf_overrides._names_read

    def with_another(owner, name):
        yield from names_read(owner, name)
        if owner is transformers.Trainer and name == "training_step":
            yield False, "num_tokens_of"

    monkeypatch.setattr(transformers.Trainer, "num_tokens_of", lambda self: 1, raising=False)
    monkeypatch.setattr(hf_overrides, "_names_read", with_another)
    hf_overrides._ignored_methods.cache_clear()
    changed_class = type("Changed", (lw.Trainer,), {"num_tokens_of": lambda self: 2})
    try:
        with pytest.raises(InputError, match=r"Changed\.num_tokens_of: the training here does not call it"):
            trainers.train(tmp_path, SGD, trainer_class=changed_class)
    finally:
        hf_overrides._ignored_methods.cache_clear()


def test_methods_of_evaluation_logs_and_saves_may_be_overridden(tmp_path):
    import lengthwise as lw

    called = set()

    def noting(name):
        def method(self, *args, **options):
            called.add(name)
            return getattr(super(changed_class, self), name)(*args, **options)

        return method

    names = ["log", "evaluate", "prediction_step", "evaluation_loop", "get_eval_dataloader", "save_model", "train"]
    names += ["floating_point_ops", "_save_checkpoint", "_evaluate", "_set_signature_columns_if_needed"]
    names += ["compute_loss_context_manager", "autocast_smart_context_manager", "get_decay_parameter_names"]
    changed_class = type("Changed", (lw.Trainer,), {name: noting(name) for name in names})
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    options |= {"weight_decay": 0.1}
    trainers.train(tmp_path, SGD | options, trainer_class=changed_class, eval_dataset=trainers.dataset(3))
    assert called == set(names)


@pytest.mark.deep
def test_the_batch_size_of_a_subclass_for_logs_leaves_the_sequences_of_a_step(tmp_path):
    import lengthwise as lw

    changed_class = type("Changed", (lw.Trainer,), {"get_total_train_batch_size": lambda self, args: 1})
    trainer = trainers.train(tmp_path / "changed", SGD, trainer_class=changed_class)
    plain = trainers.train(tmp_path / "plain", SGD)
    assert_equal_weights(trainers.weights_of(trainer.model), trainers.weights_of(plain.model))


@pytest.mark.deep
@pytest.mark.parametrize("hook", ["a weighted sampler", deep("a curriculum")])
def test_the_sampler_of_a_subclass_says_what_each_epoch_has(hook, ranks, tmp_path):
    log, weights, trainer = both(tmp_path, EPOCHS, hook=hook)
    assert trainer.state.epoch == 2.0
    assert [row["epoch"] for row in trainer.state.log_history] == pytest.approx([row["epoch"] for row in log])
    options = EPOCHS | {"gradient_accumulation_steps": 2}
    for _, found in ranks(2).run(changed, tmp_path / "two", options, hook=hook):
        assert_equal_weights(found, weights)


def test_a_run_with_a_sampler_goes_on_with_the_items_that_it_had_drawn(tmp_path):
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}  # of 3 steps in an epoch
    whole = changed_trainer(tmp_path, options, hook="a weighted sampler")
    resumed = changed_trainer(
        tmp_path, options, hook="a weighted sampler", resume=str(tmp_path / "checkpoint-5"), model=trainers.gpt2(seed=9)
    )
    assert_equal_weights(trainers.weights_of(resumed.model), trainers.weights_of(whole.model))


class Sampled:
    """A sampler of these values."""

    def __init__(self, values, size=None):
        self.values, self.size = values, len(values) if size is None else size

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return self.size


@pytest.mark.parametrize(
    ("values", "size", "named"),
    [
        ([[0, 1], [2, 3]], None, r"Sampled gives \[0, 1\] where a number of an item is needed"),
        ([3, 18], None, "Sampled gives item 18, and items are 0 to 17"),
        ([3, 4], 5, "Sampled has a length of 5 and gives 2 items"),
        ([], None, "Sampled that does not say how many items an epoch has, or has none"),
        (iter([1]), 0, "Sampled that does not say how many items"),
    ],
)
def test_samplers_that_give_no_items_are_refused(values, size, named, tmp_path):
    import lengthwise as lw

    made = {"_get_train_sampler": lambda self, train_dataset=None: Sampled(values, size)}
    with pytest.raises(InputError, match=named):
        trainers.train(tmp_path, SGD, trainer_class=type("Changed", (lw.Trainer,), made))


def test_batches_of_tokens_beside_a_sampler_and_samplers_of_a_rank_are_refused(ranks, tmp_path):
    with pytest.raises(InputError, match=r"'tokens_per_step': 64.*with _get_train_sampler"):
        changed(tmp_path, {}, hook="a weighted sampler", lengthwise=trainers.planned(tokens_per_step=64))
    with pytest.raises(InputError, match=r"'over_length': 'drop'.*with train_dataset.set_epoch"):
        planned = trainers.planned(max_length=30, over_length="drop")
        changed(tmp_path, EPOCHS, epochs=True, lengthwise=planned)
    for said in ranks(2).run(refused_change, tmp_path, {}, hook="a rank's share"):
        assert "gives ranks different items in epoch 0" in said


@pytest.mark.deep
@pytest.mark.parametrize("order", [deep("sequential"), "random"])
def test_a_dataset_is_told_of_each_epoch(order, ranks, tmp_path):
    options = EPOCHS | {"train_sampling_strategy": order}
    if order == "sequential":
        _, weights, trainer = both(tmp_path, options, epochs=True)
        assert trainer.state.epoch == 2.0
        with_workers = trainers.planned(workers=1)
        _, found = changed(tmp_path / "workers", options, epochs=True, lengthwise=with_workers)
        assert_equal_weights(found, weights)
    else:  # whose order is ours
        _, weights = changed(tmp_path / "one", options, epochs=True)
    options = options | {"gradient_accumulation_steps": 2}
    for _, found in ranks(2).run(changed, tmp_path / "two", options, epochs=True):
        assert_equal_weights(found, weights)


def test_one_epoch_of_a_dataset_that_is_told_of_it_is_the_first(tmp_path):
    both(tmp_path, {"max_steps": 3}, epochs=True)


def test_a_run_whose_dataset_changes_goes_on_in_its_epoch(tmp_path):
    options = EPOCHS | {"save_strategy": "steps", "save_steps": 7}
    whole = changed_trainer(tmp_path, options, epochs=True)
    resumed = changed_trainer(
        tmp_path, options, epochs=True, resume=str(tmp_path / "checkpoint-7"), model=trainers.gpt2(seed=9)
    )
    assert_equal_weights(trainers.weights_of(resumed.model), trainers.weights_of(whole.model))
    with pytest.raises(InputError, match=r"the checkpoint is of other epochs.*the number of epochs"):
        changed(tmp_path, options | {"num_train_epochs": 4}, epochs=True, resume=str(tmp_path / "checkpoint-7"))


def test_a_dataset_with_fewer_items_in_another_epoch_is_refused(tmp_path):
    class Shrinks(trainer_hooks.EachEpochOther):
        def __len__(self):
            return 18 - (self.epoch or 0)

    with pytest.raises(InputError, match=r"18 items, and 17 after set_epoch\(1\)"):
        trainers.train(tmp_path, SGD | EPOCHS, train_dataset=Shrinks())


CHANGES = ["rate before a step", "rate after a step", "rate of an update", "scheduler", "skips a rate", "norm", "decay"]
QUICK_CHANGES = ["rate after a step", "norm"]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", [kind if kind in QUICK_CHANGES else deep(kind) for kind in CHANGES])
def test_what_a_callback_changes_counts_from_then_on(kind, tmp_path):
    options = {"max_grad_norm": 0.3, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    both(tmp_path, options, kind=kind)
    if kind.startswith("rate"):  # which schedules of this kind multiply
        both(tmp_path / "by steps", options, kind=kind, hook="a schedule by steps")


@pytest.mark.deep
def test_what_a_callback_changed_before_a_checkpoint_counts_after_it(tmp_path):
    options = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 3}
    for kind, hook in (("rate after a step", "a schedule by steps"), ("rate after a step", None), ("scheduler", None)):
        ways, folder = {"kind": kind, "hook": hook}, tmp_path / f"{kind} {hook}"
        whole = changed_trainer(folder, options, **ways)
        resumed = changed_trainer(
            folder, options, **ways, resume=str(folder / "checkpoint-3"), model=trainers.gpt2(seed=9)
        )
        assert_equal_weights(trainers.weights_of(resumed.model), trainers.weights_of(whole.model))
    (folder / "checkpoint-3" / "schedule.pt").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"schedule\.pt cannot be read .*delete it to take the rate from the step"):
        changed(folder, options, resume=str(folder / "checkpoint-3"))


def test_what_callbacks_of_all_ranks_change_counts_on_all(ranks, tmp_path):
    options = {"max_grad_norm": 0.3, "lr_scheduler_type": "linear"}
    for kind in QUICK_CHANGES[:1]:  # one rank has the others
        _, weights = changed(tmp_path / kind, options, stock=True, kind=kind)
        halved = options | {"gradient_accumulation_steps": 2}
        for _, found in ranks(2).run(changed, tmp_path / "two", halved, kind=kind):
            assert_equal_weights(found, weights)


def test_what_cannot_be_changed_during_training_is_refused(ranks, tmp_path):
    with pytest.raises(InputError, match=r"a callback has set gradient_accumulation_steps.*leave it at 4"):
        changed(tmp_path, {}, kind="accumulation")
    with pytest.raises(LengthwiseError, match=r"a callback gives groups of parameters different rates, 0\.1 and 0\.7"):
        changed(tmp_path, {}, kind="rate of a group")
    for kind, named in (
        ("norm of a rank", "max_grad_norm is 1, 0.1 on the ranks"),
        ("rate of a rank", "lr is 0.1, 0.01"),
    ):
        for said in ranks(2).run(refused_change, tmp_path, {"max_grad_norm": 1.0}, kind=kind):
            assert named in said


def test_arguments_that_transformers_fills_in_are_not_said_to_be_replaced(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainers.train(tmp_path, SGD | {"max_steps": 1})
        assert "replaced by lengthwise.Trainer" not in caplog.text
        trainers.train(tmp_path, SGD | {"max_steps": 1, "accelerator_config": {"split_batches": True}})
        assert "accelerator_config=AcceleratorConfig(split_batches=True" in caplog.text
        caplog.clear()
        trainers.train(tmp_path, SGD | {"max_steps": 1, "gradient_checkpointing": True})
    assert caplog.text.count("_checkpointing=True") == 1, "it has two names"


def masks_the_largest(items):
    batch = trainer_hooks.pad(items)
    batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] == batch["input_ids"].max(), -100)
    return batch


def adds_negatives(items):
    batch = trainer_hooks.pad(items)
    if len(items) > 1:
        batch["negatives"] = batch["input_ids"].roll(1, 0)
    return batch


def adds_statistics(items):
    batch = trainer_hooks.pad(items)
    return batch | {"mean": batch["input_ids"].double().mean().expand(len(items))}


@pytest.mark.parametrize(
    ("collate", "named"),
    [(masks_the_largest, "labels"), (adds_negatives, "negatives"), (adds_statistics, "mean")],
)
def test_collators_that_mix_their_items_are_refused_unless_they_get_one_at_a_time(collate, named, tmp_path):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    with pytest.raises(InputError, match=f"{collate.__name__} makes other {named} of 4 items together than of each"):
        trainers.train(tmp_path, SGD | options, data_collator=collate)
    trainers.train(tmp_path, SGD | {"max_steps": 1}, data_collator=collate) if named == "labels" else None


def left_padded(items):
    batch = trainer_hooks.pad(items)
    lengths = batch["attention_mask"].sum(1).tolist()
    return {key: torch.stack([row.roll(-n) for row, n in zip(values, lengths)]) for key, values in batch.items()}


def longest_first(items):
    return trainer_hooks.pad(sorted(items, key=lambda item: -len(item["input_ids"])))


def with_positions(items):
    batch = trainer_hooks.pad(items)
    return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}


@pytest.mark.parametrize("collate", [trainer_hooks.pad, *map(deep, (left_padded, longest_first, with_positions))])
def test_collators_that_only_pad_are_taken(collate, tmp_path):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    found = trainers.train(tmp_path / "found", SGD | options, data_collator=collate)
    plain = trainers.train(tmp_path / "plain", SGD | options)
    assert_equal_weights(trainers.weights_of(found.model), trainers.weights_of(plain.model))


def test_a_sampler_that_fails_on_one_rank_is_told_on_all(ranks):
    first, other = ranks(2).run(drawn_on_rank)
    assert "list gives item 99, and items are 0 to 4" in first and "the sampler of another rank failed" in other


def drawn_on_rank():
    import torch.distributed as dist

    from lengthwise.integrations.hf_epochs import SampledOrder

    items = [0, 1] if dist.get_rank() else [0, 99]
    with pytest.raises(InputError) as error:
        SampledOrder(items, num_items=5, device=torch.device("cpu"))(0)
    return str(error.value)


def test_a_training_of_no_steps_evaluates_and_leaves_the_model(tmp_path):
    events = []
    trainer = trainers.train(
        tmp_path, {"max_steps": 0, "eval_on_start": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        callbacks=[lambda: trainers.Callbacks.notes(events)], eval_dataset=trainers.dataset(3),
    )  # fmt: skip
    assert_equal_weights(trainers.weights_of(trainer.model), trainers.weights_of(trainers.gpt2()))
    names = [event[0] for event in events if event[0] != "on_prediction_step"]
    assert names == ["on_init_end", "on_train_begin", "on_log", "on_evaluate", "on_log", "on_train_end"]
    log = trainer.state.log_history
    assert (trainer.state.global_step, trainer.state.max_steps, log[-1]["train_loss"]) == (0, 0, 0.0)
    assert trainer.evaluate()["eval_loss"] == log[0]["eval_loss"]
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
