"""Lower bounds: times that no plan for a batch can beat under the same cost model."""

import numpy as np

from lengthwise.plan.solve.makespan import makespan_bound


def dense_lower_bound_s(times_s: np.ndarray, overhead_s: float, *, num_devices: int, min_micro_batches: int) -> float:
    """Seconds that a step's micro-batches take at least on dense pipelines, one per device.

    Every device that works pays the overhead at least once, so the sequences alone must fit in what is left of the
    step: the makespan bound of the sequence times, plus one overhead. Memory forces a number of micro-batches on the
    cluster, whose overheads spread over the devices at best.

    Args:
        times_s: seconds that each sequence adds to a micro-batch.
        overhead_s: seconds of a micro-batch before its first token.
        num_devices: devices of the cluster.
        min_micro_batches: tokens of the batch over the most tokens of a micro-batch, rounded up.
    """
    spread_s = (float(times_s.sum()) + min_micro_batches * overhead_s) / num_devices
    return max(makespan_bound(times_s.tolist(), num_devices) + overhead_s, spread_s)
