"""Parameter memory per rank, and the seconds to reduce-scatter gradients, update, all-gather and switch weights.

Master weights and optimizer state are fully sharded over all N ranks and never move. What a rank computes with comes
from its owners when weights are pulled, and goes to them when gradients are pushed: :mod:`.port_traffic` counts it.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lengthwise.core.layout import shard_size
from lengthwise.core.one_f_one_b import UpdateParts
from lengthwise.core.pipeline_config import PipelineConfig, Strategy, WeightPlacement, homogeneous
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.links import LINK_EFFICIENCY, host_copy_bytes_per_s
from lengthwise.cost.memory_model import DTYPE_BYTES, gradient_bytes, largest_unit
from lengthwise.cost.port_traffic import hold_the_same, port_traffic


def held_params(model: ModelSpec, scheme: PipelineConfig, *, stage: int) -> int:
    """Parameters on the rank of ``stage`` that holds the most.

    A stage holds its layers; the first one also the input embedding and positions, the last one the final norm and the
    head (its own copy of the embedding where both are tied and stages are several). Sharded weights are split by
    key/value head group, feed-forward column and vocabulary row; norms, positions and the biases of outputs are whole
    everywhere.
    """
    shards = scheme.degree if scheme.weights is WeightPlacement.SHARDED else 1
    return _held_params(model, scheme.stage_layers[stage], shards, stage == 0, stage == scheme.num_stages - 1)


@lru_cache(maxsize=1024)
def _held_params(model: ModelSpec, num_layers: int, shards: int, is_first: bool, is_last: bool) -> int:
    """:func:`held_params` of a stage of so many layers, each split among ``shards`` ranks."""
    groups, columns, rows = (-(-size // shards) for size in (model.num_kv_heads, model.ffn_columns, model.vocab_size))
    group_rows = model.qkv_size // model.num_kv_heads
    proj_rows = model.num_heads // model.num_kv_heads * model.head_size
    bias = groups * group_rows if model.qkv_bias else 0
    attention = groups * (group_rows + proj_rows) * model.hidden_size + bias
    ffn = columns * ((3 if model.gated_ffn else 2) * model.hidden_size + (1 if model.has_all_biases else 0))
    num_params = num_layers * (attention + ffn + model.layer_whole_params)
    if is_first:
        num_params += rows * model.hidden_size + model.input_whole_params
    if is_last:
        num_params += model.output_whole_params + (rows if model.family == "bert" else 0)
        if not (is_first and model.tied_embeddings):
            num_params += rows * model.hidden_size
    return num_params


def pushed_params(model: ModelSpec, scheme: PipelineConfig, *, stage: int, num_devices: int) -> int:
    """Gradients that come to a rank of ``stage`` in pushes that may be under way in its first layer's backward.

    A rank gets as many as ranks have on average, but where all hold all of a unit they come added up. Of those of its
    own stage, two layers' are under way: one is pushed while the next one's become final.
    """
    if num_devices == 1:
        return 0
    of_stages = [held_params(model, scheme, stage=other) for other in range(scheme.num_stages)]
    layers = scheme.stage_layers
    own_layer = of_stages[stage] // layers[stage]
    later = sum(of_stages[stage + 1 :]) + min(of_stages[stage] - own_layer, 2 * own_layer)
    if scheme.shard_gradients:
        return later // scheme.num_devices
    is_whole = scheme.num_stages == 1 and (scheme.weights is WeightPlacement.WHOLE or scheme.degree == 1)
    return later // (num_devices if is_whole else scheme.num_stages)


def arriving_params(model: ModelSpec, scheme: PipelineConfig, *, num_devices: int) -> int:
    """Gradients that a rank gets of the largest unit, which is pushed beneath the backward of another."""
    return 0 if num_devices == 1 or scheme.shard_gradients else shard_size(largest_unit(model), num_devices)


def largest_held_params(model: ModelSpec, scheme: PipelineConfig) -> int:
    """Parameters on the rank of any stage that holds the most."""
    return max(held_params(model, scheme, stage=stage) for stage in range(scheme.num_stages))


@dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Seconds of what happens to parameters between the micro-batches of one model on one cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    dtype: str
    state_on_host: bool = False
    """Whether master weights and optimizer state are in host memory, and are updated there."""
    narrow_gradients: bool = False
    """Whether gradients are pushed in the compute dtype, not at master precision."""

    @property
    def _widths(self) -> tuple[int, int]:
        """Bytes of a weight as it is pulled and of a gradient as it is pushed."""
        return DTYPE_BYTES[self.dtype], gradient_bytes(self.dtype, is_narrow=self.narrow_gradients)

    def update_s(self, strategy: Strategy) -> float:
        """Push gradients, update every shard, pull weights in the compute dtype, in turn."""
        return self.update_parts(strategy).whole_s

    def update_parts(self, strategy: Strategy) -> UpdateParts:
        """Seconds of pushing gradients, of updating every shard and of pulling weights in the compute dtype.

        The optimizer reads the gradient twice (norm, update) and reads and writes master weights and both moments.
        Where these are on the host, gradients go there and weights come back, and it is the host's memory it reads.
        Never less than under equal pipelines of one of the schemes: what :class:`~lengthwise.core.cost.CostModel`
        promises, and mixtures that overlap better with what ranks own would break by a few per cent.
        """
        width, gradient = self._widths
        num_devices = strategy.num_devices
        equal_s = [
            self._equal_exchange_s(scheme, num_devices, num_idle)
            for scheme in strategy.distinct_schemes
            for num_idle in {0, strategy.num_idle}
            if (num_devices - num_idle) % scheme.num_devices == 0
        ]
        exchanges_s = equal_s if strategy.is_homogeneous else [self._exchanges_s(strategy), *equal_s]
        pull_s, first_pull_s, push_s, first_push_s = (max(seconds) for seconds in zip(*exchanges_s))
        touched = (2 * gradient + 6 * gradient_bytes(self.dtype)) * self.model.num_params / num_devices
        if self.state_on_host:
            host_s = touched / (LINK_EFFICIENCY * self.cluster.device.host_memory_bytes_per_s)
            rest_s = self._host_copy_s(num_devices, gradient + width) + host_s
        else:
            rest_s = touched / self.cluster.device.memory_bytes_per_s
        return UpdateParts(
            pull_s=pull_s * width, push_s=push_s * gradient, first_pull_s=first_pull_s * width,
            last_push_s=first_push_s * gradient, rest_s=rest_s, slowdown=self.cluster.device.overlap_slowdown,
        )  # fmt: skip

    def _host_copy_s(self, num_devices: int, num_bytes: int) -> float:
        """Seconds to copy each device's share of the parameters to or from the host, ``num_bytes`` a number."""
        return num_bytes * self.model.num_params / num_devices / host_copy_bytes_per_s(self.cluster)

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Push the gradients of ``before`` and pull the weights of ``after``; 0 if each rank holds the same in both.

        Where gradients alone are kept otherwise, they are pushed.
        """
        has_weights = hold_the_same(before, after)
        if has_weights and hold_the_same(before, after, of_gradients=True):
            return 0.0
        width, gradient = self._widths
        width = 0 if has_weights else width
        copied_s = self._host_copy_s(after.num_devices, gradient + width) if self.state_on_host else 0.0
        pulled_s = self.exchange_s(after, width) if width else 0.0
        return self.exchange_s(before, gradient, of_gradients=True) + pulled_s + copied_s

    @cached_property
    def _equal_s(self) -> dict[tuple[object, ...], tuple[float, ...]]:
        return {}

    def _equal_exchange_s(self, scheme: PipelineConfig, num_devices: int, num_idle: int) -> tuple[float, ...]:
        """Seconds of :meth:`_exchanges_s` under equal pipelines; the same for all schemes of one family."""
        key = (scheme.degree, scheme.stage_layers, scheme.weights, scheme.shard_gradients, num_devices, num_idle)
        if key not in self._equal_s:
            self._equal_s[key] = self._exchanges_s(homogeneous(scheme, num_devices, num_idle=num_idle))
        return self._equal_s[key]

    def _exchanges_s(self, strategy: Strategy) -> tuple[float, ...]:
        """Seconds to pull all that ranks compute with, a byte a number; the input and the first layer of it; and to
        push gradients, and of these the same.
        """
        pull_s = tuple(self.exchange_s(strategy, 1, is_first=is_first) for is_first in (False, True))
        if not any(scheme.shard_gradients for scheme in strategy.distinct_schemes):
            return *pull_s, *pull_s
        push_s = (self.exchange_s(strategy, 1, is_first=is_first, of_gradients=True) for is_first in (False, True))
        return *pull_s, *push_s

    def exchange_s(
        self, strategy: Strategy, num_bytes: int, *, of_gradients: bool = False, is_first: bool = False
    ) -> float:
        """Seconds to move what every rank computes with, ``num_bytes`` a number, from its owners or to them.

        The busiest port between nodes or the busiest link within them, whichever takes longer: while one layer is
        spread within nodes, the next one crosses between them. ``of_gradients``: to move what ranks keep of gradients;
        ``is_first``: to move the input and the first layer.
        """
        traffic = port_traffic(
            self.model, strategy, ranks_per_node=self.cluster.devices_per_node, of_gradients=of_gradients,
            is_first=is_first,
        )  # fmt: skip
        device = self.cluster.device
        across_s = traffic.busiest_across / device.network_bytes_per_s
        within_s = traffic.busiest_within / device.link_bytes_per_s
        return max(across_s, within_s) / LINK_EFFICIENCY * num_bytes
