"""What computes the steps of a training run: the protocol of an engine, and the engine of this library's own models."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from lengthwise.config.run_config import Config
from lengthwise.core.batch import Pack
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.out_of_memory import MOST_ATTEMPTS, MicroBatchFailure
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.compile.compiled_layers import CompiledLayers
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.data_prefetch import Prefetcher, packs_of
from lengthwise.runtime.train.executable import check_compiled
from lengthwise.runtime.train.execute_step import StepMemoryError, StepResult, run_step
from lengthwise.runtime.train.micro_batch_tensors import TokenSource, masking_of
from lengthwise.runtime.train.text_samples import LogitsOf, predicting
from lengthwise.runtime.train.validation import AskStop, nobody_asks, validation_loss
from lengthwise.sim.schedule_check import shares_of

OnOutOfMemory = Callable[[StepPlan, tuple[MicroBatchFailure, ...]], None]
"""Is told, on every rank, which micro-batches of a plan ran out of memory."""
PeekPlan = Callable[[], StepPlan | None]
"""Gives the plan of the step after, if it is known."""


class TrainingEngine(Protocol):
    """A model on its ranks, as far as the training loop uses it; every rank makes the same calls in the same order."""

    state: ShardedState

    def begin(self) -> None:
        """Prepare for the first step, such as by compiling."""
        ...

    def read_ahead(self, plan: StepPlan, peek: PeekPlan | None) -> None:
        """Start to read this rank's sequences of a plan; ``peek``: gives the plan of the step after, if it is known."""
        ...

    def compute_step(self, plan: StepPlan, clock: StepClock, *, lr: float) -> StepResult | None:
        """Compute a step and update the weights at ``lr`` times the plan's factor; None: it did not fit, plan it again.

        Raises:
            DivergedError: the loss or the gradient is not finite; weights are left as they were.
        """
        ...

    def mean_loss(self, plans: Sequence[StepPlan], source: TokenSource, *, stop: AskStop = nobody_asks) -> float:
        """Mean loss over all targets of plans for the sequences of ``source``; changes neither weights nor generators.

        Raises:
            CheckError: the ranks have different plans.
            StopAgreedError: a rank is to stop, as ``stop`` says.
        """
        ...

    def predicting(self) -> AbstractContextManager[LogitsOf | None]:
        """Within, predict next tokens with the weights of the moment on the first rank; None on others.

        Every rank enters it; weights and generators do not change.
        """
        ...

    def num_recompiles(self) -> int:
        """Number of graphs compiled since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside weights and optimizer, in plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Go on from ``checkpoint``, whose weights and optimizer have been restored.

        Raises:
            InputError: it is of another model.
        """
        ...

    def close(self) -> None:
        """End threads of this engine."""
        ...


class TransformerEngine:
    """The engine of this library's own models: any strategy at any step, layers compiled if that is asked for."""

    def __init__(
        self,
        model: Transformer,
        world: DistContext,
        *,
        config: Config,
        spec: ModelSpec,
        source: TokenSource,
        compiled: CompiledLayers | None = None,
        on_oom: OnOutOfMemory | None = None,
        state_on_host: bool = False,
    ) -> None:
        """``source``: the sequences that are trained on; ``compiled``: None runs layers as they are; ``on_oom``: is
        told what did not fit before the step is planned again; None: the run ends. ``state_on_host``: whether master
        weights, summed gradients and optimizer lie in host memory."""
        self.model, self.world, self._train, self._compiled = model, world, config.train, compiled
        self._on_oom, self._attempt = on_oom, 0
        self._clip_norm = config.optim.clip_norm
        if compiled is not None:
            model.run_layer = compiled
        self._masking = masking_of(spec, seed=config.seed)
        self.state = ShardedState(model, world, config.optim.optimizer_settings, on_host=state_on_host)
        self.source, self._depth = source, config.data.prefetch
        self._prefetcher: Prefetcher | None = None

    def begin(self) -> None:
        """Compile layers, and start the thread that reads ahead."""
        if self._compiled is not None:
            ACTIVITY.begin("compiling")
            self._compiled.warm_up(self.model)
        if self._depth:
            self._prefetcher = Prefetcher(self.source, self.world.device, masking=self._masking, depth=self._depth)

    def read_ahead(self, plan: StepPlan, peek: PeekPlan | None) -> None:
        """Start to read this rank's sequences of a plan; ``peek``: gives the plan of the step after, if it is known."""

        def following() -> list[Pack]:
            following_plan = None if peek is None else peek()
            return [] if following_plan is None else packs_of(following_plan, self.world.rank)

        if self._prefetcher is not None:
            self._prefetcher.start(packs_of(plan, self.world.rank), following=following)

    def compute_step(self, plan: StepPlan, clock: StepClock, *, lr: float) -> StepResult | None:
        """Compute a step and update the weights at ``lr`` times the plan's factor; None: it did not fit, plan it again.

        Raises:
            DivergedError: the loss or the gradient is not finite; weights are left as they were.
            InfeasibleError: a rank ran out of memory in a micro-batch that it shares, or again and again.
        """
        if self._compiled is not None:
            check_compiled(plan)
            self._compiled.make_room(shares_of(plan, self.world.rank))
        try:
            result = run_step(
                plan,
                self.model,
                self.state,
                self.source,
                lr=lr * plan.lr_factor,
                clip_norm=self._clip_norm,
                clock=clock,
                masking=self._masking,
                feeds=self._prefetcher.take if self._prefetcher else None,
                schedule=PipelineSchedule(self._train.schedule),
            )
        except StepMemoryError as error:
            if self._on_oom is None or self._attempt >= MOST_ATTEMPTS:
                raise
            self._attempt += 1
            self._on_oom(plan, error.failures)
            return None
        self._attempt = 0
        return result

    def mean_loss(self, plans: Sequence[StepPlan], source: TokenSource, *, stop: AskStop = nobody_asks) -> float:
        """Mean loss over all targets of plans for the sequences of ``source``; changes neither weights nor generators.

        Raises:
            CheckError: the ranks have different plans.
            StopAgreedError: a rank is to stop, as ``stop`` says.
        """
        return validation_loss(plans, self.model, self.state, source, masking=self._masking, stop=stop)

    def predicting(self) -> AbstractContextManager[LogitsOf | None]:
        """Within, predict next tokens with the weights of the moment on the first rank; None on others."""
        return predicting(self.model, self.state)

    def num_recompiles(self) -> int:
        """Number of graphs compiled since the last call."""
        return 0 if self._compiled is None else self._compiled.recompiles()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: own models have no buffers that change."""
        return {}

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Do nothing: weights are pulled from the restored state at every step."""

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()
