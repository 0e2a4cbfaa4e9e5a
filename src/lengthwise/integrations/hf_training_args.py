"""What of transformers' Trainer is honoured or replaced by ours; the rest is refused by name with the reason."""

import logging
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.integrations.hf_evaluation import evaluation_problem
from lengthwise.integrations.hf_overrides import override_problems
from lengthwise.integrations.hf_schedule import scheduler_problem

_REASONS = {
    "deepspeed": "the optimizer's state is sharded over the ranks already",
    "fsdp": "the optimizer's state is sharded over the ranks already, and weights are whole",
    "fsdp_config": "the optimizer's state is sharded over the ranks already, and weights are whole",
    "torch_compile_mode": "layers are compiled in the backend's default mode",
    "neftune_noise_alpha": "its noise is drawn by each rank for itself, and ranks share sequences",
    "ignore_data_skip": "a resumed run computes every sequence once",
    "average_tokens_across_devices": "every target weighs the same, whatever rank computes it; leave it out",
    "dataloader_drop_last": "an epoch computes every sequence; leave it out, or drop rows of the dataset yourself",
    "length_column_name": "batches are not grouped by length: steps are planned by it",
    "use_cache": "sequences of a pack would mix through it",
    "optim_args": "no argument of it is known here",
    "optim_target_modules": "every parameter has the same optimizer",
    "debug": "its hooks look at whole batches",
    "enable_jit_checkpoint": "it saves what this trainer does not have",
    "parallelism_config": "who shares what is planned at every step",
    "packing": "sequences are packed by plan; set packing=False",
    "truncation_mode": "rows are cut at their end; cut them at their start yourself",
}
"""Arguments that must be as they are by default."""

_HONOURED = frozenset(
    [
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "bf16",
        "fp16",
        "label_smoothing_factor",
        "bf16_full_eval",
        "fp16_full_eval",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "use_liger_kernel",
        "liger_kernel_config",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "logging_dir",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_on_start",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "save_only_model",
        "save_strategy",
        "save_steps",
        "save_on_each_node",
        "save_total_limit",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "restore_callback_states_from_checkpoint",
        "full_determinism",
        "seed",
        "data_seed",
        "use_cpu",
        "remove_unused_columns",
        "label_names",
        "train_sampling_strategy",
        "ddp_backend",
        "ddp_timeout",
        "skip_memory_metrics",
        "do_train",
        "do_eval",
        "do_predict",
        "resume_from_checkpoint",
        "local_rank",
    ]
)
"""Arguments that do what they say."""

_NO_LOADER = (
    "evaluation alone has a loader; training reads items in the rank, or in lengthwise={'workers': ...} processes"
)
_NO_DDP = "there is no DistributedDataParallel: gradients are summed once a step"
_REPLACED = {
    "gradient_checkpointing": "lengthwise={'recompute': 'all'}",
    "activation_checkpointing": "lengthwise={'recompute': 'all'}",
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), "layers are computed again by plan"
    ),
    **dict.fromkeys(("auto_find_batch_size", "torch_empty_cache_steps", "activation_offloading"), "memory is planned"),
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
    "accelerator_config": "batches are planned, none is dispatched or split",
    **dict.fromkeys(
        (
            "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
            "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        ),
        _NO_LOADER,
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), _NO_DDP
    ),
}  # fmt: skip
"""Arguments in whose place something else is done, which is logged where they are set."""

_OF_ROWS = frozenset(
    [
        "model_init_kwargs",
        "chat_template_path",
        "dataset_text_field",
        "dataset_kwargs",
        "dataset_num_proc",
        "eos_token",
        "pad_token",
        "max_length",
        "shuffle_dataset",
        "packing_strategy",
        "padding_free",
        "pad_to_multiple_of",
        "eval_packing",
        "completion_only_loss",
        "assistant_only_loss",
        "loss_type",
    ]
)
"""What trl's SFTConfig adds that has been done to rows and models before they come here, or is checked below."""
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Options of liger-kernel that replace losses, not layers."""
_LOSSES = (None, "nll", "chunked_nll")
"""Values of its ``loss_type`` that are the model's own loss."""

