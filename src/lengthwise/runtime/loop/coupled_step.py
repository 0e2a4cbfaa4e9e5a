"""A step whose loss couples sequences of different micro-batches and ranks, such as the two answers of a pair.

The loop's body computes the values of each sequence and hands them over by :meth:`CoupledStep.couple`. When all
forwards are done, the values of all ranks are gathered and the loss is differentiated by each, once; then backwards go
on with these numbers. Forwards whose graph has no room until then are computed without one, and their micro-batches
come a second time: the loop's body does the same twice, and noise is the same, for it belongs to tokens, not to calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.loop.coupled_values import (
    Coupled,
    SequenceValues,
    check_values,
    couple,
    form_of_values,
    report_forwards,
)
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.planned_pipelines import scripts_of
from lengthwise.runtime.loop.run_state import CoupledRunState
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.state.loss_scaler import scale_of
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.loss_backward import LossTerm, backward
from lengthwise.runtime.wrap.loss_check import MeanOver, check_form
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.zero_collectives import finish_forwards


class CoupledStep(Step):
    """The micro-batches of this rank in a step of a run with ``coupled_loss=``."""

    _call = "step.couple(values)"

    def __init__(self, run: CoupledRunState, plan: StepPlan, clock: StepClock, *, attempt: int) -> None:
        """Begin the step; on a first attempt forwards keep what their backward needs where it has room."""
        super().__init__(run, plan, clock, attempt=attempt)
        self._coupled_run = run
        assert run.coupling is not None, "the run couples sequences"
        self._loss_of, numbers = run.coupling.loss_of, frozenset[tuple[int, int]]()
        if attempt == 0 and run.gather is None and not isinstance(run.state, Fsdp2State):
            numbers = run.coupling.keep_forwards(plan)
        self._kept = [position for position, batch in enumerate(self._own) if batch.place in numbers]
        """Positions of micro-batches whose forward keeps what the backward needs."""
        self._again = [position for position in range(len(self._own)) if position not in self._kept]
        self.num_kept = len(numbers)
        """Micro-batches of all ranks that are computed once; the others have a second forward."""
        self._waiting: dict[int, tuple[MicroBatch, Tensor, Tensor | None]] = {}
        """Micro-batch, values and further term of those that wait for their backward, by position."""
        self._said: list[SequenceValues] = []
        self._seen_forwards: tuple[ExchangeScript, ...] = ()
        self._is_reported = False
        self._coupled: Coupled | None = None

    def _micro_batches(self) -> Iterator[MicroBatch]:
        run = self._coupled_run
        for position in range(len(self._own)):
            yield from self._first_forward(position)
        if run.gather is not None:
            run.gather.finish_rounds()
            run.update_weights()
            run.state.clear_gradient()
        if self._gather_values():
            for position in self._kept:
                self._run_kept(position)
            if run.gather is not None:
                run.begin_plan(self.plan)
            yield from super()._micro_batches()
        self.is_iterated = True

    def _positions(self) -> Sequence[int]:
        return self._again

    @cached_property
    def _order_of_backwards(self) -> Sequence[int]:
        return [*self._kept, *self._again]

    def _first_forward(self, position: int) -> Iterator[MicroBatch]:
        """Give out a micro-batch that gets its forward, and its backward later."""
        self._position, shard = position, self._shard(position)
        shard.has_failed = self.failure is not None
        self._begin_round(position)
        compute = self.clock.span(SpanKind.COMPUTE, f"forward of micro-batch {self._own[position].part.name}")
        graph = nullcontext() if position in self._kept else torch.no_grad()
        with active(shard), self.run.unprepared.refused(), compute, graph:
            self._current = self._make(position)
            yield self._current
            self._check_answered(self._call)

    def couple(self, values: Tensor, *, side: Tensor | None = None) -> None:
        """Hand over the values [s, ...] of this micro-batch's sequences; their backward comes when all are known.

        ``values``: made of ``micro_batch.per_sequence``, so that ranks which share the micro-batch have the same.
        ``side``: a further term, a sum of ``micro_batch.mean(...)`` and ``micro_batch.sum(...)``.

        Raises:
            CheckError: there is no micro-batch that waits for it, or gradients were changed by hand.
            InputError: there is not one value for each sequence, or other micro-batches had another shape.
        """
        if self._current is None or self.is_over:
            raise CheckError(f"step {self.number}: couple without a micro-batch; call it once for each")
        micro_batch, position = self._current, self._position
        if self._coupled is not None:
            self._run_backward(micro_batch.shard, position, partial(self._weigh, micro_batch, values, side))
            return
        if micro_batch.shard.has_failed or isinstance(values, MissingTensor):
            self.failure = self.failure or self._own[position].place
            if self.run.gather is not None:
                self.run.gather.abandon_round()
        else:
            self._keep(micro_batch, values, side)
        self._current = None

    def _keep(self, micro_batch: MicroBatch, values: Tensor, side: Tensor | None) -> None:
        """Keep the values of a micro-batch, and with them the graph if it has room."""
        shard, numbers = micro_batch.shard, micro_batch.numbers
        shard.forget_losses()
        form = self._said[0].values if self._said else None
        checked = check_values(values, len(numbers), form=form)
        if self._position in self._kept:
            check_form(checked.sum(), len(shard.passes), "sum of the values")
            self.run.trained_outside.check_new(checked.sum(), side)
            self._waiting[self._position] = micro_batch, checked.clone(), None if side is None else side.clone()
        scripts = tuple(forward.script for forward in shard.passes)
        self._seen_forwards = scripts
        if self._position in self._kept:
            self.run.seen_scripts = scripts
        said = SequenceValues(numbers=numbers, values=checked.detach().clone(), is_first=shard.group.rank == 0)
        self._said.append(said)

    def _gather_values(self) -> bool:
        """Gather the values of all ranks and differentiate the loss by them; whether the step goes on."""
        run, is_void = self._coupled_run, self.failure is not None
        reports = report_forwards(run.world, self.number, self._said, is_void=is_void)
        self._is_reported = True
        if any(reports.column(0)):
            self._give_up()
            return False
        try:
            self._coupled = couple(
                run.world, self.plan, run.collator, self._said, form=form_of_values(reports), loss_of=self._loss_of,
                parameters=run.wrapped_model.structure.parameters,
            )  # fmt: skip
            self._check_reads(self._coupled.gradients)
        except LengthwiseError:
            self._give_up()  # on every rank
            raise
        if run.world.is_first:
            self._weighing.direct += self._coupled.loss
            self._add_gradients(self._coupled.gradients)
        for position in self._again:
            del self._shards[position]
        self._said.clear()
        return True

    def _check_reads(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` where the loss reads parameters of which a rank has shares; every rank raises it."""
        is_sharded = self.run.gather is not None or isinstance(self.run.state, Fsdp2State)
        if gradients and is_sharded:
            raise InputError(
                f"step {self.number}: coupled_loss reads {next(iter(gradients))}, and ranks have shares of parameters; "
                "read it in the model's forward instead, where values are made, or use weights='whole' in prepare(...)"
            )

    def _add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of parameters that the loss itself reads, on one rank for all."""
        parameters = self.run.wrapped_model.structure.parameters
        if not gradients:
            return
        self.run.gradients.check()
        terms = [
            LossTerm(value=(parameters[name] * gradient).sum(), weight=1.0) for name, gradient in gradients.items()
        ]
        backward(terms, scale=scale_of(self.run.state.loss_scaler))
        self.run.gradients.release()

    def _run_kept(self, position: int) -> None:
        """Run the backward of a micro-batch whose graph was kept."""
        micro_batch, values, side = self._waiting.pop(position)
        shard = micro_batch.shard
        shard.has_failed = self.failure is not None
        compute = self.clock.span(SpanKind.COMPUTE, f"backward of micro-batch {self._own[position].part.name}")
        with active(shard), self.run.unprepared.refused(), compute:
            self._run_backward(shard, position, partial(self._weigh, micro_batch, values, side))

    def _weigh(self, micro_batch: MicroBatch, values: Tensor, side: Tensor | None) -> Callable[[], None]:
        """Make the backward that begins with the derivatives of the loss by the values of a micro-batch."""
        assert self._coupled is not None
        numbers = micro_batch.numbers
        slopes = self._coupled.of(numbers).to(values.device)
        value = (check_values(values, len(numbers), form=slopes) * slopes).sum()
        check_form(value, len(micro_batch.shard.passes), "sum of the values")
        terms = self._weighing.coupled_terms(micro_batch, value, side)
        scale, ignoring = scale_of(self.run.state.loss_scaler), self.run.state.unused.ignoring
        return partial(backward, terms, micro_batch.shard, scale=scale, ignoring=ignoring)

    def backward(self, loss: Tensor, *, side: Tensor | None = None, mean_over: MeanOver | None = None) -> None:
        """Refuse: the run has a coupled loss, of values that :meth:`couple` takes.

        Raises:
            CheckError: always.
        """
        raise CheckError(
            f"step {self.number}: the run was prepared with coupled_loss=, which makes the loss of all sequences; give "
            "step.couple(values), and further terms as step.couple(values, side=...)"
        )

    def finish_exchanges(self) -> None:
        """Issue the remaining collectives with zeros; before the values are known, those of forwards alone."""
        if self._is_reported:
            super().finish_exchanges()
            return
        self._close_loop()
        for position in range(len(self._own)):
            shard = self._shard(position)
            finish_forwards(shard, self._seen_forwards or scripts_of(self.run, shard))
        if self.run.gather is not None:
            self.run.gather.wait()
        report_forwards(self.run.world, self.number, (), is_void=True)
        self._is_reported = True
        self._give_up()
        self.run.push_rest()

    def place(self) -> str:
        """Describe how far this rank came, for messages."""
        if self._coupled is not None or self.is_iterated:
            return super().place()
        return "before the loss of all of its sequences was known, by an error, a break or a continue"

    def _give_up(self) -> None:
        """Forget all forwards; no rank waits for a backward of the step, which is void."""
        self._waiting.clear()
        self._said.clear()
        for position in range(len(self._own)):
            shard = self._shard(position)
            shard.passes.clear()
            shard.is_finished = True
