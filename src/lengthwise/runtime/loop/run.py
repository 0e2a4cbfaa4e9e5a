"""A prepared run: global batches, their plans, and steps for the user's loop."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from lengthwise.config.setting_names import as_option
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.errors import CheckError, InfeasibleError, InputError, errors_spelt
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.out_of_memory import MOST_ATTEMPTS, MicroBatchFailure
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, sync_ranks
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.manual_changes import gradient_problem, inspect_weights
from lengthwise.runtime.loop.planned_pipelines import check_executable, rounds_of, sync_step, weights_of_stages
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.saved_buffers import buffers_to_save, restore_buffers
from lengthwise.runtime.loop.staged_pipeline import group_keys
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.loop.unprepared_models import UnpreparedModels
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from lengthwise.runtime.loop.workers import ItemReaders, read_with_workers
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.device_meter import DeviceMeter
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.loss_check import LossCheck

Planner = Callable[[GlobalBatch], StepPlan]


_log = logging.getLogger("lengthwise")


class Run(PreparedModel):
    """A prepared training run, as ``prepare`` returns it; every rank makes the same calls of it in the same order."""

    def __init__(
        self,
        prepared: PreparedModel,
        *,
        stream: BatchStream,
        planner: Planner,
        lr: Callable[[int], float],
        clip_norm: float = 1.0,
        num_steps: int,
        counts_targets: bool = False,
        workers: int = 0,
        on_oom: Callable[[Step, tuple[MicroBatchFailure, ...]], None] | None = None,
        on_finish: Callable[[Step], None] | None = None,
        keep_layers: Callable[[StepPlan], int] | None = None,
        check_stages: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        """Start before the first step.

        Args:
            prepared: the model that is trained, and what it computes micro-batches with.
            stream: the global batches, in order.
            planner: the plan of each.
            lr: the learning rate of each step.
            clip_norm: the limit of the gradient norm; 0: none.
            num_steps: how many steps there are.
            counts_targets: whether a step's targets are counted before its first backward; labels may leave out some.
            workers: processes that read the sequences of each step ahead, from its beginning.
            on_oom: called on every rank with the micro-batches that ran out of memory, before a new plan.
            on_finish: called on every rank with every step that is done.
            keep_layers: how many of the last layers ranks hold whole during a step, if weights are gathered by layer.
            check_stages: raises an error unless stages of these numbers of layers can be computed; called on every rank
                when a plan first has them. None: there are none.
        """
        super().__init__(
            prepared.wrapped_model, prepared.world, collator=prepared.collator, state=prepared.state, seed=prepared.seed
        )
        self.frozen_models, self.is_cuttable = prepared.frozen_models, prepared.is_cuttable
        self._guard = prepared._guard
        self.stream, self.planner, self.lr, self.clip_norm = stream, planner, lr, clip_norm
        self.num_steps, self.next_step, self.counts_targets = num_steps, 0, counts_targets
        self.on_oom, self.on_finish = on_oom, on_finish
        self.keep_layers = keep_layers or (lambda plan: 0)
        self.check_stages, self._checked_cuts = check_stages, set[tuple[int, ...]]()
        self.meter = DeviceMeter(self.world.device)
        self.readers: ItemReaders | None = None
        if workers:
            self.readers, self.collator = read_with_workers(self.collator, workers)
        self.parameters = WatchedParameters(self.model)
        self.seen_scripts: tuple[ExchangeScript, ...] = ()
        """Exchanges of the forwards of a micro-batch, as the loop last called them."""
        self.loss_check = LossCheck()
        self.unprepared = UnpreparedModels(lambda: self.models, lambda: self.wrapped_model.is_plain)
        self.skipped: list[int] = []
        """Numbers of steps that ``step.skip()`` left out."""
        self._step: Step | None = None
        self._batch: GlobalBatch | None = None
        """The global batch of the step that is not done."""
        self._stream_state: dict[str, Any] = {}
        """The state of the stream before that batch."""
        self._attempt, self._last_failure = 0, ""

    @property
    def usual_scripts(self) -> tuple[ExchangeScript, ...]:
        """The collectives of the forwards of a micro-batch, as this loop usually calls them; () if not known yet."""
        is_known = not self.frozen_models and self.collator.units is None
        return self.seen_scripts or ((self.wrapped_model.script,) if is_known else ())

    @property
    def group(self) -> Group:
        """The ranks that share the current micro-batch, for collectives of the user's own."""
        return shards.current().group

    def steps(self) -> Iterator[Step]:
        """Iterate over the steps up to ``num_steps``; a step that was aborted comes again, with a new plan.

        A step is aborted where a rank ran out of memory, where its update raised, and where a loop left it, by an
        error that it caught or a ``break``. Called again, the steps go on where they were.

        Raises:
            CheckError: a step got no update, was given up too often, or ranks plan differently.
        """
        while True:
            self._leave_unfinished()
            if self.next_step >= self.num_steps:
                return
            self._step = self._begin()
            yield self._step

    def frozen(self, model: nn.Module, *, layers: str | None = None, check: bool = True) -> nn.Module:
        """Prepare a frozen model as :meth:`PreparedModel.frozen` does; from then on steps are planned in one stage."""
        model = super().frozen(model, layers=layers, check=check)
        if (replan := getattr(self.planner, "replan", None)) is not None:
            replan()
        return model

    def _leave_unfinished(self) -> None:
        """Discard, on all ranks, a step that this rank's loop left unfinished."""
        step, self._step = self._step, None
        if step is None or step.is_over:
            return
        step.leave()
        if step.is_iterated:
            raise CheckError(f"step {step.number} got no step.update()")
        _log.warning("%s; it comes again", self._last_failure)

    @errors_spelt(as_option)
    def _begin(self) -> Step:
        """Plan and return the next step, or again the one that was aborted."""
        if self._batch is None:
            self._stream_state = self.stream.state_dict()
            self._batch, self._attempt = next(self.stream), 0
        elif self._attempt >= MOST_ATTEMPTS:
            raise CheckError(
                f"step {self.next_step} was given up {self._attempt + 1} times, the last time because of this: "
                f"{self._last_failure}. Leave it out with step.skip() on every rank, or mend the cause"
            )
        else:
            self._attempt += 1
        ACTIVITY.begin("plan", step=self.next_step)
        clock = StepClock(self.world)
        with clock.span(SpanKind.PLAN, "plan"):
            plan = self.planner(self._batch)
        plan.check_covers(self._batch)
        sync_step(plan, clock, self.parameters.problem())
        return self.begin_step(plan, clock, attempt=self._attempt)

    def begin_step(self, plan: StepPlan, clock: StepClock, *, attempt: int = 0) -> Step:
        """Start the step of a plan that every rank has; ``attempt``: how often it was given up before.

        Raises:
            InputError: the plan is for other ranks or another model.
        """
        self.begin_plan(plan)
        self.state.clear_gradient()
        return Step(self, plan, clock, attempt=attempt)

    @property
    def gradient_version(self) -> int:
        """A counter that grows with every change of gradients."""
        return self.state.gradient_version

    def gradient_problem(self, version: int) -> str:
        """Describe how gradients were changed by hand since ``version``; an empty string if they were not."""
        return gradient_problem(self.state, version)

    def check_gradients(self, version: int) -> None:
        """Raise ``CheckError`` if gradients no longer land where they are summed, or were changed by hand."""
        if problem := self.gradient_problem(version):
            raise CheckError(problem)

    def inspect(self) -> tuple[str, int, bool]:
        """Return a problem of the model or "", the fingerprint of this rank's weights, and whether they changed."""
        return inspect_weights(self.state, self.parameters, is_whole=self.gather is None)

    def take_over_changes(self, reports: RankReports, where: str, *, columns: tuple[int, int]) -> None:
        """Adopt changes that loops made to weights between updates, if every rank made the same.

        ``columns``: which of the reported values are the fingerprint and the flag of :meth:`inspect`.

        Raises:
            CheckError: copies of the model differ between ranks.
        """
        fingerprints = reports.column(columns[0])
        other = [rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]]
        if other:
            self.discard()
            message = (
                f"{where}: the weights on {ranks_text(other)} are not those on rank 0, so a loop changed them in some "
                "ranks alone; change weights in the same way on every rank, or on none"
            )
            self.note_failure(message)
            raise CheckError(message)
        if any(reports.column(columns[1])) and not isinstance(self.state, Fsdp2State):
            self.state.local_weights().adopt()
            self._log_on_first_rank("%s: weights were changed by hand since the last update; the change is kept", where)

    @errors_spelt(as_option)
    def abort_step(self, step: Step, reports: RankReports) -> None:
        """Discard a step in which a rank ran out of memory, and report why to ``on_oom``. Every rank calls this.

        Raises:
            InfeasibleError: it was planned ``MOST_ATTEMPTS`` times, or nothing plans it again.
        """
        self.discard()
        failures = tuple(
            MicroBatchFailure(rank=rank, pipeline=pipeline, micro_batch=index)
            for rank, (pipeline, index) in enumerate(zip(reports.column(2), reports.column(3)))
            if pipeline >= 0
        )
        failed = failures[0]
        pack = step.plan.pipelines[failed.pipeline].micro_batches[failed.micro_batch].pack
        reason = (
            f"step {step.number}: rank {failed.rank} ran out of memory in a micro-batch of {pack.num_tokens:,} tokens"
        )
        self.note_failure(reason)
        if self.on_oom is None or step.attempt >= MOST_ATTEMPTS:
            raise InfeasibleError(
                f"{reason}, after {step.attempt + 1} plans; lower max_length or memory_gib, or use more devices",
                what=f"micro-batch {failed.micro_batch} of pipeline {failed.pipeline}",
                value=pack.num_tokens,
                unit="tokens",
            )
        self.on_oom(step, failures)

    def note_failure(self, reason: str) -> None:
        """Store the reason why the step comes again, for later messages."""
        self._last_failure = reason

    def note_skipped(self, step: Step) -> None:
        """Record a step that is skipped; every rank calls this."""
        self.skipped.append(step.number)
        self._log_on_first_rank("step %d is skipped: %s", step.number, self._last_failure or "asked for by step.skip()")
        self.finish(step)

    def finish(self, step: Step) -> None:
        """Record a step that is done and go on to the next; every rank calls this."""
        self.next_step += 1
        self._batch, self._step, self._last_failure = None, None, ""
        if self.on_finish is not None:
            self.on_finish(step)

    @errors_spelt(as_option)
    def save(self, folder: Path | str, *, keep: int = 3) -> Path:
        """Save a checkpoint of weights, optimizer, stream and step, and return its path; every rank calls this.

        Raises:
            CheckError: ranks call different things, or a step is being computed.
        """
        state = self._saved_state()
        self._come_between_steps("run.save()")
        problem, fingerprint, is_changed = self.inspect()
        values = [fingerprint, int(is_changed)]
        reports = sync_ranks(self.world, RankOperation.SAVE, self.next_step, values=values, note=problem)
        reports.check_same()
        if any(reports.notes):
            raise CheckError(f"run.save(): {reports.notes_text()}")
        self.take_over_changes(reports, "run.save()", columns=(0, 1))
        sampler = self.stream.state_dict() if self._batch is None else self._stream_state
        extra = {
            "step": self.next_step,
            "sampler": sampler,
            "skipped": self.skipped,
            "buffers": buffers_to_save(self.model),
        }
        checkpoint.save(Path(folder), state, extra, keep=keep)
        path = checkpoint.latest(Path(folder))
        self._log_on_first_rank("saved step %d: %s", self.next_step, path)
        return path

    def _come_between_steps(self, call: str) -> None:
        """Leave a step that an error ended; raise ``CheckError`` if one is being computed."""
        step = self._step
        if step is not None and not step.is_over and (step.is_being_computed or step.is_computed):
            raise CheckError(f"{call} in the midst of step {step.number}; call it after step.update()")
        self._leave_unfinished()

    @errors_spelt(as_option)
    def resume(self, path: Path | str) -> int:
        """Resume from a checkpoint, with any number of ranks; a folder of checkpoints stands for its newest.

        Returns the step that is next.

        Raises:
            InputError: it is damaged, of another model or optimizer, or its data is not this run's.
            CheckError: ranks call different things, or a step is being computed.
        """
        state = self._saved_state()
        self._come_between_steps("run.resume()")
        sync_ranks(self.world, RankOperation.RESUME, 0).check_same()
        path = Path(path)
        if not (path / checkpoint.STATE_FILE).is_file():
            path = checkpoint.latest(path)
        extra: dict[str, Any] = checkpoint.load(path, state)
        restore_buffers(self.model, extra.get("buffers", {}), path)
        self.stream.load_state_dict(extra["sampler"])
        self.next_step, self.skipped, self._batch = extra["step"], list(extra.get("skipped", [])), None
        self.update_weights()
        self._log_on_first_rank("going on with step %d: %s", self.next_step, path)
        return self.next_step

    def _log_on_first_rank(self, message: str, *values: object) -> None:
        if self.world.is_first:
            _log.info(message, *values)

    def close(self) -> None:
        """Restore the model as it was before ``prepare``, with current weights."""
        if self.readers is not None:
            self.readers.close()
        super().close()

    def _saved_state(self) -> ShardedState:
        if isinstance(self.state, Fsdp2State):
            raise InputError(
                "checkpoints of a model that FSDP2 holds are written with torch.distributed.checkpoint: "
                "get_state_dict(model, run.state.optimizer) and run.stream.state_dict()"
            )
        return self.state

    def begin_plan(self, plan: StepPlan) -> None:
        """Make the process groups of a plan, in one order on every rank, and start to gather what it computes with.

        Raises:
            InputError: the plan is for other ranks or another model.
        """
        num_layers = self.wrapped_model.structure.num_layers
        unchecked = "its stages were not compared with the whole model" if self.check_stages is None else ""
        check_executable(plan, num_layers, self.world.size, stage_problem=self.stage_problem or unchecked)
        self.world.groups.prepare(key for pipeline in plan.pipelines for key in group_keys(pipeline))
        for cut in sorted({pipeline.scheme.stage_layers for pipeline in plan.pipelines} - self._checked_cuts):
            if len(cut) > 1 and self.check_stages is not None and not self.is_cuttable:
                with self.whole_weights():
                    self.check_stages(cut)
            self._checked_cuts.add(cut)
        if self.gather is not None:
            shards = weights_of_stages(plan, self.wrapped_model.used_units)
            self.gather.start(rounds_of(plan), num_kept=self.keep_layers(plan), shards=shards)