_NEWER_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Arguments that transformers sets to another one, which has another name since its version 5."""
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""What transformers calls those that are the same here."""
_STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_EVENTS = {
    "on_substep_end": "ranks have different numbers of micro-batches",
    "on_pre_optimizer_step": "gradients are summed, clipped and used in one go",
}


def refuse_what_cannot_be_honoured(trainer: Any, ours: type) -> None:
    """Raise one ``InputError`` that names everything of ``trainer``, an instance of ``ours``, that would be ignored."""
    problems = [*_of_arguments(trainer.args), *_of_trainer(trainer, ours)]
    if problems:
        raise InputError("lengthwise.Trainer cannot do what this one is asked to:\n  " + "\n  ".join(problems))


def length_limit(args: Any) -> dict[str, Any]:
    """Options of ``prepare`` that cut rows at the ``max_length`` of trl's SFTConfig, as its own trainer does."""
    limit = getattr(args, "max_length", None)
    return {} if limit is None else {"max_length": limit, "over_length": "truncate"}


def optimizer_name(args: Any) -> str:
    """What the optimizer is called here."""
    return _OPTIMIZERS[_plain(args.optim)]


def optimizer_settings(args: Any, *, weight_decay: float) -> OptimizerSettings:
    """The optimizer that arguments ask for, with a decay of its own."""
    return OptimizerSettings(
        name=optimizer_name(args),
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        momentum=0.0,
        weight_decay=weight_decay,
    )


def num_steps_of(args: Any, *, per_epoch: int) -> int:
    """Steps of a training whose epochs have ``per_epoch``; a negative ``max_steps`` is none."""
    return int(args.max_steps if args.max_steps >= 0 else math.ceil(args.num_train_epochs * per_epoch))


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def log_replaced(args: Any) -> None:
    """Log once which arguments that are set are replaced by something else."""
    words = [f"{name}={value!r}: {_REPLACED[name]}" for name, value in _changed(args) if name in _REPLACED]
    if words:
        logging.getLogger("lengthwise").warning("replaced by lengthwise.Trainer: %s", "; ".join(words))


def _changed(args: Any) -> Iterator[tuple[str, Any]]:
    """The arguments that are not as they are by default."""
    for field in fields(args):
        default = field.default if field.default is not MISSING else None
        if field.default_factory is not MISSING:
            default = field.default_factory()
        value = getattr(args, field.name) if field.init else default
        if value != default and (value or default) and not _is_filled_in(args, field.name, value):
            yield field.name, value


def _is_filled_in(args: Any, name: str, value: Any) -> bool:
    """Whether an argument is as transformers makes it where nobody sets it."""
    if name == "accelerator_config":
        return bool(value == AcceleratorConfig())
    if name == "dataloader_pin_memory":
        return bool(args.use_cpu)  # it is False there
    newer_name = _NEWER_NAMES.get(name, name)
    return newer_name != name and getattr(args, newer_name, None) == value


def _of_arguments(args: Any) -> list[str]:
    problems = []
    for name, value in _changed(args):
        if name in _HONOURED or name in _REPLACED or (name in _OF_ROWS and _is_of_trl(type(args))):
            continue
        problems.append(f"{name}={value!r}: {_REASONS.get(name, 'it is not known what it asks for')}")
    if args.use_liger_kernel and (problem := liger_problem(args)):
        problems.append(f"use_liger_kernel=True: {problem}")
    if _plain(args.optim) not in _OPTIMIZERS:
        known_optimizers = ", ".join(_OPTIMIZERS)
        problems.append(
            f"optim={_plain(args.optim)!r}: sharded here are {known_optimizers}; others as lengthwise={{'optimizer': "
            "...}, by name ('adafactor') or what makes them of parameter groups"
        )
    if _plain(args.lr_scheduler_type) in _STATEFUL_SCHEDULES:
        problems.append(
            f"lr_scheduler_type={_plain(args.lr_scheduler_type)!r}: the rate is to be a function of the step"
        )
    if _plain(args.train_sampling_strategy) not in ("random", "sequential"):
        problems.append(
            f"train_sampling_strategy={_plain(args.train_sampling_strategy)!r}: what is learned does not depend on "
            "lengths, and steps are balanced by them; leave it out"
        )
    if (loss_type := getattr(args, "loss_type", None)) not in _LOSSES:
        problems.append(
            f"loss_type={loss_type!r}: the loss is the model's own (nll); make another with lengthwise={{'loss': ...}}"
        )
    if args.data_seed not in (None, args.seed):
        problems.append(f"data_seed={args.data_seed}: order and dropout share one seed ({args.seed})")
    return problems


