"""transformers' Trainer with steps planned by length, and a callback for users of theirs.

    from lengthwise import Trainer                                  # instead of: from transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=rows, policy="auto")

The loop is :func:`lengthwise.prepare` and :meth:`Run.steps`; arguments, logs, evaluation, callbacks, checkpoints and
saved models are those of transformers. What cannot be honoured is refused
(:mod:`lengthwise.integrations.hf_training_args`).
"""

import functools
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch

from lengthwise.config.choices import PolicyName
from lengthwise.config.prepare_keywords import PrepareKeywords
from lengthwise.config.setting_names import as_trainer_argument
from lengthwise.core.errors import InputError, errors_spelt
from lengthwise.integrations.hf_callback import TrainerCallback
from lengthwise.integrations.hf_checkpoints import (
    FOLDER,
    check_resumable,
    log_if_anew,
    log_if_done,
    num_ranks_of,
    resume_run,
    save_run,
)
from lengthwise.integrations.hf_control import act_in_turn, agree
from lengthwise.integrations.hf_epochs import EpochBatches, EpochPlan
from lengthwise.integrations.hf_evaluation import EvaluatedBatches, begin_best_anew
from lengthwise.integrations.hf_losses import LossOf, function_problem, loss_of_function, smoothed_loss
from lengthwise.integrations.hf_losses_of_steps import StepLosses
from lengthwise.integrations.hf_meetings import MeetingTrainer, meet, meeting_before_gathers, stopping_at_bad_reads
from lengthwise.integrations.hf_overrides import is_overridden
from lengthwise.integrations.hf_schedule import Schedule
from lengthwise.integrations.hf_training_args import (
    LIGER_LOSSES,
    decay_problem,
    length_limit,
    log_replaced,
    num_steps_of,
    optimizer_name,
    optimizer_settings,
    refuse_what_cannot_be_honoured,
)
from lengthwise.runtime.loop.call_order import RankOperation
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.state.loss_scaler import FIRST_SCALE
from lengthwise.runtime.train.execute_step import StepResult
from lengthwise.runtime.wrap.model_accessors import base_model, input_embeddings
from lengthwise.session.collate import CollatedItems
from lengthwise.session.prepare import prepare

try:
    import transformers
    from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import TrainOutput
except ImportError as error:
    raise ImportError(
        f"lengthwise.Trainer needs transformers and accelerate ({error}): pip install 'lengthwise[hf]'"
    ) from error

__all__ = ["Trainer", "TrainerCallback"]


