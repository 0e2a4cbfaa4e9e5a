"""A pipeline of several stages or slices on one rank: its messages, and when the schedule has the backwards of a loop's
losses.

A loop computes forward and backward of one micro-batch after another. The forwards run when it calls the model; what it
gives to ``step.backward`` waits until the schedule has that backward. Where the plan splits it, gradients of weights
come in a pass of their own, later. Where it cuts micro-batches into slices, each is a micro-batch for the loop, and
their backwards run in reverse, when the last one's forward is over: in a pipeline of one stage, too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError
from lengthwise.core.pass_order import PassKind
from lengthwise.core.sliced_passes import is_sliced, slices_of
from lengthwise.core.step_plan import Pipeline
from lengthwise.core.zero_bubble import pass_orders
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.comm.groups import Key
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop import shared_gradients
from lengthwise.runtime.loop.planned_pipelines import LoopMicroBatch
from lengthwise.runtime.loop.run_state import MicroBatchMaker, MicroBatchTiming
from lengthwise.runtime.loop.shared_gradients import stage_of
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.parallel.slice_attention import PackSlices
from lengthwise.runtime.state.narrow_parameters import common_dtype
from lengthwise.runtime.state.update_overlap import UpdateOverlap
from lengthwise.runtime.train.device_meter import DeviceMeter
from lengthwise.runtime.train.execute_pipeline import GRADIENTS, OUTPUTS, gradient_keys
from lengthwise.runtime.wrap.context import ForwardPass, PackShard, active
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.stage_pass import StagedForward
from lengthwise.runtime.wrap.zero_collectives import finish_forward


class StagedPipeline:
    """The stage that this rank computes of one pipeline of a plan."""

    def __init__(self, run: MicroBatchMaker, pipeline: Pipeline, *, is_last: bool = False) -> None:
        """``is_last``: whether this rank computes no pipeline after it in the step."""
        scheme, rank = pipeline.scheme, run.world.rank
        self._run, self._num_stages = run, scheme.num_stages
        self._stage = stage_of(pipeline, rank)
        self._layers, self._num_layers = scheme.layers_of_stage(self._stage), scheme.num_layers
        ranks = tuple(sorted(pipeline.ranks))
        place = pipeline.ranks_of(self._stage).index(rank)
        neighbours = {self._stage - 1, self._stage + 1} & set(range(self._num_stages))
        self._places = {stage: ranks.index(pipeline.ranks_of(stage)[place]) for stage in neighbours}
        if neighbours:
            outputs, gradients = (run.world.groups.of(ranks, purpose) for purpose in (OUTPUTS, GRADIENTS))
            assert outputs is not None and gradients is not None, "a rank computes in pipelines that it is in"
            self._outputs, self._gradients = outputs, gradients
        self._order = pass_orders(pipeline)[self._stage]
        self._slices, self._packs = slices_of(pipeline), dict[int, PackSlices]()
        """What is computed at once, by number: the slices of micro-batches, or micro-batches that are not cut; and what
        the slices of a micro-batch share, by its place in the pipeline."""
        self.backwards = [number for kind, number in self._order if kind is PassKind.BACKWARD]
        """The numbers of slices in the order of their backwards."""
        self.ends_with_weights = self._order[-1][0] is PassKind.WEIGHTS
        """Whether its last pass gives gradients of weights that a backward left for later."""
        self._pushes_last = is_last and self.ends_with_weights
        self._sends: list[AsyncResult] = []
        self._meter = DeviceMeter(run.world.device)
        self._waited_s = 0.0
        """Seconds that the last forward waited for the stage before."""
        self.times_s: dict[int, float] = {}
        """Seconds that this stage computed of each slice, without what it waited for its neighbours."""

    def note_forward(self, index: int, time_s: float) -> None:
        """Record a forward that took ``time_s``, with what it waited for the stage before; its backward comes later."""
        self.times_s[index] = time_s - self._waited_s

    def timings(self, number: int) -> list[MicroBatchTiming]:
        """What was measured of the micro-batches of this pipeline, which has a ``number`` in the plan; no bytes."""
        sums_s: dict[int, float] = {}
        for index, time_s in self.times_s.items():
            micro_batch = self._slices[index].micro_batch
            sums_s[micro_batch] = sums_s.get(micro_batch, 0.0) + time_s
        return [
            MicroBatchTiming(pipeline=number, micro_batch=micro_batch, time_s=time_s, peak_bytes=0)
            for micro_batch, time_s in sums_s.items()
        ]

    def attach(self, shard: PackShard, index: int) -> None:
        """Let micro-batch or slice ``index``, of this shard, be computed by this stage alone."""
        part = self._slices[index]
        if not part.is_alone:
            shard.part = self._packs.setdefault(part.micro_batch, PackSlices(shard.cu_seqlens)).slice(part.tokens)
        script = self._run.wrapped_model.script
        calls = {number: call for number, call in script.calls.items() if call.layer in self._layers}
        shard.script = replace(
            script,
            calls=calls,
            without_recompute=tuple(event for event in script.without_recompute if event[1] in calls),
            with_recompute=tuple(event for event in script.with_recompute if event[1] in calls),
        )
        shard.stage_pass = StagedForward(
            layers=self._layers,
            num_layers=self._num_layers,
            receive=lambda like: self._received(shard, index, like),
        )
        if (PassKind.WEIGHTS, index) in self._order:
            shard.weight_gradients = WeightGradients(is_open=False)

    def end_forward(self, shard: PackShard, index: int) -> None:
        """Send the output of a forward to the next stage; zeros if this rank could not compute it."""
        stage = shard.stage_pass
        assert stage is not None
        if not stage.is_first and not stage.is_received:
            self._receive_output(shard, index)
        if not stage.is_last:
            output = None if stage.output is None or shard.has_failed else stage.output.detach()
            self._send(self._outputs, self._flat(shard, self._layers.stop - 1, output), self._stage + 1, index)
        stage.is_sent = True

    def run_backwards(self, index: int, shards: Callable[[int], PackShard], *, first: int) -> int | None:
        """Run the passes that the schedule has between the forward of a micro-batch and the next.

        ``shards``: gives those of this rank's micro-batches, which begin with ``first`` in this pipeline.
        Returns the place of the first micro-batch for which memory was not enough; None: there is none.
        """
        start = self._order.index((PassKind.FORWARD, index)) + 1
        passes = list(takewhile(lambda each: each[0] is not PassKind.FORWARD, self._order[start:]))
        for place, (kind, number) in enumerate(passes, start):
            if kind is PassKind.BACKWARD:
                self.backward(shards(first + number), number)
            else:
                self._finish_backward(shards(first + number), number, is_last=place + 1 == len(self._order))
        if start + len(passes) == len(self._order):
            self.wait()
        failed = (number for _, number in passes if shards(first + number).has_failed)
        return next((self._slices[number].micro_batch for number in failed), None)

    def backward(self, shard: PackShard, index: int) -> None:
        """Run the backward of a micro-batch; its ``has_failed`` says whether memory was enough."""
        stage, gradient = shard.stage_pass, None
        assert stage is not None
        if not stage.is_last and not stage.has_gradient:
            gradient = self._receive(self._gradients, shard, self._layers.stop - 1, self._stage + 1, index)
            stage.has_gradient = True
        if not shard.has_failed:
            shard.backward_begun = shard.num_exchanges
            last = self._layers.stop + stage.is_last  # after all layers there is the head
            try:
                self._meter.start()
                leaving = nullcontext() if shard.weight_gradients is None else shard.weight_gradients.opened()
                with active(shard), passing(self._run.wrapped_model.layers.overlap, shard, last), leaving:
                    _differentiate(stage, gradient)
                self.times_s[index] = self.times_s.get(index, 0.0) + self._meter.stop()[0]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                shard.note_out_of_memory(error)
        shared_gradients.end_backward(self._run.wrapped_model.layers.overlap, shard)
        if not stage.is_first:
            gradient = None if stage.input is None or shard.has_failed else stage.input.grad
            self._send(self._gradients, self._flat(shard, self._layers.start - 1, gradient), self._stage - 1, index)
        stage.input = stage.output = stage.differentiate = None
        part = self._slices[index]
        if not part.part and not part.is_alone:
            self._packs[part.micro_batch].clear()
        shard.passes.clear()
        shard.is_finished = True

    def _finish_backward(self, shard: PackShard, index: int, *, is_last: bool) -> None:
        """Compute the gradients of weights that a split backward left for later; ``is_last``: in this pipeline."""
        gradients, shard.weight_gradients = shard.weight_gradients, None
        if gradients is None or shard.has_failed:
            return
        overlap = self._run.wrapped_model.layers.overlap if is_last and self._pushes_last else None
        try:
            self._meter.start()
            gradients.compute(_ignore if overlap is None else overlap.complete_layer)
            self.times_s[index] += self._meter.stop()[0]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shard.note_out_of_memory(error)

    def finish(self, shards: Callable[[int], PackShard], *, first: int) -> None:
        """Send zeros for all that is left of the pipeline in a step that this rank leaves.

        ``shards``: gives those of this rank's micro-batches, which begin with ``first`` in this pipeline.
        """
        for kind, index in self._order:
            shard = shards(first + index)
            stage = shard.stage_pass
            assert stage is not None
            shard.has_failed = shard.has_failed or not shard.is_finished
            shard.weight_gradients = None
            if kind is PassKind.BACKWARD and not shard.is_finished:
                self.backward(shard, index)
            elif kind is PassKind.FORWARD and not stage.is_sent:
                if not shard.passes:
                    script = shard.script or ExchangeScript(calls={})
                    shard.passes.append(ForwardPass(script=script, begun=shard.num_exchanges))
                for forward in shard.passes:
                    finish_forward(shard, forward)
                self.end_forward(shard, index)
        self.wait()

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sends:
            self._sends.pop().wait()

    def _received(self, shard: PackShard, index: int, like: Tensor) -> Tensor:
        """The output of the stage before, in the shape of ``like``, of the dtype that layers return."""
        dtype = torch.promote_types(like.dtype, self._run.wrapped_model.layers.dtypes[self._layers.start - 1])
        return self._receive_output(shard, index).view(like.shape).to(dtype)

    def _receive_output(self, shard: PackShard, index: int) -> Tensor:
        assert shard.stage_pass is not None
        shard.stage_pass.is_received = True
        self._meter.start()
        output = self._receive(self._outputs, shard, self._layers.start - 1, self._stage - 1, index)
        self._waited_s = self._meter.stop()[0]
        return output

    def _receive(self, group: Group, shard: PackShard, layer: int, stage: int, index: int) -> Tensor:
        message = self._flat(shard, layer, None)
        group.receive(message, self._places[stage], tag=index).wait()
        return message

    def _send(self, group: Group, message: Tensor, stage: int, index: int) -> None:
        self._sends = [sent for sent in self._sends if not sent.is_done]
        self._sends.append(group.send(message, self._places[stage], tag=index))

    def _flat(self, shard: PackShard, layer: int, values: Tensor | None) -> Tensor:
        """A message of the numbers that a layer returns: ``values``, or zeros."""
        wrapped_model = self._run.wrapped_model
        dtype = common_dtype(wrapped_model.structure.parameters.values())
        dtype = torch.promote_types(dtype, wrapped_model.layers.dtypes[layer])
        if values is not None:
            return values.detach().flatten().to(dtype)
        return torch.zeros(shard.num_slots * wrapped_model.layers.widths[layer], dtype=dtype, device=shard.device)


def staged_pipelines(run: MicroBatchMaker, own: Sequence[LoopMicroBatch]) -> dict[int, StagedPipeline]:
    """The pipelines of several stages, or with slices, among those of a rank's micro-batches, by number."""
    return {
        number: StagedPipeline(run, pipeline, is_last=number == own[-1].pipeline_number)
        for number, index, pipeline, *_ in own
        if index == 0 and (pipeline.scheme.num_stages > 1 or is_sliced(pipeline))
    }


