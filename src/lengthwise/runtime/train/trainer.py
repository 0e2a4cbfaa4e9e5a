"""The training loop: next global batch, its plan, one step, its record; until the steps are done or a stop is asked."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lengthwise.config.run_config import Config
from lengthwise.core.atomic_write import is_of_disk, reason, shell_word
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.errors import CommunicationError, LengthwiseError, Preempted
from lengthwise.core.run_folder import RunFolder, timeline_to_row
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.objects import broadcast_json, gather_json
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.saver import CheckpointSaver
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import DivergedError, StepResult, sync_step
from lengthwise.runtime.train.lr_schedule import learning_rate
from lengthwise.runtime.train.micro_batch_tensors import SourceError
from lengthwise.runtime.train.step_metrics import JsonLines, Row, StepCallback, TimelineLines, measure, step_row
from lengthwise.runtime.train.stop import StopCause, StopRequest
from lengthwise.runtime.train.text_samples import TextSampling
from lengthwise.runtime.train.training_engine import PeekPlan, TrainingEngine
from lengthwise.runtime.train.validation import StopAgreedError, Validation


class SequenceLedger(Protocol):
    """Counts what is learned from; :class:`lengthwise.data.run_ledger.RunLedger` is one."""

    def count(self, plan: StepPlan, /) -> None:
        """Count the sequences of a step that was computed."""
        ...

    def check(self, stream_state: dict[str, Any], /) -> None:
        """Raise ``CheckError`` unless it is what the stream has dealt."""
        ...

    def to_json(self, stream_state: dict[str, Any], /) -> dict[str, Any]:
        """Document that ledger.json holds."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Counts so far, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from the state of a checkpoint."""
        ...


