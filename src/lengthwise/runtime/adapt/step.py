"""One optimizer step of a user's own loop: micro-batches out, losses in, then the update; exact whatever the plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.plan import MicroBatch as Planned
from lengthwise.core.plan import Pipeline, StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.adapt.memory import is_out_of_memory, num_exchanges
from lengthwise.runtime.adapt.micro_batch import MicroBatch, laid_out
from lengthwise.runtime.adapt.shard import Shard, active
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.step import StepResult

if TYPE_CHECKING:
    from lengthwise.runtime.adapt.run import Run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one micro-batch took on this rank."""

    pipeline: int
    """Of the plan."""
    micro_batch: int
    time_s: float
    peak_bytes: int
    """Above what was there before it; 0 where the device does not count."""


class Step:
    """The micro-batches of this rank in one step; iterate once, give every loss to :meth:`backward`, then update."""

    def __init__(self, run: "Run", plan: StepPlan, clock: StepClock, *, attempt: int) -> None:
        self.run, self.plan, self.clock = run, plan, clock
        self.attempt = attempt
        """0, or how often the step was given up before for lack of memory."""
        self.result: StepResult | None = None
        self.is_over = False
        self.measured: list[Measured] = []
        self.failure: tuple[int, int] | None = None
        """Pipeline and micro-batch in which this rank ran out of memory."""
        self._loss = torch.zeros((), dtype=torch.float64, device=run.world.device)
        self._num_targets = 0
        self._current: MicroBatch | None = None
        self._is_iterated = False
        self._done_before = 0
        self._dtype: torch.dtype | None = None
        if run.readers is not None:
            run.readers.start([planned.pack for *_, planned in self._own()])

    @property
    def number(self) -> int:
        """Of the step, from 0."""
        return self.plan.step

    def __iter__(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches, in the order that every rank of their groups has.

        Raises:
            CheckError: a micro-batch got no backward, or the step is iterated again.
        """
        if self._is_iterated:
            raise CheckError(f"step {self.number} was iterated before; each micro-batch is computed once")
        self._is_iterated = True
        for number, index, pipeline, planned in self._own():
            shard = self._shard(pipeline, planned)
            if self.failure is not None:
                self.run.stand_in.finish(shard, 0, self._dtype)
                continue
            with active(shard), self.clock.span(SpanKind.COMPUTE, f"micro-batch {index}"):
                meter = self.run.meter.start()
                pack = laid_out(planned.pack, shard.group.size, self.run.feeding)
                self._current, self._done_before = self.run.make(shard, pack), num_exchanges(shard.group)
                yield self._current
                if self._current is not None:
                    raise CheckError(
                        f"step {self.number}: micro-batch {index} of pipeline {number} got no step.backward(loss), "
                        "which every micro-batch needs, for other ranks take part in it"
                    )
                time_s, peak = meter.stop()
                self.measured.append(Measured(pipeline=number, micro_batch=index, time_s=time_s, peak_bytes=peak))
            if shard.has_failed:
                self.failure, self._dtype = (number, index), shard.dtype

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, the mean over this rank's targets, with the weight that it has in the step.

        Raises:
            CheckError: there is no micro-batch that waits for it.
        """
        if self._current is None:
            raise CheckError(f"step {self.number}: backward without a micro-batch; call it once for each")
        micro_batch, self._current = self._current, None
        shard, count = micro_batch.shard, micro_batch.num_targets
        if not shard.has_failed:
            if count:
                self._loss += loss.detach().double() * count
            self._num_targets += count
            self.run.check_gradients()
            try:
                # Where this rank has no target the mean is 0 / 0, but other ranks need their part of the backward.
                loss.backward(torch.full_like(loss, count / self.plan.loss_normaliser))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                shard.has_failed = True
        if shard.has_failed:  # and not before: the error holds on to what was computed
            self.run.stand_in.finish(shard, num_exchanges(shard.group) - self._done_before, shard.dtype)

    def update(self) -> StepResult | None:
        """Sum gradients over ranks, clip by their norm, step the optimizer; what every rank gets back is equal.

        None: some rank ran out of memory, so nothing of the step is kept; it comes again, planned anew.

        Raises:
            CheckError: micro-batches are left.
            LengthwiseError: loss or gradient is not finite; weights are as they were.
        """
        if self.is_over:
            raise CheckError(f"step {self.number} has been updated")
        if self.failure is None and len(self.measured) < len(self._own()):
            raise CheckError(
                f"step {self.number}: update after {len(self.measured)} of {len(self._own())} micro-batches; compute "
                "all that `for micro_batch in step` gives"
            )
        self.is_over = True
        run, state = self.run, self.run.state
        totals = [float(self._loss), self._num_targets, float(self.failure is not None)]
        summed = sum_over_ranks(torch.tensor(totals, dtype=torch.float64, device=run.world.device))
        loss, num_targets, num_failed = summed.tolist()
        if num_failed:
            run.give_up(self)
            return None
        with self.clock.span(SpanKind.UPDATE, "push"):
            state.finish_push()
        if not num_targets:
            raise LengthwiseError(f"step {self.number}: no token of it has a loss; look at the labels of its sequences")
        # The plan counts targets by lengths; where labels leave out others, the weights are set right here.
        factor = self.plan.loss_normaliser / num_targets
        norm = state.global_norm(self._loss.new_zeros(()))[0] * factor
        mean = loss / num_targets
        if not torch.isfinite(torch.tensor([norm, mean])).all():
            raise LengthwiseError(
                f"step {self.number}: loss {mean} and gradient norm {norm} are not both finite; weights are unchanged"
                "since the step before. Lower lr, set clip_norm, or look at the step's sequences"
            )
        lr, clip = run.lr(self.number) * self.plan.lr_factor, run.clip_norm
        with self.clock.span(SpanKind.UPDATE, "optimizer"):
            state.step(lr=lr, clip=factor * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0))
            state.hold_everything()
        self.result = StepResult(loss=mean, grad_norm=norm, lr=lr)
        run.finish(self)
        return self.result

    def _own(self) -> list[tuple[int, int, Pipeline, Planned]]:
        """What this rank computes: number of the pipeline, number of the micro-batch, and both."""
        rank = self.run.world.rank
        return [
            (number, index, pipeline, planned)
            for phase in range(self.plan.num_phases)
            for number, pipeline in enumerate(self.plan.pipelines)
            if pipeline.phase == phase and rank in pipeline.ranks
            for index, planned in enumerate(pipeline.micro_batches)
        ]

    def _shard(self, pipeline: Pipeline, planned: Planned) -> Shard:
        world, feeding = self.run.world, self.run.feeding
        group = world.groups.of(tuple(sorted(pipeline.ranks)))
        assert group is not None, "a rank computes in pipelines that it is in"
        ids = []
        pack = laid_out(planned.pack, group.size, feeding)
        for sequence, length, computed in zip(pack.ids, pack.lengths, pack.computed_lengths):
            ids += [sequence] if length == computed else [sequence, -1]
        return Shard(
            step=self.number,
            seed=self.run.seed,
            ids=tuple(ids),
            cu_seqlens=feeding.cu_seqlens(pack),
            group=group,
            device=world.device,
            recompute=pipeline.recompute_of(planned),
        )


def check_executable(plan: StepPlan, num_layers: int, num_ranks: int) -> None:
    """Raise ``InputError`` naming what of a plan is not for a model that is not ours."""
    where = f"plan for step {plan.step}"
    if plan.num_devices != num_ranks:
        raise InputError(f"{where} is for {plan.num_devices} ranks, the run has {num_ranks}; plan again")
    for number, pipeline in enumerate(plan.pipelines):
        scheme = pipeline.scheme
        if scheme.num_stages != 1 or scheme.num_layers != num_layers:
            raise InputError(
                f"{where}: pipelines[{number}] has stages of {scheme.stage_layers} layers; a model that is not ours is "
                f"computed in one stage of {num_layers}"
            )
        used = {str(method) for m in pipeline.micro_batches for method in pipeline.methods_of(m)}
        if not used <= {"dense", "ulysses"}:
            raise InputError(
                f"{where}: pipelines[{number}] uses {', '.join(sorted(used))}; any model can: ulysses, dense"
            )
