"""lengthwise.Trainer is transformers' Trainer with steps planned by length."""

import os
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InputError
from tests.plan.costs import StagesFitMore
from tests.session import trainers
from tests.session.test_prepare import EXACT, assert_equal_weights
from tests.session.trainers import Callbacks, log_and_weights, stop_on_the_last, train, watched_by_the_callback

LOGGED = ("loss", "grad_norm", "learning_rate", "epoch")


def assert_equal_logs(found, expected, tolerance=EXACT):
    """Rounded losses and norms of transformers' own are float32 sums."""
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        for name in LOGGED:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (name, ours, theirs)
        assert ours["step"] == theirs["step"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    options = {"num_train_epochs": 2, "max_steps": -1, "weight_decay": 0.1}
    trainer = train(tmp_path_factory.mktemp("stock"), options, stock=True)
    return options, trainer.state.log_history, trainers.weights_of(trainer.model)


def test_one_process_trains_what_transformers_trains(stock, tmp_path):
    options, log, weights = stock
    found = train(tmp_path, options, lengthwise=trainers.planned(check=True))
    assert_equal_weights(trainers.weights_of(found.model), weights)
    assert_equal_logs(found.state.log_history, log, 1e-6)
    assert found.state.log_history[-1].keys() == log[-1].keys()
    assert found.state.log_history[-1]["train_loss"] == pytest.approx(log[-1]["train_loss"], rel=1e-6)
    assert found.state.log_history[-1]["total_flos"] == log[-1]["total_flos"]
    assert "forward" not in vars(found.model), "the model is given back"


IN_STAGES = {"check": True, "max_degree": 1, "policy": "static", "cost": StagesFitMore(capacity=32)}
"""The longest rows, of 40 tokens, fit stages alone."""


@pytest.mark.parametrize("planned", [pytest.param({}, marks=pytest.mark.deep), IN_STAGES])
def test_two_ranks_train_what_transformers_trains_on_one(ranks, stock, tmp_path, planned):
    options, log, weights = stock
    options = options | {"gradient_accumulation_steps": 2}
    for found_log, found in ranks(2).run(
        log_and_weights, tmp_path, options, lengthwise=trainers.planned(recompute="none", **planned)
    ):
        assert_equal_weights(found, weights)
        assert_equal_logs(found_log, log, 1e-6)


def test_a_run_stopped_by_one_of_two_ranks_goes_on_alone(ranks, tmp_path):
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    options |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    whole = train(tmp_path / "whole", options | {"weight_decay": 0.1}, stock=True)
    both = ranks(2).run(stop_on_the_last, tmp_path / "run", options | {"gradient_accumulation_steps": 2})
    assert [stopped for stopped, _ in both] == [2, 2]
    resumed = train(tmp_path / "run", options | {"weight_decay": 0.1}, resume=True, model=trainers.gpt2(seed=9))
    assert_equal_weights(trainers.weights_of(resumed.model), trainers.weights_of(whole.model))
    assert_equal_logs(resumed.state.log_history, whole.state.log_history, 1e-6)
    assert [path.name for path in sorted((tmp_path / "run").glob("checkpoint-*"))] == ["checkpoint-4"]

    assert resumed.state.global_step == 4
    reloaded = type(resumed.model).from_pretrained(tmp_path / "run" / "checkpoint-4")
    for (name, ours), theirs in zip(reloaded.named_parameters(), resumed.model.parameters(), strict=True):
        np.testing.assert_array_equal(ours.detach(), theirs.detach(), err_msg=name)


def test_callbacks_evaluation_and_the_best_model_are_as_in_transformers(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
    options |= {"eval_on_start": True, "logging_steps": 3, "optim": "sgd"}
    seen, logs, best = {}, {}, {}
    for stock in (True, False):
        events = []
        trainer = train(
            tmp_path / str(stock),
            options,
            stock=stock,
            eval_dataset=trainers.dataset(7),
            callbacks=[lambda events=events: Callbacks.notes(events)],
        )
        seen[stock] = events
        logs[stock] = [{k: v for k, v in log.items() if "runtime" not in k and "per_second" not in k}
                       for log in trainer.state.log_history]  # fmt: skip
        best[stock] = (
            trainers.weights_of(trainer.model),
            trainer.state.best_global_step,
            trainer.evaluate()["eval_loss"],
        )
    assert seen[False] == seen[True]
    assert len(logs[False]) == len(logs[True]) == 2 + 4 + 1
    for ours, theirs in zip(logs[False], logs[True]):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert best[False][1] == best[True][1]
    assert_equal_weights(best[False][0], best[True][0])
    assert best[False][2] == pytest.approx(best[True][2], rel=1e-6)


SOME_EVENTS = ("as a callback asks", "gone on")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (SOME_EVENTS, ["as a callback asks"]),
        pytest.param(tuple(trainers.EVENTS), ["as a callback asks", "until it is worse"], marks=pytest.mark.deep),
    ],
    ids=["some", "all"],
)
def test_callbacks_see_the_events_of_transformers_own_trainer_in_its_order(ranks, tmp_path, names, shared):
    expected = {name: trainers.events_of(tmp_path / "stock" / name, name, stock=True) for name in names}
    for name in names if names != SOME_EVENTS else set(names) - set(shared):  # two ranks have the others
        assert trainers.events_of(tmp_path / "one" / name, name, stock=False) == expected[name], name
    for found in ranks(2).run(trainers.all_events_of, tmp_path / "two", shared):
        for name in shared:
            of_one = [
                (*event[:-1], event[-1] and event[-1] // 2) for event in expected[name]
            ]  # loaders have a share each
            assert [event for event in found[name] if event[0] != "on_prediction_step"] == [
                event for event in of_one if event[0] != "on_prediction_step"
            ], name


@pytest.mark.deep  # by default: events of two ranks above; a stop in a_run_stopped_by_one
def test_what_one_of_two_ranks_asks_for_at_any_event_both_do_as_one_rank_does(ranks, tmp_path):
    expected = trainers.events_by_wish(tmp_path / "one", 1)
    assert [events[-1][1] for events in expected] == [2, 2, 1, 0], "the steps at which they stop"
    assert expected[0].count(("on_evaluate", 1)) == expected[0].count(("on_save", 1)) == 1
    for events in ranks(2).run(trainers.events_by_wish, tmp_path / "two", 2):
        assert events == expected


def test_bfloat16_is_autocast_over_the_weights_as_they_are(tmp_path):
    import torch

    options = {"bf16": True, "max_steps": 3, "learning_rate": 1e-3}
    found = {}
    for stock in (True, False):
        model = trainers.gpt2(dtype=torch.float32)
        found[stock] = train(tmp_path, options, stock=stock, model=model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    losses = [[log["loss"] for log in found[stock].state.log_history[:-1]] for stock in (True, False)]
    assert losses[1] == pytest.approx(losses[0], rel=2**-8), "a unit in the last place of bfloat16 logits"
    assert losses[1] != pytest.approx([log["loss"] for log in _in_float32(tmp_path)], rel=1e-7), "nothing was autocast"


def _in_float32(tmp_path):
    import torch

    trainer = train(tmp_path, {"max_steps": 3, "learning_rate": 1e-3}, model=trainers.gpt2(dtype=torch.float32))
    return trainer.state.log_history[:-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_liger_kernel": True}, r"use_liger_kernel=True: its kernels are Triton's, for GPUs"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0: its noise"),
        ({"train_sampling_strategy": "group_by_length"}, r"train_sampling_strategy='group_by_length'"),
        ({"optim": "adafactor"}, r"optim='adafactor': sharded here are adamw_torch.* by name \('adafactor'\)"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
            r"function of the step",
        ),
        ({"dataloader_drop_last": True}, r"dataloader_drop_last=True: an epoch computes every.*leave it out"),
        ({"data_seed": 7}, r"data_seed=7: order and dropout share one seed"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(options, named, tmp_path):
    with pytest.raises(InputError, match=named):
        train(tmp_path, options, eval_dataset=trainers.dataset(2))


def test_every_argument_of_transformers_is_honoured_replaced_or_refused_with_a_reason():
    from dataclasses import fields

    from transformers import TrainingArguments

    from lengthwise.integrations import hf_training_args as known

    names = [field.name for field in fields(TrainingArguments) if field.init]
    groups = (known._HONOURED, known._REPLACED, known._REASONS)
    assert [name for name in names if sum(name in group for group in groups) != 1] == []
    older = {"logging_dir", "warmup_ratio", "local_rank", "gradient_checkpointing_kwargs", "activation_offloading"}
    assert (known._HONOURED | known._REPLACED.keys()) - older <= set(names)


def test_what_is_replaced_is_said(tmp_path, caplog):
    of_memory = {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "torch_empty_cache_steps": 1}
    train(tmp_path, {"dataloader_num_workers": 2, "ddp_broadcast_buffers": True, "max_steps": 1} | of_memory)
    (said,) = [record.message for record in caplog.records if "replaced by lengthwise.Trainer" in record.message]
    assert "dataloader_num_workers=2: evaluation alone has a loader" in said and "ddp_broadcast_buffers=True" in said
    assert (
        "checkpointing_kwargs={'use_reentrant': False}: layers" in said and "torch_empty_cache_steps=1: memory" in said
    )


LOSSES = {
    "compute_loss_func": ({}, {"compute_loss_func": trainers.focal_loss}, EXACT),
    "label smoothing": ({"label_smoothing_factor": 0.2}, {}, 1e-6),  # of which transformers sums a part in float32
}


def test_losses_of_logits_train_what_transformers_trains(ranks, tmp_path):
    for name, (changes, others, tolerance) in LOSSES.items():
        options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 4} | changes
        stock = train(tmp_path / "stock", options, stock=True, **others)
        expected = trainers.weights_of(stock.model)
        found = ranks(2).run(
            log_and_weights, tmp_path / "run", options | {"gradient_accumulation_steps": 2},
            lengthwise=trainers.planned(recompute="none"), **others,
        )  # fmt: skip
        for log, weights in found:
            for weight, value in expected.items():
                np.testing.assert_allclose(weights[weight], value, rtol=0, atol=tolerance, err_msg=f"{name}: {weight}")
            assert_equal_logs(log, stock.state.log_history, 1e-6)


def test_losses_that_are_no_sums_over_tokens_are_refused(tmp_path):
    def of_sequences(outputs, labels, num_items_in_batch=None):
        return trainers.focal_loss(outputs, labels, num_items_in_batch) ** 2

    def unmoved(outputs, labels, num_items_in_batch=None):
        return trainers.focal_loss(outputs, labels.roll(1), num_items_in_batch)

    def of_each_micro_batch(outputs, labels, num_items_in_batch=None):
        return trainers.focal_loss(outputs, labels, (labels[..., 1:] != -100).sum())

    def of_hidden_states(outputs, labels, num_items_in_batch=None):
        return outputs.hidden_states[-1].sum()

    for function, reason in (
        (of_sequences, "it is no sum over tokens"),
        (unmoved, "it is no sum over tokens"),
        (of_each_micro_batch, "it does not divide by num_items_in_batch: where that is 7 it gives"),
        (of_hidden_states, r"it cannot be computed of logits and labels alone \(TypeError"),
    ):
        with pytest.raises(InputError, match=f"compute_loss_func: {reason}.*make the loss with lengthwise="):
            train(tmp_path, {}, compute_loss_func=function)
    with pytest.raises(InputError, match=r"label_smoothing_factor=0.1: lengthwise=\{'loss': ...\} makes the loss"):
        train(tmp_path, {"label_smoothing_factor": 0.1}, lengthwise={"loss": lambda output, micro_batch: output.loss})


def test_a_mode_of_torch_compile_that_layers_cannot_take_is_refused(tmp_path):
    with mock.patch.dict(os.environ), pytest.raises(InputError, match="torch_compile_mode='reduce-overhead': layers"):
        train(tmp_path, {"torch_compile": True, "torch_compile_mode": "reduce-overhead"})


@pytest.mark.deep
def test_layers_that_torch_compiles_train_what_transformers_trains(stock, tmp_path):
    options, _, weights = stock
    with mock.patch.dict(os.environ):  # where transformers says it to accelerate
        found = train(tmp_path, options | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
    assert_equal_weights(trainers.weights_of(found.model), weights)


def test_kernels_of_liger_replace_layers_and_leave_the_loss(tmp_path, monkeypatch):
    import transformers

    from lengthwise.integrations import hf_training_args

    applied = []
    monkeypatch.setattr(hf_training_args, "liger_problem", lambda args: "")
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda model, config: applied.append(config))
    train(tmp_path, {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}, "max_steps": 1})
    assert applied == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_steps_without_a_loss_leave_losses_weights_and_schedule_where_they_are(tmp_path):
    rows = trainers.dataset(8)
    for number in (0, 2, 3, 5):
        rows[number]["labels"] = [-100] * len(rows[number]["labels"])
    options = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "max_steps": 8, "save_steps": 3}
    options |= {"save_strategy": "steps"}
    whole = train(tmp_path, options, train_dataset=rows)
    *log, summary = whole.state.log_history
    losses = [entry["loss"] for entry in log]
    assert losses[0] == 0 and all(losses[k] == losses[k - 1] > 1 for k in (2, 3, 5)), "as the step before"
    rates = [entry["learning_rate"] for entry in log]
    np.testing.assert_allclose(rates, [1e-2 * (1 - k / 8) for k in (0, 0, 1, 1, 1, 2, 2, 3)], rtol=1e-9)
    assert summary["train_loss"] == pytest.approx(sum(losses) / 7), "the first step has none"
    resumed = train(tmp_path, options, train_dataset=rows, resume=str(tmp_path / "checkpoint-6"))
    assert [entry["learning_rate"] for entry in resumed.state.log_history[:-1]] == rates
    for name, value in trainers.weights_of(whole.model).items():
        np.testing.assert_array_equal(trainers.weights_of(resumed.model)[name], value, err_msg=name)


def test_a_step_that_overflows_in_float16_leaves_weights_and_schedule_where_they_are(tmp_path):
    import math

    import torch

    import lengthwise as lw

    class Half(lw.Trainer):
        def train(self, *args, **options):
            self.args.fp16 = True  # which accelerate takes on GPUs alone
            return super().train(*args, **options)

    schedule = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "max_steps": 8, "save_strategy": "steps"}
    scaled = trainers.planned(loss_scale=2.0**22)

    def run(folder, **others):
        model = trainers.gpt2(dtype=torch.float32)
        return train(folder, schedule | {"save_steps": 6}, trainer_class=Half, model=model, lengthwise=scaled, **others)

    whole = run(tmp_path)
    log = whole.state.log_history[:-1]
    overflows = [not math.isfinite(row["grad_norm"]) for row in log]
    assert 0 < sum(overflows) < 6 and not overflows[-1]
    updates = [number + 1 - sum(overflows[: number + 1]) for number in range(8)]
    assert [row["learning_rate"] for row in log] == pytest.approx(
        [1e-3 * (1 - (count - (not over)) / 8) for count, over in zip(updates, overflows)]
    )
    resumed = run(tmp_path, resume=str(tmp_path / "checkpoint-6"))
    assert resumed.state.log_history[-2]["learning_rate"] == log[-1]["learning_rate"]
    for name, value in trainers.weights_of(whole.model).items():
        np.testing.assert_array_equal(trainers.weights_of(resumed.model)[name], value, err_msg=name)


