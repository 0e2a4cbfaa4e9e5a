"""Evaluations of a small model by transformers' Trainer and by ours, of ragged rows in batches, on any ranks."""

import numpy as np
import torch

from tests.session import trainers
from tests.session.loops import as_started_by_torchrun

ROWS = 7
KINDS = (
    "the model's loss",
    "label smoothing",
    "compute_loss_func",
    "only losses",
    "a loss that masks no row",
    "trained",
)
"""Of the losses of an evaluation."""


def padded(items):
    """Rows and labels on the left, so that positions depend on the longest row of a batch."""
    longest = max(len(item["input_ids"]) for item in items)

    def columns(name, fill):
        return torch.tensor([[fill] * (longest - len(item[name])) + item[name] for item in items])

    batch = {"input_ids": columns("input_ids", 0), "labels": columns("labels", -100)}
    for item, mask in zip(items, torch.zeros_like(batch["input_ids"])):
        mask[longest - len(item["input_ids"]) :] = 1
        item["mask"] = mask
    return batch | {"attention_mask": torch.stack([item["mask"] for item in items])}


def _scored(items):
    batch = padded(items)
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {
        "labels": torch.tensor([float(len(item["input_ids"])) for item in items], dtype=torch.float64)
    }


def _regression():
    from transformers import GPT2ForSequenceClassification

    config = trainers.gpt2().config
    config.num_labels, config.pad_token_id, config.problem_type = 1, 0, "regression"
    torch.manual_seed(3)
    return GPT2ForSequenceClassification(config).double()


def _seen(prediction):
    """A metric of all rows: what was predicted, with the loss of every row."""
    return {"rows": len(prediction.predictions), "all": float(np.sum(prediction.losses)), "sum": _sum(prediction)}


def _sum(prediction):
    return float(prediction.predictions[prediction.label_ids != -100].sum())


def evaluated(folder, kind, rows_per_batch, *, stock=False):
    """What an evaluation logs, on this rank."""
    import transformers

    import lengthwise as lw

    as_started_by_torchrun()
    options = {"per_device_eval_batch_size": rows_per_batch, "max_steps": 1, "learning_rate": 0.0}
    options |= {"gradient_accumulation_steps": 1, "include_for_metrics": ["loss"]}
    others = {"data_collator": padded, "compute_metrics": _seen, "model": trainers.gpt2()}
    if kind == "label smoothing":
        options["label_smoothing_factor"] = 0.1
    elif kind == "compute_loss_func":
        others["compute_loss_func"] = trainers.focal_loss
    elif kind == "only losses":
        options["prediction_loss_only"] = True
    elif kind == "a loss that masks no row":
        others |= {"data_collator": _scored, "model": _regression(), "compute_metrics": None}
    others |= {"eval_dataset": trainers.dataset(ROWS), "train_dataset": trainers.dataset(4)}
    others |= {} if stock else {"lengthwise": trainers.planned()}
    trainer = (transformers.Trainer if stock else lw.Trainer)(args=trainers.arguments(folder, **options), **others)
    if kind == "trained":
        trainer.train()
    metrics = trainer.evaluate()
    assert trainer.args.average_tokens_across_devices, "as it was"
    return {
        name: value for name, value in metrics.items() if not name.endswith(("_runtime", "_second", "_time", "epoch"))
    }


def best_of(folder, options, *, is_overridden, data=None, resume=None):
    """The best step and loss before training, with the patience spent since; and the best step and loss after it."""
    import transformers

    import lengthwise as lw

    class Own(lw.Trainer):
        def prediction_step(self, model, inputs, *args, **others):
            return super().prediction_step(model, inputs, *args, **others)

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1} | options
    options |= {"load_best_model_at_end": True, "lr_scheduler_type": "constant", "optim": "sgd"}
    patience, best = transformers.EarlyStoppingCallback(9), []

    class Notes(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **others):
            callbacks = trainer.callback_handler.callbacks
            stopping = next(callback for callback in callbacks if isinstance(callback, type(patience)))
            best.append((state.best_global_step, state.best_metric, stopping.early_stopping_patience_counter))

    trainer = (Own if is_overridden else lw.Trainer)(
        model=trainers.gpt2(), args=trainers.arguments(folder, **options), train_dataset=trainers.dataset(),
        eval_dataset=trainers.dataset(ROWS) if data is None else data, callbacks=[patience, Notes()],
        lengthwise=trainers.planned(),
    )  # fmt: skip
    as_started_by_torchrun()
    trainer.train(resume_from_checkpoint=resume)
    return best[0], (trainer.state.best_global_step, trainer.state.best_metric)
