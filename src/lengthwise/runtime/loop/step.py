"""One optimizer step of a user's own loop: micro-batches, or slices of them, out, losses in, then the update."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, LengthwiseError
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop import shared_gradients
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, sync_ranks
from lengthwise.runtime.loop.learning_rate import learning_rate_of
from lengthwise.runtime.loop.loss_weighing import Weighing
from lengthwise.runtime.loop.planned_pipelines import make_shard, micro_batches_of, own_rounds, scripts_of
from lengthwise.runtime.loop.run_state import MicroBatchTiming, RunState
from lengthwise.runtime.loop.staged_pipeline import order_of_backwards, passing, staged_pipelines
from lengthwise.runtime.loop.step_totals import column_totals, count_targets
from lengthwise.runtime.loop.step_update import result_of
from lengthwise.runtime.loop.update_reports import OwnUpdate, disagreement_of
from lengthwise.runtime.state.loss_scaler import scale_of
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import StepResult
from lengthwise.runtime.wrap.bent_losses import check_not_bent
from lengthwise.runtime.wrap.collator import pad_to_degree
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.deferred_loss import computed
from lengthwise.runtime.wrap.loss_backward import backward, copies_of
from lengthwise.runtime.wrap.loss_check import MeanOver, check_form, check_targets
from lengthwise.runtime.wrap.loss_terms import LossTotals
from lengthwise.runtime.wrap.micro_batch import MicroBatch


class Step:
    """The micro-batches of this rank in one step; iterate once, give every loss to :meth:`backward`, then update."""

    _call = "step.backward(loss)"
    """What the loop calls for every micro-batch."""

    def __init__(self, run: RunState, plan: StepPlan, clock: StepClock, *, attempt: int) -> None:
        self.run, self.plan, self.clock, self.attempt = run, plan, clock, attempt
        """How often the step was aborted before."""
        self.result: StepResult | None = None
        self.is_over = self.is_skipped = False
        self.measured: list[MicroBatchTiming] = []
        self.failure: tuple[int, int] | None = None
        """Pipeline and micro-batch in which this rank ran out of memory."""
        shared_gradients.lay_out(run, plan)
        self._own = micro_batches_of(plan, run.world.rank, run.collator)
        self._rounds = [] if run.gather is None else own_rounds(plan, run.world.rank)
        """The round of each micro-batch, where weights are gathered layer by layer."""
        self._shards: dict[int, PackShard] = {}
        self._staged = staged_pipelines(run, self._own)
        """The pipelines of several stages that this rank is in, by number."""
        self._current: MicroBatch | None = None
        run.gradients.begin()
        run.loss_check.begin()
        self.is_iterated = False
        """Whether a loop went through its micro-batches to their end."""
        self._iterator: weakref.ref[Iterator[MicroBatch]] | None = None
        self._position = -1
        is_counted = run.collator.may_leave_out and run.counts_targets
        counted = count_targets(self.number, self._own, run) if is_counted else None
        self._totals = column_totals(self._own, run)
        self._weighing = Weighing(LossTotals.of(plan, run.collator, targets=counted), run.world.device)
        if run.readers is not None:
            run.readers.start([read.planned.pack for read in self._own if read.is_first_of_pack])

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.plan.step

    @property
    def has_begun(self) -> bool:
        """Whether a loop has gone through any of its micro-batches, or begun to."""
        return self._iterator is not None

    @property
    def is_computed(self) -> bool:
        """Whether all micro-batches of this rank have had their backward."""
        return len(self._shards) == len(self._own) and all(shard.is_finished for shard in self._shards.values())

    @property
    def is_being_computed(self) -> bool:
        """Whether a loop goes through its micro-batches."""
        return self._iterator is not None and self._iterator() is not None and not self.is_computed

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro-batches, in the order that every rank of their groups has.

        Raises:
            CheckError: a micro-batch got no backward, or the step is iterated again.
        """
        if self._iterator is not None:
            raise CheckError(f"step {self.number} was iterated before; each micro-batch is computed once")
        iterator = self._micro_batches()
        self._iterator = weakref.ref(iterator)  # a loop that is left by an error closes it, if nobody holds on to it
        return iterator

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for position in self._positions():
            self._position, shard = position, self._shard(position)
            number, index, *_, part = self._own[position]
            # A rank that ran out of memory goes through the rest of the step, and sends zeros in its forwards' place.
            is_computed = self.failure is None
            shard.has_failed = not is_computed
            self._begin_round(position)
            compute = self.clock.span(SpanKind.COMPUTE, f"micro-batch {part.name}")
            with active(shard), self.run.unprepared.refused(), compute:
                meter = self.run.meter.start()
                self._current = self._make(position)
                yield self._current
                self._check_answered(self._call)
                time_s, peak = meter.stop()
                if is_computed and number not in self._staged:
                    self.measured.append(MicroBatchTiming(number, index, time_s=time_s, peak_bytes=peak))
            if (staged := self._staged.get(number)) is not None:
                staged.note_forward(index, time_s)
                self.run.gradients.check()
                failed = staged.run_backwards(index, self._shard, first=position - index)
                self.failure = self.failure or (None if failed is None else (number, failed))
                self.run.gradients.release()
        if self.run.gather is not None:
            self.run.gather.finish_rounds()
        self.run.push_rest()  # before a loop's own collectives after its micro-batches
        self.measured += [timing for number, staged in self._staged.items() for timing in staged.timings(number)]
        self.is_iterated = True

    def _positions(self) -> Sequence[int]:
        """The micro-batches that get their backward while a loop goes through them, in order."""
        return range(len(self._own))

    def _make(self, position: int) -> MicroBatch:
        """Make a micro-batch for the loop."""
        self.run.gradients.check()
        shard, planned = self._shard(position), self._own[position].planned
        micro_batch = self.run.make(shard, pad_to_degree(planned.pack, shard.group.size, self.run.collator))
        micro_batch.totals = self._weighing.totals
        self.run.wrapped_model.keeps_output = self.run.loss_check.needs_output(micro_batch)
        torch.clear_autocast_cache()  # an autocast around the loop keeps casts of weights as they once were
        return micro_batch

    def _check_answered(self, call: str) -> None:
        """Raise ``CheckError`` unless the loop made ``call`` for its micro-batch."""
        if self._current is not None:
            number, *_, part = self._own[self._position]
            raise CheckError(
                f"step {self.number}: micro-batch {part.name} of pipeline {number} got no {call}, which every "
                "micro-batch needs, for other ranks take part in it; call it instead of loss.backward()"
            )

    def _begin_round(self, position: int) -> None:
        """Begin the round of a micro-batch; a rank that computes no more takes part in it without computing."""
        if (gather := self.run.gather) is not None:
            gather.begin_round(self._rounds[position])
            if self.failure is not None:
                gather.abandon_round()

    def backward(self, loss: Tensor, *, side: Tensor | None = None, mean_over: MeanOver | None = None) -> None:
        """Add the gradient of ``loss``, the mean over this rank's targets, with the weight that it has in the step.

        ``side``: a further term, a sum of ``micro_batch.mean(...)``. ``mean_over``: what ``loss`` is a mean over where
        it is not the loss that was checked before the run: this rank's "targets" or "tokens"; the "units" of the
        micro-batch, of sums by ``micro_batch.per_sequence``, the same on every rank that shares it; or the whole
        "step", as a sum of ``micro_batch.mean(...)``.

        Raises:
            CheckError: there is no micro-batch that waits for it, gradients were changed by hand, or the loss is not
                the one that was checked.
            InputError: it cannot be differentiated.
        """
        if self._current is None or self.is_over:
            raise CheckError(f"step {self.number}: backward without a micro-batch; call it once for each")
        micro_batch, loss, side = self._current, computed(loss), computed(side)
        if micro_batch.shard.stage_pass is not None:
            self._end_stage(micro_batch, loss, side, mean_over)
            return
        weigh = partial(self._differentiation, micro_batch, loss, side, mean_over)
        self._run_backward(micro_batch.shard, self._position, weigh)

    def _run_backward(self, shard: PackShard, position: int, weigh: Callable[[], Callable[[], None]]) -> None:
        """Run the backward of a micro-batch, or stand in for it; ``weigh`` checks what it begins with and gives it."""
        run = self.run
        if not shard.has_failed:
            run.gradients.check()
            differentiate = weigh()
            shard.backward_begun = shard.num_exchanges
            run.begin_backward()
            try:
                with passing(run.overlap, shard, run.wrapped_model.structure.num_layers + 1):
                    differentiate()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                shard.note_out_of_memory(error)
        if shard.has_failed:
            self.failure = self.failure or self._own[position].place
            if run.gather is not None:
                run.gather.abandon_round()
        else:
            if run.gather is not None:
                run.gather.finish_round()
            run.seen_scripts = tuple(forward.script for forward in shard.passes)
        shared_gradients.end_backward(run.overlap, shard)
        shard.is_finished = True
        shard.passes.clear()
        self._current = None
        run.gradients.release()

    def couple(self, values: Tensor, *, side: Tensor | None = None) -> None:
        """Hand over values of sequences; raise ``CheckError`` where the run has no ``coupled_loss=``."""
        raise CheckError(
            f"step {self.number}: the run was prepared without coupled_loss=, which step.couple(values) gives values; "
            "name it in prepare(..., coupled_loss=...), or give a loss to step.backward"
        )

    def _differentiation(
        self, micro_batch: MicroBatch, loss: Tensor, side: Tensor | None, mean_over: MeanOver | None
    ) -> Callable[[], None]:
        """Check and weigh a loss; what is returned runs its backward."""
        shard = micro_batch.shard
        check_form(loss, len(shard.passes))
        self.run.trained_outside.check_new(loss, side)
        check_targets(loss, micro_batch, mean_over)
        self.run.loss_check.check(loss, self.run.wrapped_model, micro_batch, mean_over)
        if mean_over in (None, "targets", "tokens") and self.run.wrapped_model.by_sequence is None:
            check_not_bent(loss, model=type(self.run.model).__name__, micro_batch=micro_batch)
        terms = copies_of(self._weighing.terms(micro_batch, loss, side, mean_over))
        shard.forget_losses()
        # Without a mean over targets, or with sums, other ranks still need this rank's part of the backward.
        has_all = len(terms) > (side is not None) and mean_over not in ("step", "units") and not shard.has_sums
        scale, ignoring = scale_of(self.run.state.loss_scaler), self.run.state.unused.ignoring
        return partial(backward, terms, None if has_all else shard, scale=scale, ignoring=ignoring)

    def _end_stage(
        self, micro_batch: MicroBatch, loss: Tensor, side: Tensor | None, mean_over: MeanOver | None
    ) -> None:
        """End the forward of a micro-batch on one of several stages; its backward comes when 1F1B has it."""
        shard, batch = micro_batch.shard, self._own[self._position]
        if not shard.has_failed:
            self.run.gradients.check()
            if shard.stage_pass is not None and shard.stage_pass.is_last:
                shard.stage_pass.differentiate = self._differentiation(micro_batch, loss, side, mean_over)
        else:
            self.failure = self.failure or batch.place
        self._staged[batch.pipeline_number].end_forward(shard, batch.number)
        self._current = None
        self.run.gradients.release()

    def total(self, column: str, *, over: Literal["tokens", "sequences"] = "tokens") -> float:
        """The sum of one of ``loss_columns=`` over all tokens of the step, or of its first value of each sequence.

        The same on every rank: such as the number of tokens in a mask, to divide a sum by.

        Raises:
            InputError: there is no such column.
        """
        return self._totals.of(column, over)

    def update(self) -> StepResult | None:
        """Sum gradients over ranks, clip by their norm, step the optimizer; what every rank gets back is equal.

        None: some rank ran out of memory, so nothing of the step is kept; it comes again, planned anew. A result that
        ``is_skipped``: scaled gradients overflowed, and the loss scale falls; or no token has a loss.

        Raises:
            CheckError: micro-batches are left, another rank left the step, or ranks have come apart; nothing of the
                step is kept, and it comes again.
            LengthwiseError: loss or gradient is not finite; weights are as they were, and the step comes again.
        """
        if self.is_over:
            raise CheckError(f"step {self.number} has been updated")
        if not self.is_computed:
            done = sum(shard.is_finished for shard in self._shards.values())
            raise CheckError(
                f"step {self.number}: update after {done} of {len(self._own)} micro-batches; compute all that `for "
                "micro_batch in step` gives"
            )
        self.is_over = True
        run, state = self.run, self.run.state
        lr, fault = learning_rate_of(run.lr, self.number, self.plan.lr_factor, state.optimizer)
        run.push_rest()
        reports = self._report_update(lr, fault)
        if any(pipeline >= 0 for pipeline in reports.column(2)):
            run.abort_step(self, reports)
            return None
        run.take_over_changes(reports, f"step {self.number}", columns=(4, 5))
        with self.clock.span(SpanKind.UPDATE, "push"):
            run.push_late(reports.column(14))
            state.finish_push()
        with self.clock.span(SpanKind.UPDATE, "optimizer"):
            try:
                self.result = result_of(run, self.plan, self._weighing, reports, lr=lr)
            except LengthwiseError as error:
                raise self._failed(error) from None
            (run.discard if self.result.is_skipped else run.pull_weights)()
        run.finish(self)
        return self.result

    def skip(self) -> None:
        """Leave the step out on all ranks: weights stay as they are, its sequences count as computed.

        For a step whose update raised, or in place of its update; every rank calls it. ``run.skipped`` has its number.

        Raises:
            CheckError: it was updated, or other ranks do something else.
        """
        if self.result is not None or self.is_skipped:
            raise CheckError(f"step {self.number} was {'skipped' if self.is_skipped else 'updated'}; nothing to skip")
        self.finish_exchanges()
        self.is_over = True
        sync_ranks(self.run.world, RankOperation.SKIP, self.number).check_same()
        self.is_skipped = True
        self.run.discard()
        self.run.note_skipped(self)

    def leave(self) -> None:
        """Leave the step without an update, as by a ``break``; raise ``CheckError`` if all ranks computed all of it."""
        place = self.place()
        self.finish_exchanges()
        self.is_over = True
        values, note = (int(self.is_iterated),), f"left it {place}"
        reports = sync_ranks(self.run.world, RankOperation.LEAVE, self.number, values=values, note=note)
        reports.check_same(RankOperation.LEAVE, RankOperation.UPDATE)
        self.run.discard()
        if set(reports.operations) == {RankOperation.LEAVE} and all(reports.column(0)):
            raise CheckError(f"step {self.number} got no step.update(); step.skip() leaves it out")
        self.run.note_failure(f"step {self.number}: {reports.notes_text()}")

    def finish_exchanges(self) -> None:
        """Issue the remaining collectives of this rank's micro-batches with zeros, so that no other rank hangs."""
        self._close_loop()
        for position in self._order_of_backwards:
            number, index, *_ = self._own[position]
            if (staged := self._staged.get(number)) is None:
                shard = self._shard(position)
                shared_gradients.leave_micro_batch(self.run.overlap, shard, scripts_of(self.run, shard))
            elif index == 0:
                staged.finish(self._shard, first=position)
        self.run.push_rest()

    def _close_loop(self) -> None:
        """End the loop over the micro-batches, which computes no more."""
        self.run.gradients.hide()
        if self._iterator is not None and (iterator := self._iterator()) is not None:
            iterator.close()  # type: ignore[attr-defined]
        self._current = None
        if self.run.gather is not None:
            self.run.gather.abandon_rounds()

    @cached_property
    def _order_of_backwards(self) -> Sequence[int]:
        """All micro-batches in the order in which their last exchanges come."""
        return order_of_backwards(self._own, self._staged)

    def _report_update(self, lr: float, fault: str) -> RankReports:
        """Report what this rank brings to the update and get what all do; ``fault``: why it has no learning rate.

        Raises:
            CheckError: a rank left the step, or what they bring does not agree.
        """
        problem, *weights = self.run.inspect()
        update = OwnUpdate(
            weighing=self._weighing, failure=self.failure or (-1, -1), weights=weights, lr=lr, micro_batches=self._own,
            shards=self._shards, has_late_gradients=bool(self.run.overlap and self.run.overlap.has_late_gradients),
        )  # fmt: skip
        problem = fault or problem or self.run.gradients.problem() or self.run.loss_check.problem()
        if disagreement := disagreement_of(reports := update.report(self.run.world, self.number, problem), self.plan):
            raise self._failed(CheckError(f"step {self.number}: {disagreement}"))
        return reports

    def _failed(self, error: LengthwiseError) -> LengthwiseError:
        """Discard the step and return the error to raise; every rank calls this."""
        self.run.discard()
        self.run.note_failure(str(error))
        return error

    def place(self) -> str:
        """Describe how far this rank came, for messages."""
        if self.is_iterated:
            return "without step.update()"
        done = sum(shard.is_finished for shard in self._shards.values())
        return f"after {done} of its {len(self._own)} micro-batches, by an error, a break or a continue"

    def _shard(self, position: int) -> PackShard:
        if position not in self._shards:
            number, index, pipeline, planned, *_ = self._own[position]
            self._shards[position] = shard = make_shard(self.run, self.number, pipeline, planned)
            staged = self._staged.get(number)
            is_last = position == self._order_of_backwards[-1] and not (staged and staged.ends_with_weights)
            shard.watched = shared_gradients.watched_backward(self.run, pipeline, is_last=is_last)
            if staged is not None:
                staged.attach(shard, index)
        return self._shards[position]
