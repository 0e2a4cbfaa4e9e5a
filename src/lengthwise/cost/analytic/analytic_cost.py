"""Cost from arithmetic alone: FLOPs over speed, bytes over bandwidth. For planning without a device at hand."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lengthwise.core.cost import CostError
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import UpdateParts
from lengthwise.core.pipeline_config import PipelineConfig, Strategy, WeightPlacement
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.grouped_heads import head_group_counts
from lengthwise.cost.analytic.layer_bytes import LayerBytes, host_bytes_per_token, layer_bytes
from lengthwise.cost.analytic.stage_memory import (
    CPU_LOGITS_AT_ONCE,
    LOGITS_AT_ONCE,
    MemoryMoment,
    SlicedBytes,
    StageMemory,
    backward_lines,
    loss_moments,
    num_messages,
    pull_moment,
    reduce_moments,
    sliced_bytes,
    tied_gradient_bytes,
)
from lengthwise.cost.analytic.stage_time import StageTime, sent_s, stage_time
from lengthwise.cost.gradient_reduction import whole_units
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
        self._stages = SchemeCache(self._make_stages)
        self._host_tokens = SchemeCache(partial(host_bytes_per_token, model, dtype=dtype))
        self._memory = PiecewiseLinearMemory(self._make_lines)

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
        if scheme.num_layers != self.model.num_layers:
            raise InputError(
                f"the scheme has {scheme.num_layers} layers, model {self.model.name} has {self.model.num_layers}"
            )
        stages = [
            stage_time(self.model, scheme, stage=stage, cluster=self.cluster, dtype=self.dtype)
            for stage in range(scheme.num_stages)
        ]
        slowest: list[StageTime] = []
        for stage in stages:
            if not any(stage.is_dominated_by(other) for other in slowest):
                slowest = [other for other in slowest if not other.is_dominated_by(stage)] + [stage]
        reduction = self.reduction(scheme)
        reduced_s = 0.0 if reduction is None else reduction.least_s
        return tuple(slowest), max(stage.overhead_s for stage in stages) + reduced_s

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks."""
        return head_group_counts(self.model, degree)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        return self._memory(tokens, scheme, num_devices=num_devices)

    def _about_tokens(self, scheme: PipelineConfig, num_devices: int) -> float:
        return self._memory.most_tokens(self.memory_limit_bytes, scheme, num_devices=num_devices)

    def _host_line(self, scheme: PipelineConfig, num_devices: int) -> tuple[float, float]:
        return self._host_state_bytes(num_devices), self._host_tokens(scheme)

    def _make_lines(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        self._stages(scheme)  # refuses what cannot run
        stages = (self.stage_memory(scheme, stage, num_devices=num_devices) for stage in range(scheme.num_stages))
        return tuple(line for stage in stages for line in stage.lines)

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
        widths, gradient = (DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype])), self._gradient_bytes
        degree, layers = scheme.degree, layer_bytes(self.model, scheme, scheme.layers_of_stage(stage), dtype=self.dtype)
        sliced = sliced_bytes(layers, self.model, scheme, stage, widths)
        in_flight = 1 + (scheme.num_stages - 1 - (0 if scheme.zero_bubble else stage)) * sliced.share
        first, saved = layers[0], sum(layer.on_device for layer in layers) + sliced.losses
        freed = 0.0 if scheme.zero_bubble else layers[-1].on_device * sliced.share  # gradients of weights wait for it
        lines_of = partial(
            backward_lines, layers, self.model, degree=degree, widths=widths, tile_tokens=scheme.tile_tokens,
            gone=larger_unit_gradients(self.model) * gradient if self.state_on_host and num_devices == 1 else 0.0,
        )  # fmt: skip
        tied = tied_gradient_bytes(self.model, scheme, width=widths[0])
        buffers = tied + sliced.head + max(layer.volume.buffer_bytes for layer in layers)
        num_arriving = arriving_params(self.model, scheme, num_devices=num_devices)
        num_pushed = pushed_params(self.model, scheme, stage=stage, num_devices=num_devices)
        whole_at_last, whole_before, whole_at_first = whole_units(self.model, scheme, stage)
        moments, backward = tuple[MemoryMoment, ...](), lines_of()
        at_last, at_first = in_flight * saved + sum(sliced.keys), first.on_device * sliced.share + sliced.keys[0]
        for activations, num_beside, num_outputs, backwards in (
            (at_last, num_arriving + whole_at_last, in_flight, backward),
            (at_last - freed, num_arriving + whole_before, in_flight, backward),
            (at_first, max(num_arriving, num_pushed) + whole_at_first, sliced.share, lines_of(is_last=True)),
        ):
            pushed = gradient * num_beside
            num_hidden = num_messages(scheme, stage, num_outputs, sliced.share)
            beside = Line(buffers + pushed, num_hidden * self.model.hidden_size * widths[0] / degree + sliced.made_keys)
            moments += (
                *(
                    MemoryMoment(activations=Line(0.0, activations), temporary=line.of_share(sliced.share).plus(beside))
                    for line in backwards
                ),
                *reduce_moments(self.model, activations, layers, share=widths[0] / degree, pushed=pushed),
            )
        if stage == scheme.num_stages - 1:
            moments += self._moments_at_loss(scheme, layers, saved, sliced)
        num_held = held_params(self.model, scheme, stage=stage)
        if scheme.weights is WeightPlacement.SHARDED and num_devices > self.cluster.devices_per_node:
            moments += (pull_moment(first.volume, self.model, num_held, degree=degree, width=widths[0]),)
        weights, gradients, optimizer = state_parts(
            self.model, num_devices=num_devices, dtype=self.dtype, num_held=num_held, on_host=self.state_on_host,
            narrow_gradients=self.narrow_gradients, gradient_shares=scheme.degree if scheme.shard_gradients else 1,
        )  # fmt: skip
        return StageMemory(weights=weights, gradients=gradients, optimizer=optimizer, moments=moments)

    def _moments_at_loss(
        self, scheme: PipelineConfig, layers: Sequence[LayerBytes], saved: float, sliced: SlicedBytes
    ) -> tuple[MemoryMoment, ...]:
        """The moments of the loss on the last stage, of which a micro-batch has ``saved`` bytes per token."""
        width = DTYPE_BYTES[self.dtype]
        losses = 0.0 if sliced.losses else loss_bytes_per_token(self.model, width) / scheme.degree
        moments = loss_moments(
            self.model,
            saved + sum(sliced.keys) + max(layer.on_host for layer in layers) * sliced.share + losses,
            degree=scheme.degree,
            is_sharded=scheme.weights is WeightPlacement.SHARDED,
            widths=(width, max(4, width)),
            logits_at_once=CPU_LOGITS_AT_ONCE if self.cluster.device.name == "cpu" else LOGITS_AT_ONCE,
        )
        return tuple(replace(moment, temporary=moment.temporary.of_share(sliced.share)) for moment in moments)


def _slowest(stages: Sequence[StageTime], length: np.ndarray) -> np.ndarray:
    """Which stage takes longest for each length."""
    slowest: np.ndarray = np.argmax([stage.times_s(length) for stage in stages], axis=0)
    return slowest
