"""Bytes and seconds of weights that are gathered one layer at a time, of which a rank holds its share otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.core.layout import shard_size
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.links import Sent, call_s, collectives_s
from lengthwise.cost.memory_model import DTYPE_BYTES


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
    has_early_output: bool = False
    """Whether parameters after the layers are used before the last of them too, so that every stage needs them."""

    @property
    def _bytes_per_param(self) -> tuple[int, int]:
        """The bytes of a weight as it is computed with, and of a gradient or a master weight."""
        return DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype])

    @property
    def _unit_bytes(self) -> list[int]:
        """The bytes of each unit while it is gathered in a backward: weights and gradients."""
        return [
            sum(self._bytes_per_param) * params + frozen
            for params, frozen in zip(self.unit_params, self.unit_frozen_bytes, strict=True)
        ]

    def state_bytes(self, num_devices: int) -> int:
        """Bytes per device: the sum of :meth:`state_parts`."""
        return sum(self.state_parts(num_devices))

    def state_parts(self, num_devices: int, *, num_kept: int = 0) -> tuple[int, int, int]:
        """Bytes per device of weights, gradients, and shares of master weights, summed gradients and two moments.

        Weights and gradients are those of two gathered units, and of the last ``num_kept`` layers and what comes after
        them; weights also a share of frozen ones.
        """
        compute, master = self._bytes_per_param
        first_kept = len(self.unit_params) - num_kept - 1 if num_kept else len(self.unit_params)
        pairs = list(pairwise(zip(self.unit_params, self.unit_frozen_bytes)))[: max(1, first_kept - 1)]
        gathered, frozen = max(
            ((first[0] + second[0], first[1] + second[1]) for first, second in pairs),
            key=lambda sizes: (compute + master) * sizes[0] + sizes[1],
        )
        gathered += sum(self.unit_params[first_kept:])
        frozen += sum(self.unit_frozen_bytes[first_kept:]) + shard_size(sum(self.unit_frozen_bytes), num_devices)
        shares = self._master_bytes(num_devices)
        return compute * gathered + frozen, master * gathered, shares

    def stage_bytes(self, num_devices: int, layers: range) -> int:
        """Bytes per device of a stage: the shares, and what it gathers for a whole step: its layers and what is outside
        of layers and used by it.
        """
        return sum(self.stage_parts(num_devices, layers))

    def _master_bytes(self, num_devices: int) -> int:
        """Bytes per device of the shares of master weights, summed gradients and two moments."""
        _, master = self._bytes_per_param
        return 0 if self.state_on_host else 4 * master * shard_size(sum(self.unit_params), num_devices)

    def stage_parts(self, num_devices: int, layers: range) -> tuple[int, int, int]:
        """Bytes per device of a stage: weights, gradients, and shares of master weights and what belongs to them."""
        compute, master = self._bytes_per_param
        last = len(self.unit_params) - 1
        units = [0, *(layer + 1 for layer in layers)]
        if layers.stop + 1 == last or self.has_early_output:
            units.append(last)
        params, frozen = (sum(sizes[unit] for unit in units) for sizes in (self.unit_params, self.unit_frozen_bytes))
        frozen += shard_size(sum(self.unit_frozen_bytes), num_devices)
        return compute * params + frozen, master * params, self._master_bytes(num_devices)

    def micro_batch_s(self, cluster: ClusterSpec) -> float:
        """Seconds of a round: all weights are gathered for the forward and the backward, all gradients reduced."""
        ranks, (compute, master) = cluster.num_devices, self._bytes_per_param
        params, others = sum(self.unit_params), (ranks - 1) / ranks
        gathered = compute * params + sum(self.unit_frozen_bytes)
        sent = Sent(all_gather=2 * gathered * others, reduce_scatter=master * params * others)
        num_calls = 3 * len(self.unit_params) + 2 * sum(map(bool, self.unit_frozen_bytes))
        return collectives_s(sent, degree=ranks, cluster=cluster) + num_calls * call_s(ranks, cluster)

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
