"""Cost from arithmetic alone: FLOPs over speed, bytes over bandwidth. For planning without a device at hand."""

import numpy as np

from lengthwise.core.scheme import Scheme, Strategy
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.memory import DTYPE_BYTES, kept_bytes_per_token
from lengthwise.cost.separable import SeparableCost, check_dense

EFFICIENCY = 0.5
"""Share of the peak rate that matrix products and fused attention reach together; profiles replace it."""
LAUNCH_S = 2e-4
"""Seconds per layer and micro-batch that do not depend on its tokens: some forty kernel launches."""


class AnalyticCost(SeparableCost):
    """Times from exact FLOPs per sequence at a fixed share of the device's peak rate."""

    def __init__(self, *, model: ModelSpec, cluster: ClusterSpec, dtype: str = "bfloat16") -> None:
        super().__init__(model=model, cluster=cluster, dtype=dtype)

    def sequence_times_s(self, lengths: np.ndarray, scheme: Scheme) -> np.ndarray:
        """FLOPs of forward and backward, one forward more for recomputed layers, over the rate reached."""
        check_dense(scheme)
        recomputed = 1.0 + sum(scheme.recompute) / scheme.num_layers / 3.0
        return self.model.train_flops(lengths) * recomputed / (EFFICIENCY * self.cluster.device.flops_per_s)

    def overhead_s(self, scheme: Scheme) -> float:
        """Launches of every layer."""
        check_dense(scheme)
        return LAUNCH_S * scheme.num_layers

    def update_s(self, strategy: Strategy) -> float:
        """Reduce-scatter of gradients, optimizer over its shard, all-gather of weights, one after the other."""
        width, master = DTYPE_BYTES[self.dtype], max(4, DTYPE_BYTES[self.dtype])
        device, params, ranks = self.cluster.device, self.model.num_params, strategy.num_devices
        one_node = ranks <= self.cluster.devices_per_node
        link = device.link_bytes_per_s if one_node else device.network_bytes_per_s
        moved = params * (ranks - 1) / ranks * (master + width)
        touched = 8 * master * params / ranks  # gradient read twice; master and both moments read and written
        return moved / link + touched / device.memory_bytes_per_s

    def _activation_bytes(self, scheme: Scheme) -> tuple[float, float]:
        check_dense(scheme)
        recompute = all(scheme.recompute)
        return 0.0, kept_bytes_per_token(self.model, dtype=self.dtype, recompute=recompute)
