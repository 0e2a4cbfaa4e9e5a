"""Which forwards of a step whose loss couples sequences keep what their backward needs, until all forwards are done.

The backward of such a step begins when values of all sequences are known. Where what all forwards keep fits a device,
none is computed twice; where it does not, those that save the most time for their bytes keep it, and the others are
computed once without gradients and once more with.
"""

from lengthwise.core.step_plan import StepPlan

MicroBatchNumber = tuple[int, int]
"""The numbers of a pipeline and of a micro-batch in it."""


def kept_forwards(plan: StepPlan, memory_bytes: int) -> frozenset[MicroBatchNumber]:
    """The micro-batches whose forwards keep what the backward needs, the same on every rank; none with stages.

    ``memory_bytes``: what a device has, weights and gradients included.
    """
    if any(pipeline.scheme.num_stages > 1 and pipeline.micro_batches for pipeline in plan.pipelines):
        return frozenset()
    ranks_of, bytes_of, worth = dict[MicroBatchNumber, tuple[int, ...]](), dict[MicroBatchNumber, int](), []
    available = [memory_bytes] * plan.num_devices
    for number, pipeline in enumerate(plan.pipelines):
        for rank in pipeline.ranks:
            available[rank] = min(available[rank], memory_bytes - pipeline.state_bytes)
        for index, planned in enumerate(pipeline.micro_batches):
            key, kept_bytes = (number, index), max(0, planned.peak_bytes - pipeline.state_bytes)
            ranks_of[key], bytes_of[key] = pipeline.ranks, kept_bytes
            worth.append((-planned.time_s / max(1, kept_bytes), key))
    by_rank: list[list[int]] = [[] for _ in range(plan.num_devices)]
    for key, ranks in ranks_of.items():
        for rank in ranks:
            by_rank[rank].append(bytes_of[key])
    if all(sum(sizes) <= room for sizes, room in zip(by_rank, available)):
        return frozenset(ranks_of)
    room = [total - max(sizes, default=0) for total, sizes in zip(available, by_rank)]  # a forward that keeps nothing
    kept_numbers = set[MicroBatchNumber]()
    for _, key in sorted(worth):
        if all(room[rank] >= bytes_of[key] for rank in ranks_of[key]):
            kept_numbers.add(key)
            for rank in ranks_of[key]:
                room[rank] -= bytes_of[key]
    return frozenset(kept_numbers)