def liger_problem(args: Any) -> str:
    """Why kernels of liger-kernel cannot be used; an empty string if they can."""
    if args.device.type == "cpu":
        return "its kernels are Triton's, for GPUs, and this run is on a CPU; set use_liger_kernel=False"
    if not transformers.utils.is_liger_kernel_available():
        return "liger-kernel is not installed: pip install liger-kernel"
    fused = [name for name in LIGER_LOSSES if (args.liger_kernel_config or {}).get(name)]
    if fused:
        return (
            f"liger_kernel_config has {', '.join(fused)}, and here logits are computed chunk by chunk already, on "
            "shards too; leave it out: kernels of layers are used"
        )
    return ""


def _is_of_trl(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__)


def _of_trainer(trainer: Any, ours: type) -> list[str]:
    name_of = type(trainer).__name__
    if _is_of_trl(type(trainer)):
        return [
            f"{name_of}: trl's trainers compute their own steps; make one, which prepares rows and adapters, and hand "
            "over what it has: lengthwise.Trainer(model=sft.model, args=sft.args, train_dataset=sft.train_dataset, "
            "data_collator=sft.data_collator)"
        ]
    problems = [*override_problems(trainer, ours)]
    masks = {"assistant_only_loss": "assistant_masks", "completion_only_loss": "completion_mask"}
    for name, column in masks.items():
        if getattr(trainer.args, name, None) and not {column, "labels"} & set(_first_item(trainer.train_dataset)):
            problems.append(f"{name}=True: items have neither {column} nor labels, which say what has a loss")
    for name, reason in (
        ("optimizer", "the optimizer is sharded; choose it with optim or lengthwise={'optimizer': ...}"),
        ("optimizer_cls_and_kwargs", "the optimizer is sharded; choose it with optim or lengthwise={'optimizer': ...}"),
    ):
        if getattr(trainer, name, None) is not None:
            problems.append(f"{name}: {reason}")
    problems += filter(None, (scheduler_problem(trainer), evaluation_problem(trainer, ours)))
    for callback in trainer.callback_handler.callbacks:
        for event, reason in _EVENTS.items():
            if getattr(type(callback), event) is not getattr(transformers.TrainerCallback, event):
                problems.append(f"{type(callback).__name__}.{event}: {reason}")
    data = trainer.train_dataset
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        problems.append(f"train_dataset: {type(data).__name__} has no length or no items; steps are planned by lengths")
    return problems


def _first_item(data: Any) -> Any:
    item = data[0] if hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data) else {}
    return item.keys() if hasattr(item, "keys") else ()


def decay_problem(trainer: Any) -> str | None:
    """What differs between the parameters that decay there and here: all matrices, and nothing else."""
    model = trainer.model
    theirs = set(trainer.get_decay_parameter_names(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name in theirs) != (parameter.dim() > 1):
            words = "decays there and not here" if name in theirs else "decays here and not there"
            return (
                f"weight_decay={trainer.args.weight_decay}: {name} of shape {tuple(parameter.shape)} {words}, where "
                "all matrices decay and no vectors; set weight_decay to 0, or give lengthwise={'weight_decay': ...}"
            )
    return None