class Trainer(MeetingTrainer):
    """A drop-in for ``transformers.Trainer``: also takes ``policy`` and other options of :func:`lengthwise.prepare`.

    A step has ``per_device_train_batch_size * gradient_accumulation_steps * ranks`` sequences, as there, or
    ``lengthwise={"tokens_per_step": ...}``; how they are packed, shared and accumulated is planned. With ``bf16=True``
    weights stay as they are and the forward runs under autocast, as there.
    """

    model: Any
    model_wrapped: Any
    state: Any
    lr_scheduler: Any
    current_flos: Any

    def __init__(
        self, *args: Any, policy: PolicyName | str = "auto", lengthwise: PrepareKeywords | None = None, **options: Any
    ) -> None:
        """``policy`` and ``lengthwise``: options of :func:`lengthwise.prepare`; all else as in transformers."""
        super().__init__(*args, **options)
        self._has_trained = False
        self._evaluated: EvaluatedBatches | None = None
        self._options: dict[str, Any] = {"policy": policy, **(lengthwise or {})}

    @errors_spelt(as_trainer_argument)
    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train as transformers does, planned step by step.

        Raises:
            InputError: something that was asked for would be ignored.
        """
        refuse_what_cannot_be_honoured(self, Trainer)
        if self.args.process_index == 0:
            log_replaced(self.args)
        if self.args.use_liger_kernel:  # layers alone: logits are computed in chunks
            self.args.liger_kernel_config = {
                **(self.args.liger_kernel_config or {}),
                **dict.fromkeys(LIGER_LOSSES, False),
            }
        if trial is not None or self.hp_search_backend is not None:
            raise InputError("lengthwise.Trainer has no search for hyperparameters; train once for each setting")
        return super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> TrainOutput:
        self.accelerator.free_memory()
        run, started_s = self._prepare(), time.time()
        end_step = functools.partial(self._end_step, ignore_keys=ignore_keys_for_eval, started_s=started_s)
        run.meets_after_steps = True
        try:
            with meeting_before_gathers(self):
                self._begin(run, resume_from_checkpoint)
                with self._prepared_for_evaluation():
                    self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
                    if self.args.eval_on_start:
                        self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
                agree(self, num_accumulated=self._num_accumulated)
                self._loop(run, end_step)
        finally:
            self.run = self.optimizer = self.lr_scheduler = None
            run.close()
        self._total_loss_scalar = self._losses.mean * (self.state.global_step - self._initial_global_step)
        return self._finalize_training(None, self._num_samples(), started_s)

    def _prepare(self) -> Run:
        """The run over this trainer's dataset; its ``num_steps`` are those of all epochs or ``max_steps``."""
        args, options = self.args, dict(self._options)
        name = type(base_model(self.model)).__name__
        masked = options.get("objective") == "masked" or name.endswith("ForMaskedLM")
        classifies = name.endswith(("ForTokenClassification", "ForSequenceClassification"))
        is_known = masked or classifies or self._predicts_next_tokens()
        if not is_known and not {"loss", "inputs", "objective"} & set(options):
            raise InputError(
                f"{name} does not predict next tokens; say what has a loss and how it is made: "
                "lengthwise={'objective': ..., 'loss': ...}"
            )
        if (loss_of := self._loss_of_logits()) is not None:
            options["loss"] = loss_of
        if not {"tokens_per_step", "sequences_per_step"} & set(options):
            options["sequences_per_step"] = transformers.Trainer.get_total_train_batch_size(self, args)
        if not {"optimizer", "weight_decay"} & set(options) and args.weight_decay and (problem := decay_problem(self)):
            raise InputError(problem)
        is_decay_asked = "weight_decay" in options or bool(args.weight_decay)
        weight_decay = options.pop("weight_decay", args.weight_decay)
        if isinstance(options.get("optimizer"), str) or ("optimizer" in options and is_decay_asked):
            options["weight_decay"] = weight_decay
        if options.get("form_batches"):
            raise InputError("form_batches=True: transformers counts steps and epochs by the dataset's own batches")
        taken = {"lr", "clip_norm", "seed", "order", "steps", "epochs", "device"} & set(options)
        if taken:
            raise InputError(f"lengthwise={{{', '.join(map(repr, sorted(taken)))}: ...}}: say it in TrainingArguments")
        if options.setdefault("weights", "whole") == "by-layer":
            raise InputError(
                "lengthwise={'weights': 'by-layer'}: transformers' callbacks see all weights after every step; gather "
                "them by layer in a loop of your own, over lengthwise.prepare"
            )
        if args.gradient_checkpointing or args.activation_checkpointing:
            options.setdefault("recompute", "all")
        if args.torch_compile:
            options |= {"compile": True, "compile_backend": args.torch_compile_backend or "inductor"}
        if args.fp16:
            options.setdefault("loss_scale", FIRST_SCALE)
        epochs = self._plan_epochs(options)
        corpus = CollatedItems(
            epochs.dataset,
            self._get_collator_with_removed_columns(self.data_collator, description="training"),
            needs_labels=not masked,
            batch_size=args.per_device_train_batch_size,
            make_stream=epochs.make_stream,
        )
        options = {
            "optimizer": optimizer_settings(args, weight_decay=weight_decay),
            **length_limit(args),
            **options,
            "lr": lambda step: self._schedule.rate(),
            "clip_norm": args.max_grad_norm,
            "seed": args.seed,
            "order": epochs.order,
            "device": args.device.type,
        }
        return prepare(self.model, corpus, **cast(PrepareKeywords, options))

    def _plan_epochs(self, options: dict[str, Any]) -> EpochPlan:
        """The items of each epoch: those of the dataset, or of the sampler that a subclass makes."""
        epochs = EpochPlan(self.train_dataset, self.args, options)
        if is_overridden(self, Trainer, "_get_train_sampler"):
            epochs.follow(self._get_train_sampler(self.train_dataset))
        epochs.tell_epochs()
        self._sequences_per_epoch = epochs.size
        return epochs

    def _loss_of_logits(self) -> LossOf | None:
        """The loss that label smoothing or ``compute_loss_func`` make of logits; None: it is the model's own."""
        function, factor = self.compute_loss_func, self.args.label_smoothing_factor
        if function is None and not factor:
            return None
        what = f"label_smoothing_factor={factor}" if function is None else "compute_loss_func"
        if "loss" in self._options:
            raise InputError(f"{what}: lengthwise={{'loss': ...}} makes the loss; leave one of the two out")
        if not self._predicts_next_tokens():
            raise InputError(
                f"{what}: {type(base_model(self.model)).__name__} does not predict next tokens; make the loss with "
                "lengthwise={'loss': lambda output, micro_batch: ...}"
            )
        if function is None:
            return smoothed_loss(factor)
        num_embeddings = getattr(input_embeddings(self.model), "num_embeddings", None)
        if problem := function_problem(function, num_embeddings):
            raise InputError(f"compute_loss_func: {problem}")
        return loss_of_function(function)

    def _num_samples(self) -> float:
        """Sequences of the whole training, as transformers counts them for its speeds."""
        args, data = self.args, cast(Any, self.train_dataset)
        if args.max_steps < 0:
            return float(len(data) * args.num_train_epochs)
        return args.max_steps * self.get_total_train_batch_size(args)

    def _predicts_next_tokens(self) -> bool:
        model = base_model(self.model)
        if not isinstance(model, transformers.PreTrainedModel):
            return True
        return self._loss_shifts_labels or type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _begin(self, run: Run, checkpoint: str | None) -> None:
        """States, schedule and counters as transformers' loop has them before its first step."""
        args, per_epoch = self.args, run.num_steps  # it was prepared for one epoch
        run.num_steps = max_steps = num_steps_of(args, per_epoch=per_epoch)
        self._init_training_state(max_steps, per_epoch, math.ceil(max_steps / per_epoch), checkpoint, None)
        if checkpoint is not None:
            resume_run(run, checkpoint, step=self.state.global_step)
            log_if_done(run)
            begin_best_anew(self, Trainer, num_ranks_before=num_ranks_of(checkpoint))
        elif self._has_trained:
            log_if_anew(run)
        self._has_trained = True
        name = optimizer_name(args)
        self._schedule = Schedule(self, run.state.optimizer, name=name, num_steps=max_steps)
        self._losses = StepLosses(args.device)
        if checkpoint is not None:
            if self.state.global_step < max_steps:  # some schedules have no rate after that
                num_updates = self.state.global_step - run.ledger.skipped_steps
                self._schedule.load(checkpoint, num_updates=num_updates)
            self._losses.load(os.path.join(checkpoint, FOLDER), self.state.log_history)
            self._load_rng_state(checkpoint)
        self.run, self.optimizer, self.model_wrapped = run, self._schedule.optimizer, self.model
        self._num_accumulated = args.gradient_accumulation_steps
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._tr_loss, self._total_loss_scalar = torch.zeros(()), 0.0  # of transformers' loop: here it is _losses
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = self.get_train_dataloader()  # for callbacks: batches are planned

    def _loop(self, run: Run, end_step: Any) -> None:
        steps, has_ended = run.steps(), True
        state, stream = cast(Any, self.state), cast(Any, run.stream)
        while state.global_step < run.num_steps and not self.control.should_training_stop:
            if has_ended:
                self.control = self.callback_handler.on_epoch_begin(self.args, state, self.control)
            self.control = self.callback_handler.on_step_begin(self.args, state, self.control)
            while (result := self._compute(step := next(steps))) is None:
                pass  # it did not fit, and comes again
            self._schedule.end_update()
            self.control = self.callback_handler.on_optimizer_step(self.args, state, self.control)
            self._losses.add(result.loss)
            if not result.is_skipped:  # a step that overflowed leaves the schedule where it is, as there
                self._schedule.step()
            state.global_step += 1
            state.num_input_tokens_seen += sum(
                sum(micro_batch.pack.lengths) for p in step.plan.pipelines for micro_batch in p.micro_batches
            ) * (self.args.include_num_input_tokens_seen not in (False, "no"))
            has_ended = stream.position == 0
            state.epoch = self._epoch(run)
            self.control = self.callback_handler.on_step_end(self.args, state, self.control)
            end_step(result)
            if has_ended or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(self.args, state, self.control)
                end_step(result)

    def _compute(self, step: Step) -> StepResult | None:
        self.model.train()
        assert self.run is not None, "it trains"
        flos = 0.0
        for micro_batch in step:
            inputs = micro_batch.inputs
            if self.compute_loss_func is not None or self.args.label_smoothing_factor:  # of logits alone
                inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
            with self.compute_loss_context_manager():
                loss = self.run.wrapped_model.loss_of(self.model(**inputs), micro_batch)
            step.backward(loss)
            flos += float(self.floating_point_ops(inputs))
        self.run.clip_norm = max(0.0, self.args.max_grad_norm or 0.0)  # a callback may have set another
        result = step.update()
        if result is not None:  # a step that did not fit is computed again
            self.current_flos += flos
        return result

    def _end_step(self, result: StepResult, *, ignore_keys: Any, started_s: float) -> None:
        """Log, evaluate and save where a callback of any rank says so."""

        def act() -> None:
            num_steps, logged = self.state.global_step - self._globalstep_last_logged, self._globalstep_last_logged
            with self._prepared_for_evaluation():
                self._maybe_log_save_evaluate(
                    self._losses.to_log(num_steps),
                    result.grad_norm,
                    self.model,
                    None,
                    self.state.epoch,
                    ignore_keys,
                    started_s,
                    learning_rate=result.lr,
                )
            if self._globalstep_last_logged != logged:
                self._losses.begin_log()

        act_in_turn(self, act, num_accumulated=self._num_accumulated)

    def _epoch(self, run: Run) -> float:
        """How far the training is, in epochs: by batches of ``per_device_train_batch_size``, as transformers counts."""
        stream: Any = run.stream
        source: Any = run.collator.source
        is_sampled = isinstance(run.stream, EpochBatches)
        number = self._sequences_per_epoch if is_sampled else len(source.lengths)
        sequences_per_step = self._train_batch_size * self.args.world_size
        return float(
            stream.epoch + math.ceil(stream.position / sequences_per_step) / math.ceil(number / sequences_per_step)
        )

    @contextmanager
    def _prepared_for_evaluation(self) -> Iterator[None]:
        """The model as it was before it was prepared, for whatever callbacks and evaluation do with it."""
        with nullcontext() if self.run is None else self.run.plain():
            yield

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate as transformers does on one process, on the plain model."""
        if self.model not in self.accelerator._models:  # accelerate would wrap the forward; autocast is ours
            self.accelerator._models.append(self.model)
        self._evaluated = EvaluatedBatches(self, dataloader, ours=Trainer)
        meet(self, RankOperation.GATHER)  # loaders communicate where they begin
        with self._prepared_for_evaluation(), self._evaluated.as_on_one_process(), stopping_at_bad_reads(dataloader):
            return super().evaluation_loop(dataloader, *args, **options)

    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch as transformers has them on one process."""
        step = super().prediction_step
        return step(*args, **options) if self._evaluated is None else self._evaluated.predict(step, *args, **options)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the autocast of the precision that was asked for."""
        if self.args.fp16:
            return torch.autocast(self.args.device.type, dtype=torch.float16)
        return self.accelerator.autocast()

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Compute the loss of an evaluation as transformers does."""
        return convert_to_fp32(super().compute_loss(*args, **options))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_resumable(resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.run is not None, "checkpoints are of a training"
        save_run(self.run, output_dir)
        if self.args.should_save:
            self._schedule.save(output_dir)
            self._losses.save(os.path.join(output_dir, FOLDER))
