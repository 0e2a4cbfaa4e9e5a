"""One rank's operations of a step on tensors: pull, receive, the passes, send, push, in the order of its list.

t tokens of this rank, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.sliced_passes import Slice, slices_of
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import PUSH, SpanKind
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.comm.groups import Key
from lengthwise.runtime.comm.host_blocks import HostMemoryError
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure, is_out_of_memory
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.execution import ActivationPlan, Execution, ExecutionWatch, OneDevice
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.parallel.slice_attention import PackSlice, PackSlices
from lengthwise.runtime.state.gradient_shares import GRADIENT_SHARES
from lengthwise.runtime.state.loss_scaler import scale_of
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock, bytes_in_use
from lengthwise.runtime.train.micro_batch_tensors import MicroBatchTensors
from lengthwise.runtime.train.stage_input import StageInput
from lengthwise.sim.schedule_check import Operation, OperationKind, WeightPhase

ADDING_PASSES = (OperationKind.BACKWARD, OperationKind.WEIGHTS)
"""Passes that add to gradients of weights."""
OUTPUTS, GRADIENTS = "outputs", "gradients"
"""Groups of a pipeline: messages one way never wait for those the other way."""


class StepWatch(ExecutionWatch):
    """Waits for the weights a forward needs; reduces gradients as soon as a backward has them, or pushes its last."""

    def __init__(self, state: ShardedState, clock: StepClock) -> None:
        self._state, self._clock = state, clock
        self.is_last_pass = False
        """Whether no pass after this one adds to any gradient."""

    def need(self, unit: int) -> None:
        """Wait until the weights of ``unit`` are there."""
        if self._state.is_coming(unit):
            with self._clock.interruption(SpanKind.COMMUNICATE, "pull"):
                self._state.need(unit)

    def complete(self, unit: int) -> None:
        """Reduce ``unit`` to shares, if ranks keep these; push it if no micro-batch adds to its gradients any more."""
        self._state.complete(unit, is_last=self.is_last_pass)


@dataclass
class InFlight:
    """A micro-batch, or one of its slices, between its forward and its backward on this rank."""

    received: StageInput | None
    """Of what the stage before sent; None on the first stage."""
    output: Tensor
    """[t, D], or on the last stage the scalar loss."""
    sent: AsyncResult | None = None


class SlicedMicroBatch(PackSlices):
    """A micro-batch that is computed in slices: its tensors, and what its slices share on this rank."""

    def __init__(self, tensors: MicroBatchTensors) -> None:
        super().__init__(tensors.cu_seqlens)
        self.tensors = tensors


@dataclass(kw_only=True)
class WeightPhaseRun:
    """Executes the operations of one rank in one stretch of a step."""

    plan: StepPlan
    model: Transformer
    state: ShardedState
    feeds: Callable[[Pack], MicroBatchTensors]
    """The tensors of a micro-batch, asked for in the order of computing."""
    clock: StepClock
    forward_only: bool = False
    """Whether nothing is kept for backwards, as there are none."""
    loss: Tensor = field(init=False)
    """This rank's share of the step's mean loss so far; NaN after it ran out of memory."""
    failure: MicroBatchFailure | None = field(default=None, init=False)
    """Where this rank ran out of memory; from then on it computes no micro-batch that it has for itself."""

    def __post_init__(self) -> None:
        self._world = self.state.world
        self._watch = StepWatch(self.state, self.clock)
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._weight_gradients: dict[tuple[int, int], WeightGradients] = {}
        """Of micro-batches whose backwards are split, from the forward until their gradients of weights are there."""
        self._slices = [slices_of(pipeline) for pipeline in self.plan.pipelines]
        self._sliced: dict[tuple[int, int], SlicedMicroBatch] = {}
        """Micro-batches that are cut into slices, from the forward of the first one until its backward."""
        self._received: Tensor | None = None
        self._going: list[AsyncResult] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=self._world.device)

    def run(self, stretch: WeightPhase, operations: tuple[Operation, ...]) -> None:
        """Execute all operations in their order."""
        ends = [number for number, operation in enumerate(operations) if operation.kind in ADDING_PASSES]
        self._weight_gradients = {
            (operation.pipeline, operation.micro_batch): WeightGradients()
            for operation in operations
            if operation.kind is OperationKind.WEIGHTS
        }
        for number, operation in enumerate(operations):
            if operation.kind is OperationKind.PULL:
                self._pull(stretch)
            elif operation.kind is OperationKind.PUSH:
                self._push()
            elif operation.kind is OperationKind.FORWARD:
                self._compute(operation, self._forward)
            elif operation.kind in ADDING_PASSES:
                self._watch.is_last_pass = number == ends[-1]
                begins = operation.kind is OperationKind.BACKWARD
                self._compute(operation, self._backward if begins else self._finish_backward)
            elif operation.kind is OperationKind.RECEIVE:
                self._receive(operation)
            else:
                self._send(operation)
        if self.forward_only:
            self._finish_sends()
            self.state.finish_pull()

    def _pull(self, stretch: WeightPhase) -> None:
        with self.clock.span(SpanKind.COMMUNICATE, "layout"):
            self.state.hold(stretch.holdings, stretch.gradient_shares)
            self.state.pull()

    def _push(self) -> None:
        with self.clock.span(SpanKind.COMMUNICATE, PUSH):
            self._finish_sends()
            self.state.finish_push()

    def _finish_sends(self) -> None:
        for going in self._going:
            going.wait()
        self._going = []

    def _compute(self, operation: Operation, compute: Callable[[Operation], None]) -> None:
        """Compute a pass; the rest of the step is gone through without it if it runs out of memory on this rank alone.

        Raises:
            InfeasibleError: it ran out of memory, and others share the micro-batch, which cannot go on without it.
        """
        pipelines = self.plan.pipelines
        is_alone = pipelines[operation.pipeline].scheme.num_devices == 1
        if self.failure is not None and is_alone:
            return
        try:
            compute(operation)
            return
        except Exception as error:
            if not is_out_of_memory(error) or self.forward_only:
                raise
            if not is_alone:
                raise out_of_memory(self.plan, self._failure(operation, error)) from error
            self.failure = self._failure(operation, error)
        # and not before: the error holds on to what was computed
        self._in_flight = {k: flying for k, flying in self._in_flight.items() if pipelines[k[0]].scheme.num_devices > 1}
        self._sliced = {k: sliced for k, sliced in self._sliced.items() if pipelines[k[0]].scheme.num_devices > 1}
        self.loss = torch.full_like(self.loss, torch.nan)

    def _failure(self, operation: Operation, error: Exception) -> MicroBatchFailure:
        return MicroBatchFailure(
            rank=self._world.rank, pipeline=operation.pipeline, micro_batch=operation.micro_batch,
            host_bytes=error.num_bytes if isinstance(error, HostMemoryError) else 0,
        )  # fmt: skip

    def _forward(self, operation: Operation) -> None:
        pipeline, micro_batch = self._of(operation)
        execution = self._execution(operation, pipeline, micro_batch)
        x_tD, self._received = self._received, None
        received = None if x_tD is None else StageInput(x_tD.shape, x_tD.dtype)
        with self.clock.span(SpanKind.COMPUTE, f"forward {self._slice(operation).name}"):
            if received is not None and x_tD is not None:
                x_tD = received.enter(x_tD)
            output = self.model.run(execution, x_tD)
            if output.ndim == 0:
                output = output / self.plan.loss_normaliser
                self.loss += output.detach()
        if not self.forward_only or output.ndim:
            self._in_flight[operation.pipeline, operation.number] = InFlight(received, output)
        self.clock.sample_memory(bytes_in_use(self._world.device))

    def _backward(self, operation: Operation) -> None:
        in_flight = self._in_flight[operation.pipeline, operation.number]
        gradient, self._received = self._received, None
        with self.clock.span(SpanKind.COMPUTE, f"backward {self._slice(operation).name}"):
            if self.plan.pipelines[operation.pipeline].scheme.shard_gradients:
                group = self._world.groups.of(operation.ranks, GRADIENT_SHARES)
                assert group is not None, "a rank computes in pipelines that it is in"
                self.state.shares.begin(group)
            if in_flight.output.requires_grad:
                if gradient is None:
                    gradient = torch.full_like(in_flight.output, scale_of(self.state.loss_scaler))
                in_flight.output.backward(gradient)
            self.state.shares.finish()
        in_flight.output = in_flight.output.detach()  # what the backward needed goes now
        if in_flight.sent is not None:
            in_flight.sent.wait()  # it has arrived: its gradient came back
        if in_flight.received is None:
            del self._in_flight[operation.pipeline, operation.number]
        if not self._slice(operation).part:  # the last one to go back
            self._sliced.pop((operation.pipeline, operation.micro_batch), None)
        self.clock.sample_memory(bytes_in_use(self._world.device))

    def _finish_backward(self, operation: Operation) -> None:
        """Compute the gradients of weights that a split backward left for later."""
        with self.clock.span(SpanKind.COMPUTE, f"{operation.kind} {self._slice(operation).name}"):
            self._weight_gradients.pop((operation.pipeline, operation.micro_batch)).compute(self._watch.complete)
        self.clock.sample_memory(bytes_in_use(self._world.device))

    def _receive(self, operation: Operation) -> None:
        """Start receiving the input of the next pass in the list."""
        group, source, _ = self._channel(operation)
        x_tD = torch.empty(
            operation.num_tokens, self.model.spec.hidden_size, dtype=self.state.compute_dtype, device=self._world.device
        )
        with self.clock.span(SpanKind.WAIT, "bubble"):
            group.receive(x_tD, source, tag=operation.number).wait()
        self._received = x_tD

    def _send(self, operation: Operation) -> None:
        group, _, target = self._channel(operation)
        in_flight = self._in_flight[operation.pipeline, operation.number]
        if not operation.is_backward and not self.forward_only:
            in_flight.sent = group.send(in_flight.output.detach(), target, tag=operation.number)
            return
        del self._in_flight[operation.pipeline, operation.number]
        if self.forward_only:
            self._begin_send(group, in_flight.output, target, operation)
            return
        assert in_flight.received is not None
        self._begin_send(group, in_flight.received.gradient_of(in_flight.output), target, operation)

    def _begin_send(self, group: Group, x_tD: Tensor, target: int, operation: Operation) -> None:
        self._going = [going for going in self._going if not going.is_done]
        self._going.append(group.send(x_tD, target, tag=operation.number))

    def _slice(self, operation: Operation) -> Slice:
        return self._slices[operation.pipeline][operation.number]

    def _of(self, operation: Operation) -> tuple[Pipeline, PlannedMicroBatch]:
        pipeline = self.plan.pipelines[operation.pipeline]
        return pipeline, pipeline.micro_batches[operation.micro_batch]

    def _channel(self, operation: Operation) -> tuple[Group, int, int]:
        """The group of a message, and the places of its sender and its receiver in it."""
        purpose = GRADIENTS if operation.is_backward else OUTPUTS
        ranks = tuple(sorted(self.plan.pipelines[operation.pipeline].ranks))
        group = self._world.groups.of(ranks, purpose)
        assert group is not None, "a rank sends within pipelines that it is in"
        sender, receiver = operation.ranks
        return group, ranks.index(sender), ranks.index(receiver)

    def _execution(self, operation: Operation, pipeline: Pipeline, micro_batch: PlannedMicroBatch) -> Execution:
        scheme = pipeline.scheme
        with self.clock.span(SpanKind.DATA, f"data {self._slice(operation).name}"):
            fed, part = self._feed(operation, micro_batch)
        stage = next(s for s in range(scheme.num_stages) if self._world.rank in pipeline.ranks_of(s))
        weight_gradients = self._weight_gradients.get((operation.pipeline, operation.micro_batch))
        layers = scheme.layers_of_stage(stage)
        activations = self._activations(pipeline.scheme_of(micro_batch), weight_gradients, part)
        if scheme.degree == 1 and activations.head_groups == 1:
            return OneDevice(
                fed.tokens_T, fed.targets_T, views=self.model.views(fed.cu_seqlens), tables=self.model.tables,
                layers=layers, activations=activations, watch=self._watch, device=self._world.device,
            )  # fmt: skip
        group = self._world.groups.of(operation.ranks) if scheme.degree > 1 else Group(rank=0)
        assert group is not None, "a rank computes in pipelines that it is in"
        return StageExecution(
            self.model,
            group,
            tokens_T=fed.tokens_T,
            targets_T=fed.targets_T,
            cu_seqlens=fed.cu_seqlens,
            methods=pipeline.methods_of(micro_batch),
            weights=scheme.weights,
            activations=activations,
            layers=layers,
            watch=self._watch,
            placement=micro_batch.placement,
        )

    def _feed(self, operation: Operation, micro_batch: PlannedMicroBatch) -> tuple[MicroBatchTensors, PackSlice | None]:
        """The tensors of a pass, and the slice of the pack that it computes; None: all of it."""
        part = self._slice(operation)
        if part.is_alone:
            return self.feeds(micro_batch.pack), None
        key = operation.pipeline, operation.micro_batch
        if not part.part:
            self._sliced[key] = SlicedMicroBatch(self.feeds(micro_batch.pack))
        sliced = self._sliced[key]
        if self.forward_only and part.tokens.stop == micro_batch.pack.num_tokens:
            del self._sliced[key]
        return sliced.tensors.of(part.tokens), sliced.slice(part.tokens)

    def _activations(
        self, scheme: PipelineConfig, weight_gradients: WeightGradients | None, part: PackSlice | None
    ) -> ActivationPlan:
        is_offloaded = scheme.num_offloaded > 0 and not self.forward_only
        return ActivationPlan(
            recompute=scheme.recompute,
            offload=scheme.offload,
            tile_tokens=scheme.tile_tokens,
            head_groups=scheme.head_groups,
            keep_attention=scheme.keep_attention,
            host=self._world.offload.micro_batch() if is_offloaded else None,
            weight_gradients=weight_gradients,
            part=part,
        )


def out_of_memory(plan: StepPlan, failure: MicroBatchFailure) -> InfeasibleError:
    """The error of a rank that ran out of memory."""
    planned = plan.pipelines[failure.pipeline]
    micro_batch = planned.micro_batches[failure.micro_batch]
    num_tokens, scheme = micro_batch.pack.num_tokens, planned.scheme_of(micro_batch)
    return InfeasibleError(
        f"step {plan.step}: {failure.text} in a micro-batch of {num_tokens:,} tokens under scheme {scheme.name}; "
        f"{failure.way_out}lower {Setting.MAX_TOKENS}, or use more devices",
        what=f"micro-batch {failure.micro_batch} of pipeline {failure.pipeline}", value=num_tokens, unit="tokens",
    )  # fmt: skip


def gradient_keys(pipeline: Pipeline) -> list[Key]:
    """The groups of a pipeline that reduce gradients to shares."""
    stages = range(pipeline.scheme.num_stages if pipeline.scheme.shard_gradients else 0)
    return [(pipeline.ranks_of(stage), GRADIENT_SHARES) for stage in stages]


def make_groups(plan: StepPlan, state: ShardedState) -> None:
    """The groups of all stages and pipelines; every rank makes all of them, in the same order."""
    keys: list[Key] = []
    for pipeline in plan.pipelines:
        scheme = pipeline.scheme
        keys += [(pipeline.ranks_of(stage), "") for stage in range(scheme.num_stages if scheme.degree > 1 else 0)]
        keys += gradient_keys(pipeline)
        if scheme.num_stages > 1:
            keys += [(tuple(sorted(pipeline.ranks)), purpose) for purpose in (OUTPUTS, GRADIENTS)]
    state.world.groups.prepare(keys)