@pytest.mark.parametrize(("of_arguments", "option"), [(0.3, {}), (0.0, {"weight_decay": 0.3})])
def test_a_weight_decay_that_the_optimizer_contradicts_is_refused(of_arguments, option, tmp_path):
    optimizer = partial(torch.optim.SGD, weight_decay=0.5)
    with pytest.raises(InputError, match=r"weight_decay=0\.3 is asked for, and optimizer=SGD has weight_decay=0\.5"):
        train(tmp_path, {"weight_decay": of_arguments}, lengthwise={"optimizer": optimizer} | option)


def test_weights_gathered_by_layer_are_refused_since_callbacks_look_at_all_of_them(tmp_path):
    with pytest.raises(InputError, match="callbacks see all weights after every step"):
        train(tmp_path, {}, lengthwise={"weights": "by-layer"})


def test_everything_that_would_be_ignored_is_named_at_once(tmp_path):
    import transformers

    import lengthwise as lw

    class Own(lw.Trainer):
        def compute_loss(self, model, inputs, **options):
            return super().compute_loss(model, inputs, **options)

    class Half(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **others):
            pass

    model = trainers.gpt2()
    trainer = Own(
        model=model,
        args=trainers.arguments(tmp_path, neftune_noise_alpha=5.0, use_liger_kernel=True),
        train_dataset=trainers.dataset(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
        callbacks=[Half()],
    )
    with pytest.raises(InputError) as refused:
        trainer.train()
    for name in ("neftune_noise_alpha", "use_liger_kernel", "Own.compute_loss", "optimizer:", "Half.on_substep_end"):
        assert name in str(refused.value)


def test_batches_that_packs_do_not_know_are_refused(tmp_path):
    import transformers

    plain = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    with pytest.raises(InputError, match=r"default_data_collator gives no labels for item 0"):
        train(tmp_path, {}, train_dataset=plain)
    masked = [{**item, "labels": item["input_ids"], "completion_mask": [0, 1, 1]} for item in plain[:1]]
    with pytest.raises(InputError, match=r"completion_mask of item 0 .* set remove_unused_columns=False"):
        train(tmp_path, {}, train_dataset=masked)
    packed = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 0, 1]}]
    with pytest.raises(InputError, match=r"item 0 holds 2 sequences packed into one row"):
        train(tmp_path, {}, train_dataset=packed)
    with pytest.raises(InputError, match=r"BertForQuestionAnswering does not predict next tokens"):
        config = transformers.BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        train(tmp_path, {}, model=transformers.BertForQuestionAnswering(config))
    with pytest.raises(InputError, match=r"lengthwise=\{'lr'.*say it in TrainingArguments"):
        train(tmp_path, {}, lengthwise={"lr": 1.0})


