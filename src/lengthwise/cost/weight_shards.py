"""Parameter memory per rank, and the seconds to reduce-scatter gradients, update, all-gather and switch weights.

Master weights and optimizer state are fully sharded over all N ranks and never move. A rank that holds n numbers owns
about n / N of those itself; the other n (N - 1) / N come from their owners when weights are pulled, and go to them when
gradients are pushed. ``core.layout.transfers`` counts the same, slice by slice.
"""

from dataclasses import dataclass

from lengthwise.core.pipeline_config import PipelineConfig, Strategy, WeightPlacement, WeightShard
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.links import LINK_EFFICIENCY
from lengthwise.cost.memory_model import DTYPE_BYTES


def held_params(model: ModelSpec, scheme: PipelineConfig, *, stage: int) -> int:
    """Parameters on the rank of ``stage`` that holds the most.

    A stage holds its layers; the first one also the input embedding and positions, the last one the final norm and the
    head (its own copy of the embedding where both are tied and stages are several). Sharded weights are split by
    key/value head group, feed-forward column and vocabulary row; norms, positions and the biases of outputs are whole
    everywhere.
    """
    p = scheme.degree if scheme.weights is WeightPlacement.SHARDED else 1
    groups, columns, rows = (-(-size // p) for size in (model.num_kv_heads, model.ffn_columns, model.vocab_size))
    group_rows = model.qkv_size // model.num_kv_heads
    proj_rows = model.num_heads // model.num_kv_heads * model.head_size
    bias = groups * group_rows if model.qkv_bias else 0
    attention = groups * (group_rows + proj_rows) * model.hidden_size + bias
    ffn = columns * ((3 if model.gated_ffn else 2) * model.hidden_size + (1 if model.has_all_biases else 0))
    num_params = scheme.stage_layers[stage] * (attention + ffn + model.layer_whole_params)
    is_first, is_last = stage == 0, stage == scheme.num_stages - 1
    if is_first:
        num_params += rows * model.hidden_size + model.input_whole_params
    if is_last:
        num_params += model.output_whole_params + (rows if model.family == "bert" else 0)
        if not (is_first and model.tied_embeddings):
            num_params += rows * model.hidden_size
    return num_params


def largest_held_params(model: ModelSpec, scheme: PipelineConfig) -> int:
    """Parameters on the rank of any stage that holds the most."""
    return max(held_params(model, scheme, stage=stage) for stage in range(scheme.num_stages))


@dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Seconds of what happens to parameters between the micro-batches of one model on one cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    dtype: str

    @property
    def _widths(self) -> tuple[int, int]:
        return DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype])

    def update_s(self, strategy: Strategy) -> float:
        """Push gradients at master precision, update every shard, pull weights in the compute dtype, in turn.

        The optimizer reads the gradient twice (norm, update) and reads and writes master weights and both moments.
        """
        width, master = self._widths
        touched = 8 * master * self.model.num_params / strategy.num_devices
        moved_s = self.exchange_s(strategy, master) + self.exchange_s(strategy, width)
        return moved_s + touched / self.cluster.device.memory_bytes_per_s

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Push the gradients of ``before`` and pull the weights of ``after``; 0 if each rank holds the same in both."""
        if holdings(before) == holdings(after):
            return 0.0
        width, master = self._widths
        return self.exchange_s(before, master) + self.exchange_s(after, width)

    def exchange_s(self, strategy: Strategy, num_bytes: int) -> float:
        """Seconds to move what every rank holds, ``num_bytes`` a number, from its owners or to them.

        The slowest rank's (N - 1) / N of what it holds over its link, or what its node holds, each number once, from
        the other nodes over the node's ports: whichever takes longer.
        """
        cluster, device = self.cluster, self.cluster.device
        ranks, per_node = strategy.num_devices, min(strategy.num_devices, cluster.devices_per_node)
        slowest_s = 0.0
        for scheme in dict.fromkeys(strategy.schemes):
            held_bytes = largest_held_params(self.model, scheme) * num_bytes
            within_s = held_bytes * (ranks - 1) / ranks / device.link_bytes_per_s
            ports = per_node * device.network_bytes_per_s
            across_s = _num_distinct(scheme, per_node) * held_bytes * (ranks - per_node) / ranks / ports
            slowest_s = max(slowest_s, within_s, across_s)
        return slowest_s / LINK_EFFICIENCY


def holdings(strategy: Strategy) -> dict[int, WeightShard]:
    """The weights that each rank computes with."""
    return {
        rank: scheme.holding(*divmod(place, scheme.degree))
        for scheme, ranks in zip(strategy.schemes, strategy.ranks)
        for place, rank in enumerate(ranks)
    }


def _num_distinct(scheme: PipelineConfig, per_node: int) -> int:
    """How many different slices the ranks of one node hold, at most."""
    if scheme.weights is WeightPlacement.SHARDED:
        return min(scheme.num_devices, per_node)
    return min(scheme.num_stages, -(-per_node // scheme.degree))
