"""Gradients of a model of which only the units' sizes are known, where the ranks of a stage reduce them to shares."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.layer_profile import LinkRow
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.gradient_reduction import ReductionTime, reduction_of, whole_units_of
from lengthwise.cost.links import call_s, hop_bytes_per_s


@dataclass(frozen=True)
class UnitGradients:
    """Bytes and seconds of the gradients of each unit."""

    unit_params: tuple[int, ...]
    """The trained parameters before the layers, of each layer, and after them; empty: not known."""
    number_bytes: int
    """Bytes of a number of them."""

    def _of_stage(self, scheme: PipelineConfig, stage: int) -> tuple[int, ...]:
        """Parameters of each unit whose gradients a stage makes."""
        layers, is_last = scheme.layers_of_stage(stage), stage == scheme.num_stages - 1
        return self.unit_params[layers.start + (stage > 0) : layers.stop + 1 + is_last]

    def whole_bytes(self, scheme: PipelineConfig, stage: int) -> int:
        """Bytes of gradients that are whole, or on their way, in a backward that reduces them; else 0."""
        if not scheme.shard_gradients:
            return 0
        sizes, layer = self._of_stage(scheme, stage), max(self.unit_params[1:-1])
        return int(self.number_bytes * max(whole_units_of(sizes, layer, scheme, stage)))

    def reduction(
        self, scheme: PipelineConfig, *, links: Sequence[LinkRow], cluster: ClusterSpec
    ) -> ReductionTime | None:
        """Seconds of a micro-batch in reducing gradients to shares; None where whole ones are kept."""
        if not scheme.shard_gradients:
            return None
        bytes_per_s, latency_s = link_among(scheme.degree, links, cluster)
        stages = [self._of_stage(scheme, stage) for stage in range(scheme.num_stages)]
        number_s = self.number_bytes / bytes_per_s
        return reduction_of(stages, scheme.degree, number_s=number_s, call_s=latency_s, cluster=cluster)


def link_among(ranks: int, links: Sequence[LinkRow], cluster: ClusterSpec) -> tuple[float, float]:
    """Bytes per second that each of some ranks sends, and seconds of a call: as measured, or of the cluster."""
    measured = [link for link in links if link.degree >= ranks] or links[-1:]
    if measured:
        return measured[0].bytes_per_s, measured[0].latency_s
    return hop_bytes_per_s(ranks, cluster), call_s(ranks, cluster)
