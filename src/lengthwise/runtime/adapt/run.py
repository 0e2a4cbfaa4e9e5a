"""A prepared run: global batches, their plans, and steps for the user's loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.errors import CheckError, InfeasibleError, InputError
from lengthwise.core.plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.adapt import shard as shards
from lengthwise.runtime.adapt.adapted import Adapted
from lengthwise.runtime.adapt.fully_sharded import FullySharded, wrapped_modules
from lengthwise.runtime.adapt.learn import nothing_to_learn
from lengthwise.runtime.adapt.memory import StandIn
from lengthwise.runtime.adapt.meter import Meter
from lengthwise.runtime.adapt.micro_batch import Feeding, MicroBatch
from lengthwise.runtime.adapt.readers import Readers
from lengthwise.runtime.adapt.shard import Shard
from lengthwise.runtime.adapt.step import Step, check_executable
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import World
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.optimizer import OptimizerSettings
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.step import agree
from lengthwise.runtime.train.trainer import BatchStream

Planner = Callable[[GlobalBatch], StepPlan]


MOST_ATTEMPTS = 10
"""Plans of one step that may run out of memory."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A micro-batch that did not fit, and where."""

    rank: int
    pipeline: int
    micro_batch: int


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
        self.state = self._make_state(optimizer)
        self.state.hold_everything()
        self.alone = Group(rank=0)
        self.stand_in = StandIn(())
        self.readers: Readers | None = None
        self.on_void: Callable[[Step, tuple[Failure, ...]], None] | None = None
        """Told on every rank which micro-batches did not fit, before the step is planned again."""
        self.on_finish: Callable[[Step], None] | None = None
        """Told on every rank of every step that is done."""

    @property
    def model(self) -> nn.Module:
        """The user's own."""
        return self.adapted.model

    @property
    def num_params(self) -> int:
        """Trained parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.adapted.anatomy.parameters.values())

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

    def make(self, shard: Shard, pack: Pack) -> MicroBatch:
        """The micro-batch of a shard."""
        return MicroBatch(shard, pack, self.feeding, make_inputs=self.adapted.inputs_of)

    def check_gradients(self) -> None:
        """Raise ``CheckError`` if gradients no longer land where they are summed."""
        if not self.state.is_attached:
            name = next(iter(self.adapted.anatomy.parameters))
            raise CheckError(
                f"the gradient of {name} was taken away, by optimizer.zero_grad() or model.zero_grad(); leave both "
                "out, step.update() begins anew"
            )

    def discard(self) -> None:
        """Forget gradients that belong to no step."""
        self.state.discard_gradient()

    def give_up(self, step: Step) -> None:
        """Forget all of a step in which a rank ran out of memory, and learn from it. Every rank calls this.

        Raises:
            InfeasibleError: it was planned anew as often as is worth while.
        """
        self.discard()
        pipeline, index = step.failure or (-1, -1)
        rows = gather_rows(torch.tensor([pipeline, index], device=self.world.device)).tolist()
        failures = tuple(
            Failure(rank=rank, pipeline=pipeline, micro_batch=index)
            for rank, (pipeline, index) in enumerate(rows)
            if pipeline >= 0
        )
        if self.on_void is None or step.attempt >= MOST_ATTEMPTS:
            failed = failures[0]
            pack = step.plan.pipelines[failed.pipeline].micro_batches[failed.micro_batch].pack
            raise InfeasibleError(
                f"step {step.number}: rank {failed.rank} ran out of memory in a micro-batch of {pack.num_tokens:,} "
                f"tokens, after {step.attempt + 1} plans; lower max_length or memory_gib, or use more devices"
            )
        self.on_void(step, failures)

    def finish(self, step: Step) -> None:
        """A step is done; every rank calls this."""
        self.next_step += 1
        if self.on_finish is not None:
            self.on_finish(step)

    def save(self, folder: Path | str, *, keep: int = 3) -> Path:
        """Write a checkpoint of weights, optimizer, stream and step, and return its path; every rank calls this."""
        extra = {"step": self.next_step, "sampler": self.stream.state_dict()}
        checkpoint.save(Path(folder), self._saved_state(), extra, keep=keep)
        path = checkpoint.latest(Path(folder))
        self._tell("saved step %d: %s", self.next_step, path)
        return path

    def resume(self, path: Path | str) -> int:
        """Go on from a checkpoint, by any number of ranks; a folder of checkpoints stands for its newest.

        Returns the step that is next.

        Raises:
            InputError: it is damaged, of another model or optimizer, or its data is not this run's.
        """
        path = Path(path)
        if not (path / checkpoint.STATE_FILE).is_file():
            path = checkpoint.latest(path)
        extra: dict[str, Any] = checkpoint.load(path, self._saved_state())
        self.stream.load_state_dict(extra["sampler"])
        self.next_step = extra["step"]
        self.state.hold_everything()
        self._tell("going on with step %d: %s", self.next_step, path)
        return self.next_step

    def _tell(self, words: str, *values: object) -> None:
        if self.world.is_first:
            logging.getLogger("lengthwise").info(words, *values)

    def read_with(self, num_workers: int) -> None:
        """Have so many processes read the sequences of each step from its start."""
        feeding = self.feeding
        self.readers = Readers(feeding.source, feeding.labels, num_workers=num_workers)
        labels = None if feeding.labels is None else self.readers.labels
        self.feeding = replace(feeding, source=self.readers, labels=labels)

    def close(self) -> None:
        """Give the model back as it was, with today's weights."""
        if self.readers is not None:
            self.readers.close()
        self.adapted.release()
        self.state.let_go()

    def _make_state(self, optimizer: OptimizerSettings) -> ShardedState | FullySharded:
        model = self.adapted.model
        if wrapped_modules(model):
            return FullySharded(model, self.world, optimizer, close=lambda: nothing_to_learn(self))
        return ShardedState(model, self.world, optimizer, table=self.adapted.anatomy.table())

    def _saved_state(self) -> ShardedState:
        if isinstance(self.state, FullySharded):
            raise InputError(
                "checkpoints of a model that FSDP2 holds are written with torch.distributed.checkpoint: "
                "get_state_dict(model, run.state.optimizer) and run.stream.state_dict()"
            )
        return self.state

    def _make_groups(self, plan: StepPlan) -> None:
        """Every rank makes all groups of the step, in one order."""
        for pipeline in plan.pipelines:
            self.world.groups.of(tuple(sorted(pipeline.ranks)))
