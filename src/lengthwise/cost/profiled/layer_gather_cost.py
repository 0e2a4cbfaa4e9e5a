"""Bytes and seconds of weights that are gathered one layer at a time, of which a rank holds its share otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.core.layout import shard_size
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.links import Sent, call_s, collectives_s
from lengthwise.cost.memory_model import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class LayerGatherCost:
    """What gathering layer by layer adds to a model's micro-batches, and its state.

    Nothing is taken to be hidden behind computing, though the next layer is gathered while one computes.
    """

    unit_params: tuple[int, ...]
    """The parameters before the layers, of each layer, and after them."""
    dtype: str

    @property
    def _bytes_per_param(self) -> tuple[int, int]:
        """The bytes of a weight as it is computed with, and of a gradient or a master weight."""
        return DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype])

    def state_bytes(self, num_devices: int) -> int:
        """Bytes per device: a share of master weights, summed gradients and two moments, and two gathered units."""
        compute, master = self._bytes_per_param
        gathered = max(first + second for first, second in pairwise(self.unit_params))
        return 4 * master * shard_size(sum(self.unit_params), num_devices) + (compute + master) * gathered

    def micro_batch_s(self, cluster: ClusterSpec) -> float:
        """Seconds of a round: all weights are gathered for the forward and the backward, all gradients reduced."""
        ranks, (compute, master) = cluster.num_devices, self._bytes_per_param
        sent_params = sum(self.unit_params) * (ranks - 1) / ranks
        sent = Sent(all_gather=2 * compute * sent_params, reduce_scatter=master * sent_params)
        calls_s = 3 * len(self.unit_params) * call_s(ranks, cluster)
        return collectives_s(sent, degree=ranks, cluster=cluster) + calls_s

    def num_kept(self, free_bytes: float) -> int:
        """How many of the last layers fit whole, with their gradients, in what a step leaves free."""
        return _num_fitting(self.unit_params[1:-1], self.unit_params[-1], free_bytes / sum(self._bytes_per_param))


def _num_fitting(layers: Sequence[int], after: int, free: float) -> int:
    """How many of the last ``layers`` fit beside what comes after them."""
    number, free = 0, free - after
    for size in reversed(layers):
        if (free := free - size) < 0:
            break
        number += 1
    return number