def test_a_checkpoint_of_transformers_own_trainer_is_refused(tmp_path):
    train(tmp_path, {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}, stock=True)
    with pytest.raises(InputError, match=r"not saved by lengthwise\.Trainer"):
        train(tmp_path, {}, resume=True)


def test_the_callback_tells_what_the_batches_of_transformers_own_trainer_cost(tmp_path):
    import transformers

    import lengthwise as lw

    rows = [{"input_ids": list(range(1, n + 1)), "attention_mask": [1] * n} for n in (2, 10, 3, 9)]

    def collate(items):
        width = max(len(item["input_ids"]) for item in items)
        batch = {key: np.array([item[key] + [0] * (width - len(item[key])) for item in items]) for key in rows[0]}
        batch["labels"] = np.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
        return {key: trainers.torch.from_numpy(value) for key, value in batch.items()}

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = train(
        tmp_path,
        options,
        stock=True,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[lambda: lw.TrainerCallback(equal_at=100)],
    )
    log = trainer.state.log_history[0]
    work = np.array([2, 10, 3, 9]) * (1 + np.array([2, 10, 3, 9]) / 100)
    assert log["lengthwise/padding"] == round((38 - 24) / 38, 4)
    assert log["lengthwise/imbalance"] == 1.0
    assert log["lengthwise/gain"] == round((20 * 1.1 + 18 * 1.09) / work.sum(), 4)
    assert not trainer.model._forward_pre_hooks
    assert issubclass(lw.TrainerCallback, transformers.TrainerCallback)


