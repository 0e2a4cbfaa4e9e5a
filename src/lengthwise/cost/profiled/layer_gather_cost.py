"""Bytes and seconds of weights that are gathered one layer at a time, of which a rank holds its share otherwise."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lengthwise.core.layout import shard_size
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.links import Sent, collectives_s, ring_call_s
from lengthwise.cost.memory_model import DTYPE_BYTES, gradient_bytes


class Moment(StrEnum):
    """The moments of a micro-batch that may be its peak."""

    LOSS = "loss"
    LOSS_BACKWARD = "backward of the loss"
    BACKWARD = "backward of a layer"
    EMBEDDING_BACKWARD = "backward of the embedding"


@dataclass(frozen=True, kw_only=True)
class LayerGatherCost:
    """What gathering layer by layer adds to a model's micro-batches, and its state.

    Nothing is taken to be hidden behind computing, though the next layer is gathered while one computes.
    """

    unit_params: tuple[int, ...]
    """The trained parameters before the layers, of each layer, and after them."""
    unit_frozen_bytes: tuple[int, ...]
    """The bytes of the frozen parameters of each of these, which have no gradient and no state."""
    dtype: str
    state_on_host: bool = False
    """Whether master weights, summed gradients and moments are in host memory."""
    narrow_gradients: bool = False
    """Whether gradients are added up in ``dtype``, not in float32."""
    has_early_output: bool = False
    """Whether parameters after the layers are used before the last of them too, so that every stage needs them."""
    head_units: tuple[int, ...] = ()
    """The units whose parameters are used after the layers, such as a tied embedding; none: the last one."""

    @property
    def _bytes_per_param(self) -> tuple[int, int]:
        """The bytes of a weight as it is computed with, and of a gradient."""
        return DTYPE_BYTES[self.dtype], gradient_bytes(self.dtype, is_narrow=self.narrow_gradients)

    @property
    def _unit_bytes(self) -> list[int]:
        """The bytes of each unit while it is gathered in a backward: weights and gradients."""
        return [
            sum(self._bytes_per_param) * params + frozen
            for params, frozen in zip(self.unit_params, self.unit_frozen_bytes, strict=True)
        ]

    def state_bytes(self, num_devices: int) -> int:
        """Bytes per device at the moment at which most is held."""
        return max(map(sum, self.state_parts(num_devices).values()))

    def state_parts(self, num_devices: int, *, num_kept: int = 0) -> dict[Moment, tuple[int, int, int]]:
        """Bytes per device of weights, gradients, and shares of master weights, summed gradients and two moments.

        In the loss a rank has what comes after the layers; in its backward also its gradients and the last layer, which
        is on its way; in the backward of a layer (or of the embedding) that one and the next, its gradients, and those
        of the unit before it that are being summed. The last ``num_kept`` layers and what comes after them are there
        all the time. Weights include a share of frozen ones.
        """
        end = len(self.unit_params)
        whole_units = frozenset(range(end - num_kept - 1, end) if num_kept else ())
        head = frozenset(self.head_units or (end - 1,)) - whole_units
        layers = [unit for unit in range(1, end - 1) if unit not in whole_units]
        last = frozenset(layers[-1:])
        of_layers = []
        for unit in layers:
            sent = head if unit in last else {unit + 1}
            of_layers.append(self._held(whole_units | {unit, unit - 1}, whole_units | {unit}, sent, num_devices))
        return {
            Moment.LOSS: self._held(whole_units | head, whole_units, (), num_devices),
            Moment.LOSS_BACKWARD: self._held(whole_units | head | last, whole_units | head, (), num_devices),
            Moment.EMBEDDING_BACKWARD: self._held(whole_units | {0}, whole_units | {0}, {1} - whole_units, num_devices),
            Moment.BACKWARD: max(of_layers or [self._held(whole_units, whole_units, (), num_devices)], key=sum),
        }

    def _held(
        self, gathered: Iterable[int], with_gradient: Iterable[int], sent: Iterable[int], num_devices: int
    ) -> tuple[int, int, int]:
        """The parts of a state with these units; ``sent``: those whose gradients are on their way to their owners."""
        compute, gradient = self._bytes_per_param
        frozen = sum(self.unit_frozen_bytes[unit] for unit in gathered)
        weights = compute * sum(self.unit_params[unit] for unit in gathered)
        gradients = gradient * sum(self.unit_params[unit] for unit in with_gradient)
        for unit in sent:
            gradients += gradient * (self.unit_params[unit] + shard_size(self.unit_params[unit], num_devices))
        shares = shard_size(sum(self.unit_frozen_bytes), num_devices)
        return weights + frozen + shares, gradients, self._master_bytes(num_devices)

    def stage_bytes(self, num_devices: int, layers: range) -> int:
        """Bytes per device of a stage: the shares, and what it gathers for a whole step: its layers and what is outside
        of layers and used by it.
        """
        return sum(self.stage_parts(num_devices, layers))

    def _master_bytes(self, num_devices: int) -> int:
        """Bytes per device of the shares of master weights, summed gradients and two moments."""
        per_param = 3 * max(4, DTYPE_BYTES[self.dtype]) + self._bytes_per_param[1]
        return 0 if self.state_on_host else per_param * shard_size(sum(self.unit_params), num_devices)

    def stage_parts(self, num_devices: int, layers: range) -> tuple[int, int, int]:
        """Bytes per device of a stage: weights, gradients, and shares of master weights and what belongs to them."""
        compute, gradient = self._bytes_per_param
        last = len(self.unit_params) - 1
        units = [0, *(layer + 1 for layer in layers)]
        if layers.stop + 1 == last or self.has_early_output:
            units.append(last)
        params, frozen = (sum(sizes[unit] for unit in units) for sizes in (self.unit_params, self.unit_frozen_bytes))
        frozen += shard_size(sum(self.unit_frozen_bytes), num_devices)
        return compute * params + frozen, gradient * params, self._master_bytes(num_devices)

    def micro_batch_s(self, cluster: ClusterSpec) -> float:
        """Seconds of a round: all weights are gathered for the forward and the backward, all gradients reduced."""
        ranks, (compute, gradient) = cluster.num_devices, self._bytes_per_param
        params, others = sum(self.unit_params), (ranks - 1) / ranks
        gathered = compute * params + sum(self.unit_frozen_bytes)
        sent = Sent(all_gather=2 * gathered * others, reduce_scatter=gradient * params * others)
        num_calls = 3 * len(self.unit_params) + 2 * sum(map(bool, self.unit_frozen_bytes))
        return collectives_s(sent, degree=ranks, cluster=cluster) + num_calls * ring_call_s(ranks, cluster)

    def num_kept_in(self, memory_bytes: float, plan: StepPlan) -> int:
        """How many of the last layers fit whole beside the micro-batches of a plan."""
        peaks = (planned.peak_bytes for pipeline in plan.pipelines for planned in pipeline.micro_batches)
        return self.num_kept(memory_bytes - max(peaks, default=0))

    def num_kept(self, free_bytes: float) -> int:
        """How many of the last layers fit whole, with their gradients, in what a step leaves free."""
        _, *layers, after = self._unit_bytes
        return _num_fitting(layers, after, free_bytes)


def _num_fitting(layers: Sequence[int], after: int, free: float) -> int:
    """How many of the last ``layers`` fit beside what comes after them, all in bytes."""
    number, free = 0, free - after
    for size in reversed(layers):
        if (free := free - size) < 0:
            break
        number += 1
    return number