@dataclass(kw_only=True)
class TrainingLoop:
    """Everything one run needs; every rank builds the same and calls :meth:`fit`."""

    config: Config
    engine: TrainingEngine
    spec: ModelSpec | None = None
    """Counts model FLOPs; None: they are not known."""
    stream: BatchStream
    planner: Callable[[GlobalBatch], StepPlan]
    folder: RunFolder
    check_folder: Callable[[], None] = lambda: None
    """Called on every rank before it writes to the folder; ends the process if another run has it by now."""
    world: DistContext
    peak_flops_per_s: float | None = None
    """Of one device, for utilisation; None where it is unknown."""
    callbacks: Sequence[StepCallback] = ()
    """Called on the first rank."""
    on_validation: Callable[[Row], None] | None = None
    """Is given a step's metrics before its validation, on the first rank; None: nobody is."""
    ledger: SequenceLedger | None = None
    """None: nobody counts."""
    peek: PeekPlan | None = None
    """None: plans are not known before their step."""
    validation: Validation | None = None
    """None: there is no validation set."""
    samples: TextSampling | None = None
    """None: no text is sampled."""
    stop: StopRequest | None = None
    """Notes signals since before there was a trainer; None: :meth:`fit` notes them."""
    next_step: int = field(default=0, init=False)
    _validated: dict[str, Any] = field(default_factory=dict, init=False)
    """What the checkpoint that the run goes on from says of validation, for later ones where it has none itself."""

    def __post_init__(self) -> None:
        self.state: ShardedState = self.engine.state
        self._saver = CheckpointSaver(
            self.folder.checkpoints, self.state, keep=self.config.train.keep_checkpoints, check_folder=self.check_folder
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate bytes of one checkpoint: master weights, and the optimizer's tensors where they are as large."""
        settings = self.state.settings
        num_copies = 1 + (0 if settings.needs_whole_parameters else len(settings.state_names))
        return self.state.table.bounds[-1] * self.state.master_dtype.itemsize * num_copies

    @property
    def counted_checkpoints(self) -> list[Path]:
        """The complete checkpoints that led to this state, newest first; others do not count as kept."""
        steps = self.state.saved_steps.get(self.folder.checkpoints.resolve())
        return checkpoint.led_to(checkpoint.candidates(self.folder.checkpoints), steps)

    def resume(self, path: Path) -> None:
        """Restore weights, optimizer, sampler and step from a checkpoint.

        Raises:
            InputError: it is damaged, of another model or optimizer, or its data is not this run's.
        """
        extra = checkpoint.load(path, self.state)
        self.engine.load_state_dict(extra.get("engine", {}), path)
        self.stream.load_state_dict(extra["sampler"])
        if self.ledger is not None:
            self.ledger.load_state_dict(extra.get("seen", {}))
        if self.validation is None:
            self._validated = extra.get("validation", {})
        else:
            self.validation.load_state_dict(extra.get("validation", {}))
        self.next_step = extra["step"]
        if path.parent.resolve() == self.folder.checkpoints.resolve():
            self._saver.step = self.next_step  # until a step or a validation is done, there is nothing to save
        self._saver.good_step = self.next_step - 1  # the step that led here had a finite loss; the next may not

    def fit(self) -> None:
        """Train for all steps, or until validation stops it; write metrics, plans, timelines and checkpoints.

        A run that is complete (:attr:`is_complete`) writes nothing.

        Raises:
            Preempted: SIGTERM came; a checkpoint was written after the last finished step.
            CommunicationError: what started a rank is gone; as above.
            LengthwiseError: the loss is not finite, ranks disagree, or a file could not be written.
        """
        try:
            self._fit()
        except DivergedError as error:
            safe = checkpoint.step_back(self.folder.checkpoints, self.next_step) if self.world.is_first else ""
            raise LengthwiseError(f"{error}; {broadcast_json(self.world, safe)}") from None  # all ranks are here
        except SourceError as error:
            raise LengthwiseError(f"{error}; {checkpoint.outlook(self.folder.checkpoints)}") from error.__cause__
        except OSError as error:
            if not is_of_disk(error):
                raise
            safe = checkpoint.outlook(self.folder.checkpoints)
            raise LengthwiseError(f"the run ends after step {self.next_step} ({reason(error)}); {safe}") from error

    def _fit(self) -> None:
        if self.is_complete:
            self._close()
            return
        if self.validation is not None and self.world.is_first:
            with suppress(OSError):  # the next checkpoint does it again
                checkpoint.point_to_best(self.folder.checkpoints, self.validation.kept_step)
        stop = StopRequest(self.folder.stop) if self.stop is None else self.stop  # one that is not asked is false
        self.engine.begin()
        self._saver.connect()
        stop.begin_steps()
        writers = self._writers()
        self._counted(self.stream.state_dict())
        sampler = self.stream.state_dict()
        try:
            cause = self._validate_outstanding(stop, writers)
            while not cause and not self.is_done:
                cause, sampler = self._train_one(stop, writers)
                self._save_if_due(sampler, cause)
            if not cause:
                stop.end_steps()
            self._save(sampler, wait=True)
            if cause:
                raise self._stopped(cause, stop)
            if self.ledger is not None:
                self.ledger.check(self.stream.state_dict())
        finally:
            self._saver.close()
            for writer in writers.values():
                writer.close()
            self._close()
            if self.stop is None:
                stop.close()

    def _close(self) -> None:
        self.engine.close()
        for callback in self.callbacks:
            callback.close()

    def _stopped(self, cause: StopCause, stop: StopRequest) -> LengthwiseError:
        """The error that ends a run which was stopped, and saved, before its last step."""
        if cause is StopCause.SIGNAL:  # torchrun's, where it has lost a machine, may come before that is seen elsewhere
            cause = StopCause(max(gather_json(self.world, int(stop.cause))))
        if self.world.is_first:
            with suppress(OSError):
                self.folder.stop.unlink(missing_ok=True)
        command = f"lengthwise train --resume {shell_word(self.folder.path)}"
        is_validating = self.validation is not None and self.validation.outstanding is not None
        when = (
            f"in the validation after step {self.next_step}" if is_validating else f"before step {self.next_step + 1}"
        )
        done = f"{when}; saved. Go on with: {command}"
        if cause is StopCause.LAUNCHER_GONE:
            return CommunicationError(f"the process that started some ranks is gone, so the run ended {done}")
        return Preempted(f"asked to stop {done}", by_signal=cause is StopCause.SIGNAL)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or validation stopped the training."""
        has_stopped = self.validation is not None and self.validation.should_stop
        return has_stopped or self.next_step >= self.config.train.num_steps

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train, to validate or to save of the run that was resumed."""
        is_outstanding = self.validation is not None and self.validation.outstanding is not None
        return self.is_done and not is_outstanding and self._saver.step == self.next_step

    def _train_one(self, stop: StopRequest, writers: dict[str, JsonLines]) -> tuple[StopCause, dict[str, Any]]:
        """Run the next step and record it; why the ranks agreed to stop, if they did, and the sampler's state then."""
        batch, result, before = None, None, self.stream.state_dict()
        while result is None:  # until it fits
            clock = StepClock(self.world)
            ACTIVITY.begin("plan", step=self.next_step)
            with clock.span(SpanKind.PLAN, "plan"):
                batch = batch or next(self.stream)
                plan = self.planner(batch)
            self.engine.read_ahead(plan, self.peek)
            agreed = sync_step(plan, self.world, clock, stop=stop.cause, save_failed=self._saver.has_failed)
            if agreed.save_failed:
                self._saver.wait()  # raises
            if agreed.stop:
                return StopCause(agreed.stop), before
            lr = learning_rate(self.config.optim, plan.step, self.config.train.num_steps)
            result = self.engine.compute_step(plan, clock, lr=lr)
        return self._record(plan, result, clock, writers, stop), self.stream.state_dict()

    def _record(
        self, plan: StepPlan, result: StepResult, clock: StepClock, writers: dict[str, JsonLines], stop: StopRequest
    ) -> StopCause:
        """Count a step that is done, validate if that is due, and write its records; why validation stopped, if so."""
        self.check_folder()
        timeline = clock.timeline(plan.step)
        measured = measure(timeline, self.world, recompiles=self.engine.num_recompiles())
        self._saver.good_step = plan.step
        self.next_step = plan.step + 1
        if self.ledger is not None:
            self.ledger.count(plan)
        if self.config.train.timeline:
            writers["timeline"].on_step(timeline_to_row(timeline))
        row = step_row(plan, result, measured, model=self.spec, peak_flops_per_s=self.peak_flops_per_s)
        num_steps, ends_epoch = self.config.train.num_steps, self.stream.state_dict().get("position") == 0
        cause = StopCause.NONE
        if self.validation is not None and self.validation.is_due(
            self.next_step, num_steps=num_steps, ends_epoch=ends_epoch
        ):
            cause = self._validate(self.validation, row, stop)
        if not cause:
            self._sample(writers)
        if self.world.is_first:
            writers["plans"].on_step(plan.to_json())
        self._write(row, writers)
        return cause

    def _write(self, row: Row, writers: dict[str, JsonLines]) -> None:
        """Write a step's metrics and give them to callbacks."""
        if self.world.is_first:
            writers["metrics"].on_step(row)
            for callback in self.callbacks:
                callback.on_step(row)

    def _validate(self, validation: Validation, row: Row, stop: StopRequest) -> StopCause:
        """Add the validation loss to the last step's metrics; or return why the ranks agreed to stop meanwhile."""
        ACTIVITY.begin("validation", step=self.next_step - 1)
        if self.on_validation is not None and self.world.is_first:
            self.on_validation(row)
        validation.outstanding = None
        try:
            row |= validation.compute(self.next_step, partial(self.engine.mean_loss, stop=lambda: stop.cause))
        except StopAgreedError as error:
            validation.outstanding = row
            return StopCause(error.cause)
        return StopCause.NONE

    def _validate_outstanding(self, stop: StopRequest, writers: dict[str, JsonLines]) -> StopCause:
        """Validate after the last step if a stop cut that short; why the ranks agreed to stop again, if they did."""
        if self.validation is None or self.validation.outstanding is None:
            return StopCause.NONE
        row = self.validation.outstanding
        if not (cause := self._validate(self.validation, row, stop)):
            self._saver.step = None  # the checkpoint of the step has no loss of it
            self._sample(writers)
            self._write(row, writers)
        self._save_if_due(self.stream.state_dict(), cause)
        return cause

    def _sample(self, writers: dict[str, JsonLines]) -> None:
        """Sample text and record it if that is due after the steps done so far."""
        if self.samples is None or not self.samples.is_due(self.next_step, is_last=self.is_done):
            return
        ACTIVITY.begin("samples of text", step=self.next_step - 1)
        with self.engine.predicting() as logits_of:
            for row in [] if logits_of is None else self.samples.rows(self.next_step, logits_of):
                writers["samples"].on_step(row)

    def _writers(self) -> dict[str, JsonLines]:
        self.folder.drop_steps_from(self.next_step, rank=self.world.rank, num_ranks=self.world.size)
        paths = {"timeline": self.folder.timeline(self.world.rank)} if self.config.train.timeline else {}
        if self.world.is_first:
            paths |= {"plans": self.folder.plans, "metrics": self.folder.metrics}
            paths |= {"samples": self.folder.samples} if self.samples is not None else {}
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        return {name: (TimelineLines if name == "timeline" else JsonLines)(path) for name, path in paths.items()}

    def _save_if_due(self, sampler: dict[str, Any], cause: StopCause) -> None:
        """Begin a checkpoint if it is time for one, or the steps done so far led to the lowest validation loss.

        Where the run ends, or is to stop for a ``cause``, the last checkpoint follows anyway.
        """
        every, best_step = self.config.train.checkpoint_every, self.validation and self.validation.best_step
        is_due = (every and self.next_step % every == 0) or self.next_step == best_step
        if is_due and not cause and not self.is_done:
            self._save(sampler, wait=not self.config.train.checkpoint_async)

    def _save(self, sampler: dict[str, Any], *, wait: bool) -> None:
        """Begin a checkpoint after the steps done so far, unless that has been done; ``wait``: until it is complete."""
        self.check_folder()
        if self._saver.step != self.next_step:
            state = self._validated if self.validation is None else self.validation.state_dict()
            validated = {"validation": state} if state else {}
            engine = {"engine": state} if (state := self.engine.state_dict()) else {}
            extra = {"step": self.next_step, "sampler": sampler, **self._counted(sampler), **validated, **engine}
            self._saver.save(extra, wait=wait)
        elif wait:
            self._saver.wait()

    def _counted(self, sampler: dict[str, Any]) -> dict[str, Any]:
        """Write ledger.json; returns what a checkpoint keeps of it."""
        if self.ledger is None:
            return {}
        if self.world.is_first:
            self.folder.write_json("ledger.json", self.ledger.to_json(sampler))
        return {"seen": self.ledger.state_dict()}
