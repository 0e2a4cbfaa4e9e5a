"""A prepared run: global batches, their plans, and steps for the user's loop."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError
from lengthwise.core.plan import StepPlan
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.adapt import shard as shards
from lengthwise.runtime.adapt.adapted import Adapted
from lengthwise.runtime.adapt.meter import Meter
from lengthwise.runtime.adapt.micro_batch import Feeding, MicroBatch
from lengthwise.runtime.adapt.shard import Shard
from lengthwise.runtime.adapt.step import Step, check_executable
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import World
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.optimizer import OptimizerSettings
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.step import agree
from lengthwise.runtime.train.trainer import BatchStream

Planner = Callable[[GlobalBatch], StepPlan]


class Run:
    """What ``prepare`` returns. Every rank makes the same and does the same with it."""

    def __init__(
        self,
        adapted: Adapted,
        world: World,
        *,
        stream: BatchStream,
        planner: Planner,
        feeding: Feeding,
        optimizer: OptimizerSettings,
        lr: Callable[[int], float],
        clip_norm: float = 1.0,
        num_steps: int,
        seed: int = 0,
    ) -> None:
        self.adapted, self.world, self.stream, self.planner = adapted, world, stream, planner
        self.feeding, self.lr, self.clip_norm, self.seed = feeding, lr, clip_norm, seed
        self.num_steps, self.next_step = num_steps, 0
        self.meter = Meter(world.device)
        self.state = ShardedState(adapted.model, world, optimizer, table=adapted.anatomy.table())
        self.state.hold_everything()

    @property
    def model(self) -> nn.Module:
        """The user's own."""
        return self.adapted.model

    @property
    def group(self) -> Group:
        """The ranks that share the micro-batch of the moment, for collectives of one's own."""
        return shards.current().group

    def plain(self) -> AbstractContextManager[nn.Module]:
        """The model as it was before, with today's weights: for evaluation and generation."""
        return self.adapted.plain()

    def steps(self) -> Iterator[Step]:
        """Steps up to ``num_steps``; one that was given up for lack of memory comes again, planned anew.

        Raises:
            CheckError: a step was left without its update, or ranks plan differently.
        """
        while self.next_step < self.num_steps:
            batch = next(self.stream)
            for attempt in count():
                clock = StepClock(self.world)
                with clock.span(SpanKind.PLAN, "plan"):
                    plan = self.planner(batch)
                plan.check_covers(batch)
                check_executable(plan, self.adapted.anatomy.num_layers, self.world.size)
                agree(plan, self.world, clock, stop=False)
                self._make_groups(plan)
                self.state.clear_gradient()
                step = Step(self, plan, clock, attempt=attempt)
                yield step
                if not step.is_over:
                    raise CheckError(f"step {step.number} got no step.update()")
                if step.result is not None:
                    break
            self.next_step += 1

    def make(self, shard: Shard, pack: Pack) -> MicroBatch:
        """The micro-batch of a shard."""
        return MicroBatch(shard, pack, self.feeding, make_inputs=self.adapted.inputs_of)

    def check_gradients(self) -> None:
        """Raise ``CheckError`` if gradients no longer land where they are summed."""
        if self.state.compute_dtype == self.state.master_dtype:
            name, parameter = next(iter(self.adapted.anatomy.parameters.items()))
            if parameter.grad is None:
                raise CheckError(
                    f"the gradient of {name} was taken away, by optimizer.zero_grad() or model.zero_grad(); leave both "
                    "out, step.update() begins anew"
                )

    def finish(self, step: Step) -> None:
        """Told of every step that is done."""

    def save(self, folder: Path | str, *, keep: int = 3) -> None:
        """Write a checkpoint of weights, optimizer, stream and step; every rank calls this."""
        extra = {"step": self.next_step, "sampler": self.stream.state_dict()}
        checkpoint.save(Path(folder), self.state, extra, keep=keep)

    def resume(self, path: Path | str) -> None:
        """Go on from a checkpoint, by any number of ranks; a folder of checkpoints stands for its newest.

        Raises:
            InputError: it is damaged, of another model or optimizer, or its data is not this run's.
        """
        path = Path(path)
        if not (path / checkpoint.STATE_FILE).is_file():
            path = checkpoint.latest(path)
        extra: dict[str, Any] = checkpoint.load(path, self.state)
        self.stream.load_state_dict(extra["sampler"])
        self.next_step = extra["step"]
        self.state.hold_everything()

    def close(self) -> None:
        """Give the model back as it was, with today's weights."""
        self.adapted.release()

    def _make_groups(self, plan: StepPlan) -> None:
        """Every rank makes all groups of the step, in one order."""
        for pipeline in plan.pipelines:
            self.world.groups.of(tuple(sorted(pipeline.ranks)))
