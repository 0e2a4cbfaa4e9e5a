"""The engine of prepared models: the training loop of `lengthwise train` drives any model through it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import CheckError, Setting, as_key, errors_spelt
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.loop.forward_only import forwards
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.saved_beside import beside_to_save, restore_beside
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import DivergedError, StepResult, advice_at
from lengthwise.runtime.train.micro_batch_tensors import TokenSource
from lengthwise.runtime.train.text_samples import LogitsOf
from lengthwise.runtime.train.training_engine import PeekPlan
from lengthwise.runtime.train.validation import AskStop, nobody_asks, sync_batch
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.micro_batch import MicroBatch


class PreparedEngine:
    """A prepared run whose batches and plans come from the training loop; a ``TrainingEngine``."""

    def __init__(self, run: Run, *, validation: PackCollator | None = None) -> None:
        """``validation``: the collator of the validation set; None: there is none."""
        assert isinstance(run.state, ShardedState), "FSDP2 holds no models of configurations"
        self.run, self.state, self._validation = run, run.state, validation
        self._attempt = 0
        """How often the step was given up."""

    def begin(self) -> None:
        """Do nothing: the model was prepared before."""

    def read_ahead(self, plan: StepPlan, peek: PeekPlan | None) -> None:
        """Do nothing: sequences are read when they are computed."""

    @errors_spelt(as_key)  # and not as prepare's users do
    def compute_step(self, plan: StepPlan, clock: StepClock, *, lr: float) -> StepResult | None:
        """Compute a step and update the weights at ``lr`` times the plan's factor; None: it did not fit, plan it again.

        Raises:
            DivergedError: the loss or the gradient is not finite; weights are left as they were.
        """
        run = self.run
        run.lr = lambda step: lr
        step = run.begin_step(plan, clock, attempt=self._attempt)
        for micro_batch in step:
            step.backward(run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch))
        try:
            result = step.update()
        except DivergedError as error:
            raise error.with_advice(advice_at(lr * plan.lr_factor)) from None
        self._attempt = 0 if result is not None else self._attempt + 1
        return result

    @torch.no_grad()
    @errors_spelt(as_key)
    def mean_loss(self, plans: Sequence[StepPlan], source: TokenSource, *, stop: AskStop = nobody_asks) -> float:
        """Mean loss over all targets of plans for the sequences of ``source``; changes neither weights nor generators.

        Raises:
            CheckError: the ranks have different plans.
            StopAgreedError: a rank is to stop, as ``stop`` says.
            InfeasibleError: a rank runs out of memory.
        """
        run, wrapped_model = self.run, self.run.wrapped_model
        collator = self._validation
        assert collator is not None, "the run has a validation set"
        shown = PreparedModel(wrapped_model, run.world, collator=collator, state=self.state, seed=run.seed)
        sums = torch.zeros(2, dtype=torch.float64, device=run.world.device)  # of losses by target, of targets

        def add(micro_batch: MicroBatch, output: Any, is_whole: bool) -> None:
            loss, count = wrapped_model.loss_of(output, micro_batch), micro_batch.num_targets
            if is_whole and count and not micro_batch.shard.has_failed:  # of no targets the mean is 0 / 0
                sums.add_(torch.tensor([float(loss) * count, count], dtype=sums.dtype, device=sums.device))

        with self._evaluating():
            for plan in plans:
                sync_batch(plan, run.world, StepClock(run.world), stop)
                forwards(
                    run.begin_plan, shown, plan, add, usual_scripts=run.usual_scripts, what="validation",
                    way_out=f"lower {Setting.MAX_TOKENS}",
                )  # fmt: skip
        total, num_targets = sum_over_ranks(sums).tolist()
        return float(total / num_targets)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Within, a model computed by its stock forward is in evaluation mode; packs have no noise in validation."""
        return nullcontext() if self.run.wrapped_model.by_sequence is None else _eval_mode(self.run.model)

    @contextmanager
    def predicting(self) -> Iterator[LogitsOf | None]:
        """Within, predict next tokens with the weights of the moment on the first rank; None on others."""
        device = self.run.world.device
        with self.run.plain() as model, _eval_mode(model), torch.no_grad():

            def logits_of(tokens: Sequence[int]) -> Tensor:
                logits: Tensor = model(input_ids=torch.tensor([*tokens], device=device)[None]).logits[0, -1]
                return logits

            yield logits_of if self.run.world.is_first else None

    def num_recompiles(self) -> int:
        """Number of graphs that this rank compiled in the last step."""
        return self.run.num_recompiles

    def state_dict(self) -> dict[str, Any]:
        """The model's buffers, if it has any that are saved with it, and checksums of frozen weights.

        Raises:
            CheckError: a frozen weight has changed since the run began.
        """
        entries, changed = beside_to_save(self.run)
        if changed:
            raise CheckError(
                f"{next(iter(changed))} has changed since the run began, and `lengthwise train` keeps what is trained "
                "alone: train it, or train in a loop of your own (lengthwise.prepare), whose checkpoints have it"
            )
        return entries

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Go on from a checkpoint whose weights and optimizer have been restored.

        Raises:
            InputError: its buffers or frozen weights are of another model.
        """
        restore_beside(self.run, state, checkpoint, files={})
        self.run.update_weights()

    def close(self) -> None:
        """Do nothing: the process ends with its run."""


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Within, a model is in evaluation mode."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in training:
            module.training = is_training