def order_of_backwards(own: Sequence[LoopMicroBatch], staged: Mapping[int, StagedPipeline]) -> list[int]:
    """Positions of a rank's micro-batches and slices in the order of their backwards; those of slices run in reverse.

    ``staged``: the pipelines of several stages or slices, by number.
    """
    return [
        position - batch.number + staged[batch.pipeline_number].backwards[batch.number]
        if batch.pipeline_number in staged
        else position
        for position, batch in enumerate(own)
    ]


def passing(overlap: UpdateOverlap | None, shard: PackShard, position: int) -> AbstractContextManager[None]:
    """Within, the backward of a micro-batch runs, which begins at ``position`` of the forward."""
    return nullcontext() if overlap is None else overlap.backward(shard.watched, position)


def _ignore(layer: int) -> None:
    """Nothing follows from a layer's gradients before those of other pipelines."""


def _differentiate(stage: StagedForward, gradient: Tensor | None) -> None:
    if stage.is_last:
        assert stage.differentiate is not None, "the loop gave a loss"
        try:
            stage.differentiate()
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise CheckError(
                "a loop changed in place what the backward of an earlier micro-batch needs: in stages and slices it "
                "runs after step.backward(loss), when the schedule has it; change a copy"
            ) from error
    elif stage.output is not None and stage.output.requires_grad and gradient is not None:
        torch.autograd.backward(stage.output, gradient.view(stage.output.shape).to(stage.output.dtype))


def group_keys(pipeline: Pipeline) -> list[Key]:
    """The groups of a pipeline: of each stage, and of the messages between stages."""
    ranks = tuple(sorted(pipeline.ranks))
    stages: list[Key] = [(pipeline.ranks_of(stage), "") for stage in range(pipeline.scheme.num_stages)]
    messages: list[Key] = [(ranks, OUTPUTS), (ranks, GRADIENTS)] if len(stages) > 1 else []
    return [*stages, *messages, *gradient_keys(pipeline)]
