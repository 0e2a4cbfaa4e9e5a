"""Cost from arithmetic alone: FLOPs over speed, bytes over bandwidth. For planning without a device at hand."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lengthwise.core.cost import CostError
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import UpdateParts
from lengthwise.core.pipeline_config import PipelineConfig, Strategy, WeightPlacement
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.grouped_heads import head_group_counts
from lengthwise.cost.analytic.layer_bytes import LayerBytes, host_bytes_per_token, layer_bytes, moving_bytes
from lengthwise.cost.analytic.stage_memory import (
    CPU_LOGITS_AT_ONCE,
    LOGITS_AT_ONCE,
    MemoryMoment,
    SlicedBytes,
    StageMemory,
    StageNumbers,
    backward_lines,
    loss_moments,
    num_messages,
    pull_moment,
    reduce_moments,
    sliced_bytes,
    tied_gradient_bytes,
)
from lengthwise.cost.analytic.stage_time import LayerSpeeds, StageTime, sent_s, stage_time
from lengthwise.cost.gradient_reduction import whole_units
from lengthwise.cost.links import host_copy_bytes_per_s
from lengthwise.cost.memory_model import (
    DTYPE_BYTES,
    gradient_bytes,
    larger_unit_gradients,
    loss_bytes_per_token,
    state_parts,
)
from lengthwise.cost.separable import Line, PiecewiseLinearMemory, SchemeCache, SeparableCost
from lengthwise.cost.weight_shards import arriving_params, held_params, pushed_params


class AnalyticCost(SeparableCost):
    """Times and bytes of any scheme from the closed forms of :mod:`lengthwise.cost.analytic.volume`.

    Every answer is for the stage that takes longest, or most. Asking for a scheme that this model cannot run, as more
    devices than key/value heads under ``megatron_ts``, raises ``InputError``.
    """

    prices_slices = True
    """Whether schemes may cut micro-batches into slices."""

    def __init__(
        self,
        *,
        model: ModelSpec,
        cluster: ClusterSpec,
        dtype: str = "bfloat16",
        state_on_host: bool = False,
        narrow_gradients: bool = False,
    ) -> None:
        super().__init__(
            model=model, cluster=cluster, dtype=dtype, state_on_host=state_on_host, narrow_gradients=narrow_gradients
        )
        speed_error = cluster.device.speed_error
        self.error = None if speed_error is None else CostError(of_times=speed_error)
        self._speeds = LayerSpeeds(model, cluster=cluster, dtype=dtype)
        self._layers = SchemeCache(self._layers_of_stages)
        self._time_of_stage: dict[tuple[Any, ...], StageTime] = {}
        self._numbers: dict[tuple[Any, ...], StageNumbers] = {}
        self._moments: dict[tuple[Any, ...], tuple[MemoryMoment, ...]] = {}
        self._stages = SchemeCache(self._make_stages)
        self._host_tokens = SchemeCache(partial(host_bytes_per_token, model, dtype=dtype))
        self._memory = PiecewiseLinearMemory(self._make_lines)

    def with_state_on_host(self) -> "AnalyticCost":
        """Price with the optimizer's state on the host; share with this cost what does not depend on that."""
        other = AnalyticCost(
            model=self.model, cluster=self.cluster, dtype=self.dtype, state_on_host=True,
            narrow_gradients=self.narrow_gradients,
        )  # fmt: skip
        other._layers, other._stages, other._host_tokens = self._layers, self._stages, self._host_tokens
        other._moments = self._moments
        return other

    def update_parts(self, strategy: Strategy) -> UpdateParts:
        """Seconds of push, optimizer and pull, each by itself."""
        return self.mover.update_parts(strategy)

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds, forward and backward, that each sequence adds to the stage it costs most."""
        stages, _ = self._stages(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        times_s = stages[0].times_s(length)
        for stage in stages[1:]:
            np.maximum(times_s, stage.times_s(length), out=times_s)
        return times_s

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence that its slowest stage spends in exposed communication."""
        stages, _ = self._stages(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        comm_s = np.stack([stage.comm_times_s(length) for stage in stages])
        return np.take_along_axis(comm_s, _slowest(stages, length)[None], axis=0)[0]

    def weight_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence that its slowest stage spends in gradients of weights of layers not recomputed."""
        stages, _ = self._stages(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        return np.array([stage.per_token_weights_s for stage in stages])[_slowest(stages, length)] * length

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of launches and calls of every layer, of weights moved to where they are not held, and of gradients
        reduced to shares as far as no backward hides it; as often as the scheme has slices.
        """
        return self._stages(scheme)[1] * scheme.slices

    def sent_s(self, scheme: PipelineConfig) -> tuple[float, float]:
        """Seconds per token, and per micro-batch, of what stages send each other."""
        return sent_s(self.model, scheme, cluster=self.cluster, width=DTYPE_BYTES[self.dtype])

    def _make_stages(self, scheme: PipelineConfig) -> tuple[tuple[StageTime, ...], float]:
        """The stages that are the slowest for some length, and the largest overhead of any."""
        self._refuse_what_cannot_run(scheme)
        stages = [self._stage_time(scheme, stage) for stage in range(scheme.num_stages)]
        slowest: list[StageTime] = []
        for stage in stages:
            if not any(stage.is_dominated_by(other) for other in slowest):
                slowest = [other for other in slowest if not other.is_dominated_by(stage)] + [stage]
        reduction = self.reduction(scheme)
        reduced_s = 0.0 if reduction is None else reduction.least_s
        return tuple(slowest), max(stage.overhead_s for stage in stages) + reduced_s

    def _stage_time(self, scheme: PipelineConfig, stage: int) -> StageTime:
        key = self._alike(scheme, stage)
        if key not in self._time_of_stage:
            self._time_of_stage[key] = stage_time(self._speeds, scheme, stage=stage)
        return self._time_of_stage[key]

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks."""
        return head_group_counts(self.model, degree)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        return self._memory(tokens, scheme, num_devices=num_devices)

    def _most_on_device(self, scheme: PipelineConfig, num_devices: int) -> int:
        return self._memory.most_tokens(self.memory_limit_bytes, scheme, num_devices=num_devices)

    def _host_line(self, scheme: PipelineConfig, num_devices: int) -> tuple[float, float]:
        return self._host_state_bytes(num_devices), self._host_tokens(scheme)

    def _make_lines(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        self._refuse_what_cannot_run(scheme)
        numbers = (stage for stage in range(scheme.num_stages) if not self._is_less(scheme, stage, num_devices))
        stages = (self.stage_memory(scheme, stage, num_devices=num_devices) for stage in numbers)
        return tuple(line for stage in stages for line in stage.lines)

    def _is_less(self, scheme: PipelineConfig, stage: int, num_devices: int) -> bool:
        """Whether a stage has no more bytes than the one before at any moment: both are alike and between others, and
        the later keeps fewer micro-batches and has fewer pushes under way.
        """
        layers = self._layers(scheme)
        if not 1 < stage < scheme.num_stages - 1 or layers[stage] != layers[stage - 1]:
            return False
        before, numbers = (self._numbers_of(scheme, number, num_devices) for number in (stage - 1, stage))
        return numbers.num_pushed <= before.num_pushed and numbers == before._replace(num_pushed=numbers.num_pushed)

    def _alike(self, scheme: PipelineConfig, stage: int) -> tuple[Any, ...]:
        """What stages share that take as long: how many layers there are of each kind, where in the pipeline they are,
        and what the scheme says of all layers.
        """
        ends = stage == 0, stage == scheme.num_stages - 1
        settings = scheme.degree, scheme.weights, scheme.tile_tokens, scheme.slices, scheme.keep_attention
        return ends, scheme.num_stages, frozenset(Counter(self._layers(scheme)[stage]).items()), settings

    def _layers_of_stages(self, scheme: PipelineConfig) -> list[list[LayerBytes]]:
        stages = map(scheme.layers_of_stage, range(scheme.num_stages))
        return [layer_bytes(self.model, scheme, layers, dtype=self.dtype) for layers in stages]

    def _refuse_what_cannot_run(self, scheme: PipelineConfig) -> None:
        if scheme.num_layers != self.model.num_layers:
            raise InputError(
                f"the scheme has {scheme.num_layers} layers, model {self.model.name} has {self.model.num_layers}"
            )
        if scheme.offload:
            host_copy_bytes_per_s(self.cluster)

    @property
    def _gradient_bytes(self) -> int:
        return gradient_bytes(self.dtype, is_narrow=self.narrow_gradients)

    def stage_memory(self, scheme: PipelineConfig, stage: int, *, num_devices: int) -> StageMemory:
        """Bytes of one stage under 1F1B: stage s of S keeps S - s micro-batches, all as large as the one asked for.

        Where backwards are split, each keeps S: gradients of weights need as many numbers as the layer had saved. Where
        micro-batches are cut into slices, it keeps one, and of the next S - s - 1 as large as the largest slice.

        Model state; whole gradients of two units where ranks keep shares; gathered weights of the largest layer; the
        gradient of a tied head; per token of the pack what layers keep on the device, what one layer's backward takes,
        the whole of one recomputed layer, and what comes back from the host for two; on the last stage the loss.
        """
        layers, widths = self._layers(scheme)[stage], (DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype]))
        sliced = sliced_bytes(layers, self.model, scheme, stage, widths)
        moving = moving_bytes(layers)
        settings = scheme.degree, scheme.weights, scheme.shard_gradients, scheme.zero_bubble, scheme.slices
        where = num_devices, stage, scheme.stage_layers, settings, scheme.tile_tokens, self._has_gone(num_devices)
        key = *where, layers[0], layers[-1], *moving.items()
        if key not in self._moments:
            self._moments[key] = self._moments_beside_saved(
                scheme, stage, num_devices, ends=(layers[0], layers[-1]), moving=moving, sliced=sliced, widths=widths
            )
        saved, keys = sum([layer.on_device for layer in layers]) + sliced.losses, sum(sliced.keys)
        weights, gradients, optimizer = self._numbers_of(scheme, stage, num_devices).state_bytes
        moments = tuple([moment.with_saved(saved, keys) for moment in self._moments[key]])
        return StageMemory(weights=weights, gradients=gradients, optimizer=optimizer, moments=moments)

    def _moments_beside_saved(
        self,
        scheme: PipelineConfig,
        stage: int,
        num_devices: int,
        *,
        ends: tuple[LayerBytes, LayerBytes],
        moving: Mapping[LayerBytes, float],
        sliced: SlicedBytes,
        widths: tuple[int, int],
    ) -> tuple[MemoryMoment, ...]:
        """The moments of a stage without what the forwards of all its layers have saved: they are the same however many
        layers are recomputed, as long as some are and some are not.

        ``ends``: the first layer and the last; ``moving``: of every kind of layer, what comes from the host.
        """
        (first, last), gradient, degree = ends, self._gradient_bytes, scheme.degree
        in_flight = 1 + (scheme.num_stages - 1 - (0 if scheme.zero_bubble else stage)) * sliced.share
        freed = 0.0 if scheme.zero_bubble else last.on_device * sliced.share  # gradients of weights wait for it
        lines_of = partial(
            backward_lines, moving, self.model, degree=degree, widths=widths, tile_tokens=scheme.tile_tokens,
            gone=larger_unit_gradients(self.model) * gradient if self._has_gone(num_devices) else 0.0,
        )  # fmt: skip
        tied = tied_gradient_bytes(self.model, scheme, width=widths[0])
        buffers = tied + sliced.head + max(layer.volume.buffer_bytes for layer in moving)
        numbers = self._numbers_of(scheme, stage, num_devices)
        num_arriving, num_pushed = numbers.num_arriving, numbers.num_pushed
        whole_at_last, whole_before, whole_at_first = numbers.whole_gradients
        moments, backward = tuple[MemoryMoment, ...](), lines_of()
        at_first = first.on_device * sliced.share + sliced.keys[0]
        for activations, num_beside, num_outputs, backwards, (of_saved, of_keys) in (
            (0.0, num_arriving + whole_at_last, in_flight, backward, (in_flight, 1)),
            (-freed, num_arriving + whole_before, in_flight, backward, (in_flight, 1)),
            (at_first, max(num_arriving, num_pushed) + whole_at_first, sliced.share, lines_of(is_last=True), (0, 0)),
        ):
            pushed = gradient * num_beside
            num_hidden = num_messages(scheme, stage, num_outputs, sliced.share)
            beside = Line(buffers + pushed, num_hidden * self.model.hidden_size * widths[0] / degree + sliced.made_keys)
            temporary = [line.of_share(sliced.share).plus(beside) for line in backwards]
            moments += tuple(MemoryMoment(Line(0.0, activations), line, of_saved, of_keys) for line in temporary)
            reduced = reduce_moments(self.model, activations, moving, share=widths[0] / degree, pushed=pushed)
            moments += tuple(moment._replace(of_saved=of_saved, of_keys=of_keys) for moment in reduced)
        if stage == scheme.num_stages - 1:
            moments += self._moments_at_loss(scheme, moving, sliced)
        if scheme.weights is WeightPlacement.SHARDED and num_devices > self.cluster.devices_per_node:
            moments += (pull_moment(first.volume, self.model, numbers.num_held, degree=degree, width=widths[0]),)
        return moments

    def _has_gone(self, num_devices: int) -> bool:
        """Whether gradients of the head are on the host before the backwards of layers."""
        return self.state_on_host and num_devices == 1

    def _numbers_of(self, scheme: PipelineConfig, stage: int, num_devices: int) -> StageNumbers:
        """What schemes share whose stages hold as many layers, of as many ranks that hold them alike."""
        key = num_devices, stage, scheme.stage_layers, scheme.degree, scheme.weights, scheme.shard_gradients
        if key not in self._numbers:
            num_held = held_params(self.model, scheme, stage=stage)
            self._numbers[key] = StageNumbers(
                num_held=num_held,
                num_arriving=arriving_params(self.model, scheme, num_devices=num_devices),
                num_pushed=pushed_params(self.model, scheme, stage=stage, num_devices=num_devices),
                whole_gradients=whole_units(self.model, scheme, stage),
                state_bytes=state_parts(
                    self.model, num_devices=num_devices, dtype=self.dtype, num_held=num_held,
                    on_host=self.state_on_host, narrow_gradients=self.narrow_gradients,
                    gradient_shares=scheme.degree if scheme.shard_gradients else 1,
                ),
            )  # fmt: skip
        return self._numbers[key]

    def _moments_at_loss(
        self, scheme: PipelineConfig, layers: Iterable[LayerBytes], sliced: SlicedBytes
    ) -> tuple[MemoryMoment, ...]:
        """The moments of the loss on the last stage, without what the layers of a micro-batch have saved."""
        width = DTYPE_BYTES[self.dtype]
        losses = 0.0 if sliced.losses else loss_bytes_per_token(self.model, width) / scheme.degree
        moments = loss_moments(
            self.model,
            max(layer.on_host for layer in layers) * sliced.share + losses,
            degree=scheme.degree,
            is_sharded=scheme.weights is WeightPlacement.SHARDED,
            widths=(width, max(4, width)),
            logits_at_once=CPU_LOGITS_AT_ONCE if self.cluster.device.name == "cpu" else LOGITS_AT_ONCE,
        )
        return tuple(
            moment._replace(temporary=moment.temporary.of_share(sliced.share), of_saved=1, of_keys=1)
            for moment in moments
        )


def _slowest(stages: Sequence[StageTime], length: np.ndarray) -> np.ndarray:
    """Which stage takes longest for each length."""
    slowest: np.ndarray = np.argmax([stage.times_s(length) for stage in stages], axis=0)
    return slowest