@pytest.mark.parametrize("is_added_later", [False, True])
def test_what_the_callback_finds_reaches_trackers_that_come_before_it(tmp_path, is_added_later):
    import transformers

    import lengthwise as lw

    class Tracker(transformers.TrainerCallback):
        def __init__(self):
            self.logs, self.num_begun = [], 0

        def on_train_begin(self, args, state, control, **others):
            self.num_begun += 1

        def on_log(self, args, state, control, logs=None, **others):
            self.logs.append(dict(logs))

    before, after, watch = Tracker(), Tracker(), lw.TrainerCallback()
    trainer = transformers.Trainer(
        model=trainers.gpt2(), args=trainers.arguments(tmp_path, max_steps=2), train_dataset=trainers.dataset(),
        callbacks=[before, after] if is_added_later else [before, watch, after],
    )  # fmt: skip
    if is_added_later:
        trainer.add_callback(watch)
    trainer.train()
    for tracker in (before, after):
        assert tracker.num_begun == 1
        assert [("lengthwise/padding" in logs, "lengthwise/gain" in logs) for logs in tracker.logs[:2]] == [
            (True, True)
        ] * 2


def test_the_callback_sees_the_batches_of_all_ranks(ranks, tmp_path):
    for log in ranks(2).run(watched_by_the_callback, tmp_path):
        assert log["lengthwise/imbalance"] == round(40 * 1.4 / (40 * 1.4 / 2 + 4 * 1.04 / 2), 4)
        assert log["lengthwise/padding"] == 0.0
        assert log["lengthwise/gain"] == 1.0
