"""What it costs to reduce the gradients of every micro-batch to shares, where a scheme shards them over its stages.

Each of the p ranks of a stage sends (p - 1) / p of the gradients of the weights that it holds, in the dtype in which
they are added up, in one reduce-scatter a unit. A unit's runs beneath the backward of the layers before it; the input
and the first layer, or a later stage's first two layers, are waited for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.parameter_shapes import stage_unit_sizes, unit_size
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.links import collective_bytes_per_s, ring_call_s
from lengthwise.cost.memory_model import gradient_bytes


@dataclass(frozen=True, kw_only=True)
class ReductionTime:
    """Seconds of the reduce-scatters of one micro-batch on the stage where they take longest."""

    whole_s: float
    """If nothing ran beneath them."""
    last_s: float
    """Of these, what is waited for after the backward."""
    slowdown: float
    """Seconds by which a second of them beneath a backward makes it longer, from 0 to 1."""

    @property
    def least_s(self) -> float:
        """Seconds that are exposed however long the backward is."""
        return self.whole_s - (1.0 - self.slowdown) * (self.whole_s - self.last_s)

    def late_s(self, cover_s: float) -> float:
        """Seconds that are exposed beyond :attr:`least_s` where the backward computes for ``cover_s``."""
        return (1.0 - self.slowdown) * max(0.0, self.whole_s - self.last_s - cover_s)

    def each_late_s(self, covers_s: np.ndarray) -> np.ndarray:
        """:meth:`late_s` of several micro-batches."""
        return (1.0 - self.slowdown) * np.maximum(0.0, self.whole_s - self.last_s - covers_s)


def whole_units(model: ModelSpec, scheme: PipelineConfig, stage: int) -> tuple[float, float, float]:
    """Whole gradients that a rank of ``stage`` has where it keeps shares of the others: of the unit whose backward runs
    and, with its share, of the one after it, which is being reduced. In the backward of the last layer; in that of a
    layer before it, and of the first one, until both are being reduced. Else 0.
    """
    if not scheme.shard_gradients:
        return 0.0, 0.0, 0.0
    return whole_units_of(stage_unit_sizes(model, scheme, stage), unit_size(model, "layer"), scheme, stage)


def whole_units_of(sizes: Sequence[int], layer: int, scheme: PipelineConfig, stage: int) -> tuple[float, float, float]:
    """:func:`whole_units` of units of these sizes, the largest layer of size ``layer``."""
    with_shares, has_output = 1 + 1 / scheme.degree, stage == scheme.num_stages - 1
    before = with_shares * 2 * layer if scheme.stage_layers[stage] > 1 else 0.0
    return layer + has_output * with_shares * sizes[-1], before, with_shares * sum(sizes[:2])


def reduction_time(
    model: ModelSpec, scheme: PipelineConfig, *, cluster: ClusterSpec, dtype: str, narrow_gradients: bool
) -> ReductionTime | None:
    """The seconds of the reduce-scatters of a micro-batch under ``scheme``; None where it keeps whole gradients."""
    if not scheme.shard_gradients:
        return None
    rate, call_s = collective_bytes_per_s(scheme.degree, cluster), ring_call_s(scheme.degree, cluster)
    stages = (stage_unit_sizes(model, scheme, stage) for stage in range(scheme.num_stages))
    number_s = gradient_bytes(dtype, is_narrow=narrow_gradients) / rate
    return reduction_of(stages, scheme.degree, number_s=number_s, call_s=call_s, cluster=cluster)


def reduction_of(
    stages: Iterable[Sequence[int]], degree: int, *, number_s: float, call_s: float, cluster: ClusterSpec
) -> ReductionTime:
    """The seconds of reduce-scatters among ``degree`` ranks of units of so many numbers in each stage.

    ``number_s``: seconds to send a number; ``call_s``: of a call that sends nothing.
    """
    whole_s = last_s = 0.0
    for sizes in stages:
        seconds = [size * number_s * (degree - 1) / degree + call_s for size in sizes]
        whole_s, last_s = max(whole_s, sum(seconds)), max(last_s, sum(seconds[:2]))
    return ReductionTime(whole_s=whole_s, last_s=last_s, slowdown=cluster.device.overlap_slowdown)
