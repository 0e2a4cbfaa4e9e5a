"""A small model of transformers under its own Trainer and under ours, on one process or as a rank."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch.nn import functional as F

from tests.api import models
from tests.api.loops import as_started_by_torchrun, weights_of


def exact_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, ignore_index=-100, **others):
    """What transformers computes in float32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def llama(seed=0, dtype=torch.float64):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=models.VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(dtype)
    if dtype is torch.float64:
        model.loss_function = exact_loss
    return model


def dataset(count=18, *, shortest=3):
    """Half of every second row is a prompt, which has no loss."""
    found = []
    for number, row in enumerate(models.rows(count, longest=40)):
        row = np.concatenate([row, row])[: max(shortest, len(row))]
        labels = np.where(np.arange(len(row)) < len(row) // 2 * (number % 2), -100, row)
        found.append({"input_ids": row.tolist(), "labels": labels.tolist()})
    return found


def arguments(folder, **options):
    from transformers import TrainingArguments

    defaults = {
        "per_device_train_batch_size": 1,
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
    """Options of prepare under which ranks share the longest rows."""
    return {"cost": models.SimpleCost(capacity=32, loss=0.4, c_s=0.05), "memory_gib": 32} | options


def train(folder, options, *, stock=False, resume=None, model=None, callbacks=(), **others):
    """The log, the weights and the trainer's state after a run."""
    import transformers

    import lengthwise as lw

    as_started_by_torchrun()
    model = model or llama()
    common = {"model": model, "args": arguments(folder, **options), "train_dataset": dataset()} | others
    if stock:
        trainer = transformers.Trainer(callbacks=list(callbacks), **common)
    else:
        common.setdefault("lengthwise", planned())
        trainer = lw.Trainer(callbacks=[make() for make in callbacks], **common)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def log_and_weights(*args, **options):
    """The same without what cannot be sent."""
    trainer = train(*args, **options)
    return trainer.state.log_history, weights_of(trainer.model)


class StopsOnOneRank:
    """Made on every rank; asks on the last one alone."""

    def __new__(cls):
        import transformers

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **others):
                if state.global_step == 2 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                    control.should_training_stop = True
                return control

        return Stop()
