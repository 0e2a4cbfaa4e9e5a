"""A small model of transformers under its own Trainer and under ours, on one process or as a rank."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch.nn import functional as F

from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of


def exact_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, ignore_index=-100, **others):
    """What transformers computes in float32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def focal_loss(outputs, labels, num_items_in_batch=None):
    """A ``compute_loss_func``: of logits and labels of whole sequences, as users write it."""
    logits, targets = outputs.logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / num_items_in_batch


def gpt2(seed=0, dtype=torch.float64):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(vocab_size=models.VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, **none)
    model = GPT2LMHeadModel(config).to(dtype)
    if dtype is torch.float64:
        model.loss_function = exact_loss
    return model


def dataset(count=18, *, shortest=3):
    """Half of every second row is a prompt, which has no loss; transformers counts the first label with some models."""
    found = []
    for number, row in enumerate(models.rows(count, longest=40)):
        row = np.concatenate([row, row])[: max(shortest, len(row))]
        labels = np.where(np.arange(len(row)) < max(1, len(row) // 2 * (number % 2)), -100, row)
        found.append({"input_ids": row.tolist(), "labels": labels.tolist()})
    return found


def arguments(folder, **options):
    from transformers import TrainingArguments

    defaults = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": 4,
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | options))


def planned(**options):
    """Options of prepare under which ranks share the longest rows; what comes before a run is compared where asked."""
    return {
        "check": False,
        "cost": models.SimpleCost(capacity=32, loss=0.4, c_s=0.05),
        "memory_gib": 32,
        "policy": "dcp-intra",
    } | options


def train(folder, options, *, stock=False, resume=None, model=None, callbacks=(), trainer_class=None, **others):
    """The log, the weights and the trainer's state after a run."""
    import transformers

    import lengthwise as lw

    as_started_by_torchrun()
    model = model or gpt2()
    common = {"model": model, "args": arguments(folder, **options), "train_dataset": dataset()} | others
    if not stock:
        common.setdefault("lengthwise", planned())
    trainer_class = trainer_class or (transformers.Trainer if stock else lw.Trainer)
    trainer = trainer_class(callbacks=[make() for make in callbacks], **common)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def log_and_weights(*args, **options):
    """The same without what cannot be sent."""
    trainer = train(*args, **options)
    return trainer.state.log_history, weights_of(trainer.model)


class Callbacks:
    """What makes callbacks: transformers is imported by ranks that need it."""

    @staticmethod
    def stops_on_the_last_rank(step=2):
        import transformers

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **others):
                if state.global_step == step and args.process_index == args.world_size - 1:
                    control.should_training_stop = True
                return control

        return Stop()

    @staticmethod
    def notes(events, asks=lambda event, state, control: None):
        """Every event, in ``events``; at saves and evaluations the model is called as a user's callback may.

        ``asks`` sets what the callback wants at an event.
        """
        import transformers

        class Notes(transformers.TrainerCallback):
            pass

        def noting(event):
            def note(self, args, state, control, model=None, train_dataloader=None, **others):
                flags = [name.removeprefix("should_") for name, value in vars(control).items() if value]
                metrics = sorted(others.get("metrics") or others.get("logs") or ())
                epoch = None if state.epoch is None else round(state.epoch, 9)
                events.append(
                    (event, state.global_step, epoch, flags, metrics, train_dataloader and len(train_dataloader))
                )
                if event in ("on_save", "on_evaluate", "on_log"):
                    model(torch.arange(5)[None].repeat(2, 1))
                asks(event, state, control)

            return note

        names = "init_end train_begin train_end epoch_begin epoch_end step_begin step_end optimizer_step log save "
        for name in (names + "evaluate prediction_step").split():
            setattr(Notes, f"on_{name}", noting(f"on_{name}"))
        return Notes()


def wishes(event, state, control):
    """What a callback asks for: logs, evaluations and saves out of their turn, and the end in the second epoch."""
    asked = {
        ("on_epoch_begin", 0): "log", ("on_step_begin", 1): "save", ("on_optimizer_step", 2): "evaluate",
        ("on_step_end", 4): "log", ("on_epoch_end", 5): "evaluate", ("on_log", 4): "save",
        ("on_evaluate", 5): "log", ("on_step_end", 7): "training_stop",
    }  # fmt: skip
    if (wish := asked.get((event, state.global_step))) is not None:
        setattr(control, f"should_{wish}", True)


