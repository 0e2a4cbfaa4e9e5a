"""A prepared run: global batches, their plans, and steps for the user's loop."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lengthwise.config.setting_names import as_option
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.cut_plan import CutPlan, PlanWithCuts, TreeOf
from lengthwise.core.errors import CheckError, InputError, errors_spelt
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.out_of_memory import MOST_ATTEMPTS, MicroBatchFailure
from lengthwise.runtime.loop.brought_items import BroughtBatch, ItemExchange
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, sync_ranks
from lengthwise.runtime.loop.checked_stages import CheckedStages, CheckStages
from lengthwise.runtime.loop.closed_runs import close_together
from lengthwise.runtime.loop.coupled_step import CoupledStep
from lengthwise.runtime.loop.coupled_values import Coupling
from lengthwise.runtime.loop.forward_only import Per, ValuesOf, score_items
from lengthwise.runtime.loop.loop_ledger import LoopLedger
from lengthwise.runtime.loop.pending_batch import PendingBatch
from lengthwise.runtime.loop.planned_ahead import Gather, PlannedAhead, present_planner
from lengthwise.runtime.loop.planned_pipelines import rounds_of, sync_step, weights_of_stages
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.saved_beside import beside_to_save, restore_beside
from lengthwise.runtime.loop.shared_parts import with_same_weights
from lengthwise.runtime.loop.staged_pipeline import group_keys
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.loop.unprepared_models import UnpreparedModels
from lengthwise.runtime.loop.update_reports import failure_text, failures_of, infeasible
from lengthwise.runtime.loop.watched_model import WatchedModel
from lengthwise.runtime.loop.workers import ItemReaders, read_with_workers
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.device_meter import DeviceMeter
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.loss_check import LossCheck
from lengthwise.runtime.wrap.trained_outside import TrainedOutside

Planner = Callable[[GlobalBatch], StepPlan]
_log = logging.getLogger("lengthwise")


class Run(WatchedModel):
    """A prepared training run, as ``prepare`` returns it; every rank makes the same calls of it in the same order."""

    limits_own_batches = False
    """Whether steps of batches that ranks bring end after ``num_steps``, too."""

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
        check_stages: CheckStages | None = None,
        items: ItemExchange | None = None,
        coupling: Coupling | None = None,
        plan_with_cuts: PlanWithCuts | None = None,
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
            check_stages: called on every rank when a plan first has such stages. None: there are none.
            items: brings items of the ranks' own to those that compute them; None: the run takes none.
            coupling: the loss of a step of values of all its sequences; None: a loss of each micro-batch by itself.
            plan_with_cuts: plans a batch with the planner, some units of shared prefixes cut; None: they stay whole.
        """
        super().__init__(
            prepared.wrapped_model, prepared.world, collator=prepared.collator, state=prepared.state, seed=prepared.seed
        )
        self.frozen_models, self.frozen_weights = prepared.frozen_models, prepared.frozen_weights
        self.can_recompute, self.is_cuttable = prepared.can_recompute, prepared.is_cuttable
        self.check_ids = prepared.check_ids
        self.stream, self.planner, self.lr, self.clip_norm = stream, planner, lr, clip_norm
        self.num_steps, self.next_step, self.counts_targets = num_steps, 0, counts_targets
        self.on_oom, self.on_finish, self.keep_layers = on_oom, on_finish, keep_layers or (lambda plan: 0)
        self.check_stages, self._checked_stages = check_stages, CheckedStages(prepared)
        self._pending, self._ahead, self._plan_with_cuts = PendingBatch(stream), PlannedAhead(), plan_with_cuts
        self._readers, self.collator = read_with_workers(self.collator, workers, epoch=lambda: self._pending.epoch)
        self._items, self._corpus_collator, self.coupling = items, self.collator, coupling
        self.seen_scripts: tuple[ExchangeScript, ...] = ()
        """Exchanges of the forwards of a micro-batch, as the loop last called them."""
        self.wrapped_model.watch_changes()
        self.loss_check, self.trained_outside = LossCheck(warns=self.world.is_first), TrainedOutside(self.model)
        self.meter, self.ledger = DeviceMeter(self.world.device), LoopLedger()
        self.unprepared = UnpreparedModels(lambda: self.models, self.wrapped_model)
        self.skipped: list[int] = []
        """Numbers of steps that ``step.skip()`` left out, or of which no token has a loss."""
        self._step: Step | None = None

    @property
    def usual_scripts(self) -> tuple[ExchangeScript, ...]:
        """The collectives of the forwards of a micro-batch, as this loop usually calls them; () if not known yet."""
        is_known = not self.frozen_models and self.collator.units is None
        return self.seen_scripts or ((self.wrapped_model.script,) if is_known else ())

    @property
    def group(self) -> Group:
        """The ranks that share the current micro-batch, for collectives of the user's own."""
        return shards.current().group

    @property
    def items(self) -> ItemExchange:
        """Sends items that ranks bring to those that compute them."""
        assert self._items is not None, "prepare makes runs that take items"
        return self._items

    @property
    def readers(self) -> ItemReaders | None:
        """The processes that read the corpus; None: there are none, or the step's items were brought."""
        return None if self._pending.brought is not None else self._readers

    def steps(self, batches: Iterable[Iterable[Any]] | None = None, *, plan_ahead: bool = False) -> Iterator[Step]:
        """Iterate over the steps that are left; a step that was aborted comes again, with a new plan.

        A step is aborted where a rank ran out of memory, where its update raised, and where a loop left it, by an
        error that it caught or a ``break``. Called again, the steps go on where they were.

        ``batches``: instead of the corpus, what this rank brings to each step, as :meth:`step` takes it; the steps end
        when no rank has a batch left, or after ``steps`` of ``prepare``. ``next_step`` says how many batches are done.
        ``plan_ahead``: whether the batch of the next step is read when a step begins, and planned while it computes,
        where a batch does not depend on the step before. A loop that is left keeps it for the same iterator.

        Raises:
            CheckError: a step got no update, was given up too often, or ranks plan differently.
        """
        own_batches = None if batches is None else iter(batches)
        while True:
            self._leave_unfinished("run.steps()")
            if self.next_step >= self.num_steps and (own_batches is None or self.limits_own_batches):
                return
            if own_batches is not None and self._pending.batch is None:
                if (step := self._step_of(partial(self._ahead.take, own_batches))) is None:
                    return
            else:
                step = self._plan()
            self._step = step
            if plan_ahead and own_batches is not None:
                self._ahead.read(own_batches, self.items.gather, self.next_step + 1)
                self._ahead.start(present_planner(self.planner), self._plan_units)
            yield step

    def step(self, items: Iterable[Any] | None) -> Step:
        """Plan and begin a step of the items that the ranks bring: such as rollouts, or a batch of a ``DataLoader``.

        Each rank gives items of its own, as those of the corpus are: any number, none too (or None). All of them
        together are one global batch. An item is sent to the ranks that compute it. If ``update()`` returns None, for a
        rank ran out of memory, call this again with the same items; :meth:`steps` does so by itself.
        ``micro_batch.sequence_ids`` number the items of all ranks, rank 0's first, then rank 1's, each in their order.

        Raises:
            InputError: an item cannot be used, is longer than ``step_max_length``, or no rank has one.
            CheckError: a step was given up too often, or ranks make different calls.
        """
        self._leave_unfinished("run.step(items)")
        step = self._step_of(lambda gather, step: gather(() if items is None else items, step))
        assert step is not None, "there are items, if none"
        self._step = step
        return step

    @errors_spelt(as_option)
    def _step_of(self, bring: Callable[[Gather, int], BroughtBatch | None]) -> Step | None:
        """The step of what all ranks bring; None: no rank has a batch."""
        if self._pending.batch is not None and self._pending.brought is None:
            raise CheckError(
                f"step {self.next_step} of the corpus was given up, and comes again: go on with run.steps(), or leave "
                "it out with its step.skip(), before run.step(items)"
            )
        if (brought := bring(self.items.gather, self.next_step)) is None:
            return None
        self._pending.bring(brought)
        return self._plan()

    @errors_spelt(as_option)
    def score(self, items: Iterable[Any] | None, values_of: ValuesOf, *, per: Per = "token") -> list[Any]:
        """Compute something of items with the weights of the moment, without a backward, and without dropout.

        Such as log-probabilities of rollouts, rewards or embeddings. Each rank gives items of its own, any number of
        them, and gets what was computed of them, in their order: NumPy arrays ``[length, ...]`` per token, or ``[...]``
        per sequence; of units, a list of one for each member.

        Args:
            items: as those of the corpus are.
            values_of: from the forward's output and the micro-batch, a value for each slot of this rank, ``[t, ...]``
                or ``[1, t, ...]``; or per sequence ``[s, ...]``, such as of ``micro_batch.per_sequence``.
            per: "token" or "sequence".

        Raises:
            InputError: an item cannot be used or is too long, no rank has one, or values have another shape.
            InfeasibleError: a rank ran out of memory.
            CheckError: a step is being computed, or ranks make different calls.
        """
        self._come_between_steps("run.score()")
        brought = self.items.gather(() if items is None else items, self.next_step, RankOperation.SCORE)
        assert brought is not None, "there are items, if none"
        self._ahead.wait()
        cut = self.items.plan_forwards(brought.batch, brought.trees.__getitem__)
        sync_step(cut.plan, StepClock(self.world), self.parameters.problem())
        return score_items(self, brought, cut, per, values_of)

    def frozen(self, model: nn.Module, *, layers: str | None = None, check: bool = True) -> nn.Module:
        """Prepare a frozen model as :meth:`PreparedModel.frozen` does; from then on steps are planned in one stage."""
        model = super().frozen(model, layers=layers, check=check)
        if (replan := getattr(self.planner, "replan", None)) is not None:
            replan()
        return model

    def _leave_unfinished(self, call: str) -> None:
        """Discard, on all ranks, a step that this rank's loop left unfinished, before ``call``."""
        self.check_open(call)
        self._ahead.check_not_reading(call)
        step, self._step = self._step, None
        if step is None or step.is_over:
            return
        step.leave()
        _log.warning("%s; it comes again", self._last_failure)

    @errors_spelt(as_option)
    def _plan(self) -> Step:
        """Plan and begin the step of the batch that is pending, or the next one of the corpus."""
        pending, clock = self._pending, StepClock(self.world)
        pending.draw()
        pending.count_attempt(self.next_step, self._last_failure)
        ACTIVITY.begin("plan", step=self.next_step)
        with clock.span(SpanKind.PLAN, "plan"):
            planner = present_planner(self.planner)
            plan_units = partial(self._plan_units, planner)
            cut = self._ahead.plan_of_taken(planner) or pending.plan(plan_units, self._corpus_collator)
        if not isinstance(cut.plan, StepPlan):
            raise InputError(f"run.planner returned {cut.plan!r} for step {self.next_step}; it returns a StepPlan")
        cut.plan.check_covers(cut.batch)
        if sync_step(cut.plan, clock, self.parameters.problem(), is_changed=self.has_changed_settings(pending.brought)):
            self._compare_changed(cut.plan.step)
        self.collator = pending.collator(cut, self._items, self._corpus_collator)
        return self.begin_step(cut.plan, clock, attempt=pending.attempt)

    def _plan_units(self, planner: Planner, batch: GlobalBatch, tree_of: TreeOf) -> CutPlan:
        plan = self._plan_with_cuts
        return CutPlan(plan=planner(batch), batch=batch) if plan is None else plan(planner, batch, tree_of)

    def begin_step(self, plan: StepPlan, clock: StepClock, *, attempt: int = 0) -> Step:
        """Start the step of a plan that every rank has; ``attempt``: how often it was given up before.

        Raises:
            InputError: the plan is for other ranks or another model.
        """
        self.begin_plan(plan)
        self.begin_update()
        return (Step if self.coupling is None else CoupledStep)(self, plan, clock, attempt=attempt)

    @errors_spelt(as_option)
    def abort_step(self, step: Step, reports: RankReports) -> None:
        """Discard a step in which a rank ran out of memory, and report why to ``on_oom``. Every rank calls this.

        Raises:
            InfeasibleError: it was planned ``MOST_ATTEMPTS`` times, or nothing plans it again.
        """
        self.discard()
        failures = failures_of(reports)
        failed, reason = failures[0], failure_text(step.plan, failures[0])
        self.note_failure(reason)
        if self.coupling is not None and isinstance(step, CoupledStep) and step.num_kept:
            self.coupling.keep_forwards = lambda plan: frozenset()
            self.log_on_first_rank("%s; from now on forwards keep nothing until all are done", reason)
            return
        if self.on_oom is None or step.attempt >= MOST_ATTEMPTS:
            raise infeasible(step.plan, failed, reason, num_plans=step.attempt + 1)
        self.on_oom(step, failures)

    def note_skipped(self, step: Step) -> None:
        """Record a step that is skipped; every rank calls this."""
        self.skipped.append(step.number)
        self.log_on_first_rank("step %d is skipped: %s", step.number, self._last_failure or "asked for by step.skip()")
        self.finish(step)

    def finish(self, step: Step) -> None:
        """Record a step that is done and go on to the next; every rank calls this."""
        self.world.offload.release()
        self.end_update(step.number)
        is_skipped = step.is_skipped or bool(step.result and step.result.is_skipped)
        self.ledger.count(step.plan, self.collator, is_skipped=is_skipped)
        self.next_step += 1
        for wrapped_model in with_same_weights(self.wrapped_model, self.frozen_models):
            wrapped_model.next_step = self.next_step
        self._step, self._last_failure, self.collator = None, "", self._corpus_collator
        self._pending.clear()
        self._ahead.wait()  # before costs change
        if self.on_finish is not None:
            self.on_finish(step)

    @errors_spelt(as_option)
    def save(self, folder: Path | str, *, keep: int = 3) -> Path:
        """Save a checkpoint of weights, optimizer, stream and step, and return its path; every rank calls this.

        Raises:
            CheckError: ranks call different things, or a step is being computed.
        """
        state = self.sharded_state()
        self._come_between_steps("run.save()")
        self.keep_changes(RankOperation.SAVE, "run.save()")
        entries, tensors = beside_to_save(self)
        extra = {"step": self.next_step, "sampler": self._pending.stream_state, "skipped": self.skipped, **entries}
        checkpoint.save(Path(folder), state, extra | {"ledger": self.ledger.state_dict()}, keep=keep, beside=tensors)
        path = checkpoint.latest(Path(folder))
        self.log_on_first_rank("saved step %d: %s", self.next_step, path)
        return path

    def _come_between_steps(self, call: str, *, may_leave: bool = True, leaves: bool = True) -> None:
        """Leave a step that an error ended, or that has not begun; raise ``CheckError`` if one is being computed."""
        step = self._step
        is_next = not (may_leave or step is None or step.has_begun)
        if step is not None and not step.is_over and (step.is_being_computed or step.is_computed or is_next):
            raise CheckError(f"{call} in the midst of step {step.number}; call it after step.update()")
        if leaves:
            self._leave_unfinished(call)

    @errors_spelt(as_option)
    def resume(self, path: Path | str) -> int:
        """Resume from a checkpoint, with any number of ranks; a folder of checkpoints stands for its newest.

        Returns the step that is next.

        Raises:
            InputError: it is damaged, of another model or optimizer, or its data is not this run's.
            CheckError: ranks call different things, or a step is being computed.
        """
        state = self.sharded_state()
        self._come_between_steps("run.resume()")
        sync_ranks(self.world, RankOperation.RESUME, 0).check_same()
        path = Path(path)
        path = path if (path / checkpoint.STATE_FILE).is_file() else checkpoint.latest(path, is_of_run=False)
        extra: dict[str, Any] = checkpoint.load(path, state)
        restore_beside(self, extra, path, files=extra["files"])
        self.stream.load_state_dict(extra["sampler"])
        self.next_step, self.skipped = extra["step"], list(extra.get("skipped", []))
        self.num_steps = self._pending.num_steps_from(self.next_step, self.num_steps)
        self.ledger, self.collator = LoopLedger.of(extra.get("ledger", {})), self._corpus_collator
        self._pending.clear()
        self._ahead.forget()
        self.update_weights()
        self.log_on_first_rank("going on with step %d: %s", self.next_step, path)
        return self.next_step

    def close(self) -> None:
        """Restore the model as it was before ``prepare``, with current weights.

        In the midst of a step, or while an error ends the loop, the other ranks are told, and raise at once. Where
        weights are gathered layer by layer every rank has to call it; if another does not, they are left as shares.
        """
        step, self._step = self._step, None
        is_together = close_together(self, step)
        self._ahead.close()
        if self._readers is not None:
            self._readers.close()
        self._release(is_together=is_together)

    def begin_plan(self, plan: StepPlan) -> None:
        """Make the process groups of a plan, in one order on every rank, and start to gather what it computes with.

        Raises:
            InputError: the plan is for other ranks or another model.
        """
        unchecked = "" if self.check_stages is not None else "its stages were not compared with the whole model"
        unchecked = unchecked if self.coupling is None else "coupled_loss= couples its micro-batches"
        self.check_plan(plan, stage_problem=self.stage_problem or unchecked, is_coupled=self.coupling is not None)
        self.world.groups.prepare(key for pipeline in plan.pipelines for key in group_keys(pipeline))
        self._checked_stages.compare(plan, self.check_stages)
        if self.gather is not None:
            shards = weights_of_stages(plan, self.wrapped_model.used_units)
            self.gather.start(rounds_of(plan), num_kept=self.keep_layers(plan), shards=shards)