EVENTS = {
    "by steps": {"logging_steps": 3, "eval_steps": 2, "save_steps": 3, "max_steps": 7, "logging_first_step": True},
    "by epochs": {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    "as a callback asks": {"logging_strategy": "no", "eval_strategy": "no"},
    "until it is worse": {"eval_steps": 1, "save_steps": 1, "learning_rate": 1.0, "load_best_model_at_end": True},
    "before and after": {"eval_on_start": True, "eval_delay": 2, "eval_steps": 1, "save_strategy": "best"},
    "gone on": {"eval_steps": 2, "save_steps": 2, "max_steps": 7},
}
"""Arguments under which events of callbacks come in other orders."""


def events_of(folder, name, *, stock, accumulation=4):
    """All events of a run, as a callback notes them; it may be resumed from the middle of an epoch."""
    from transformers import EarlyStoppingCallback

    options = {
        "gradient_accumulation_steps": accumulation, "num_train_epochs": 2, "max_steps": -1, "eval_strategy": "steps",
        "metric_for_best_model": "loss", "optim": "sgd", "save_strategy": "steps",
    }  # fmt: skip
    options |= EVENTS[name]
    if name == "as a callback asks":
        options["save_strategy"] = "no"
    events = []
    callbacks = [lambda: Callbacks.notes(events, wishes if name == "as a callback asks" else lambda *_: None)]
    callbacks += [lambda: EarlyStoppingCallback(early_stopping_patience=2)] if name == "until it is worse" else []
    common = {"stock": stock, "callbacks": callbacks, "eval_dataset": dataset(7)}
    train(folder, options, **common)
    if name == "gone on":
        train(folder, options, resume=str(folder / "checkpoint-2"), model=gpt2(seed=9), **common)
    return events


def all_events_of(folder, names):
    """By name: all events on this of two ranks, whose steps are those of one process."""
    return {name: events_of(folder / name, name, stock=False, accumulation=2) for name in names}


def stop_on_the_last(folder, options):
    """How far a rank gets when the last one wants to stop."""
    options = options | {"weight_decay": 0.1}
    trainer = train(folder, options, callbacks=[Callbacks.stops_on_the_last_rank], lengthwise=planned(recompute="none"))
    return trainer.state.global_step, trainer.state.log_history


WISHES = (
    {("on_log", 1): "evaluate", ("on_evaluate", 1): "save", ("on_log", 2): "save", ("on_save", 2): "training_stop"},
    {("on_log", 2): "training_stop"},
    {("on_step_end", 1): "evaluate", ("on_evaluate", 1): "training_stop"},
    {("on_train_begin", 0): "training_stop"},
)
"""What a callback asks for at an event of a step."""


def events_by_wish(folder, num_ranks):
    """For each of these wishes of the last rank's callback: events and their steps, as this rank has them."""
    import torch.distributed as dist

    options = {"logging_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 4 // num_ranks, "optim": "sgd"}
    all_events = []
    for number, asked in enumerate(WISHES):

        def ask(event, state, control, asked=asked):
            wish = asked.get((event, state.global_step))
            if wish is not None and (num_ranks == 1 or dist.get_rank() == num_ranks - 1):
                setattr(control, f"should_{wish}", True)

        events = []
        notes = [lambda events=events, ask=ask: Callbacks.notes(events, ask)]
        train(folder / str(number), options, callbacks=notes, eval_dataset=dataset(4))
        all_events.append([event[:2] for event in events if event[0] != "on_prediction_step"])
    return all_events


def watched_by_the_callback(folder):
    """What the callback finds where one rank has a row of 40 tokens, the other one of 4."""
    import lengthwise as lw

    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (40, 4)]
    options = {"gradient_accumulation_steps": 1, "max_steps": 1}
    watch = [lambda: lw.TrainerCallback(equal_at=100)]
    return train(folder, options, stock=True, train_dataset=rows, callbacks=watch).state.log_history[0]


def adapter(kind, seed=0):
    """A small GPT-2 in float64 with an adapter of peft that is not zero at the beginning."""
    import peft

    model = gpt2()
    torch.manual_seed(seed)
    common = {"task_type": "CAUSAL_LM"}
    if kind == "prompt":
        return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, **common))
    options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(use_dora=kind == "dora", **options, **common)).double()


def survive(folder, place):
    """The last rank runs out of memory once, in the second step: log, weights, failures, and what was noted."""
    import transformers

    from lengthwise.core.specs import cluster_preset
    from tests.session.memory_limit import Lying

    failures, events, armed = [], [], []

    def fail():
        if armed:
            failures.append(armed.pop())
            raise torch.OutOfMemoryError("no memory is left")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            fail()
            return grad

    class Arm(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if state.global_step == 1 and not failures and args.process_index == args.world_size - 1:
                armed.append(place)

        def on_train_begin(self, args, state, control, **others):
            events.append(refiner_of())

    model = gpt2()
    model.transformer.h[1].mlp.register_forward_hook(
        lambda module, args, output: fail() if place == "forward" else Fails.apply(output)
    )
    lying = {"cost": Lying(cluster_preset("2xcpu", memory_gib=1 / 1024)), "memory_gib": 1 / 1024}
    options = {"optim": "sgd", "gradient_accumulation_steps": 2}
    found = []
    refiner_of = lambda: found[0].run.on_oom.__self__  # noqa: E731

    class Watched(_trainer()):
        def __init__(self, *args, **others):
            super().__init__(*args, **others)
            found.append(self)

    trainer = train(folder, options, model=model, callbacks=[Arm], lengthwise=lying, trainer_class=Watched)
    noted = [event["event"] for event in events[0].events]
    return trainer.state.log_history, weights_of(trainer.model), len(failures), noted


def _trainer():
    import lengthwise as lw

    return lw.Trainer
