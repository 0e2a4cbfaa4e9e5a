"""A second executor of the same plan: virtual time instead of tensors, the same Timeline out."""

from lengthwise.core.errors import InputError
from lengthwise.core.plan import StepPlan
from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline


def simulate(plan: StepPlan) -> Timeline:
    """Run every pipeline's micro-batches one after another, wait for the slowest, then update together.

    Raises:
        InputError: a pipeline has several stages, which this version does not simulate.
    """
    spans: list[Span] = []
    memory: list[MemorySample] = []
    ends_s = {}
    for pipeline in plan.pipelines:
        if pipeline.scheme.num_stages > 1:
            raise InputError(f"pipelines of {pipeline.scheme.num_stages} stages are not simulated yet")
        for rank in pipeline.ranks:
            now_s = 0.0
            for number, micro_batch in enumerate(pipeline.micro_batches):
                end_s = now_s + micro_batch.time_s
                spans.append(_span(now_s, end_s, rank, SpanKind.COMPUTE, f"micro-batch {number}"))
                memory.append(MemorySample(time_s=now_s, rank=rank, num_bytes=micro_batch.peak_bytes))
                now_s = end_s
            ends_s[rank] = now_s
    meet_s = max(ends_s.values())
    for rank, end_s in ends_s.items():
        if end_s < meet_s:
            spans.append(_span(end_s, meet_s, rank, SpanKind.WAIT, "wait"))
        spans.append(_span(meet_s, meet_s + plan.update_s, rank, SpanKind.UPDATE, "update"))
    return Timeline(
        step=plan.step, num_ranks=plan.num_devices, spans=tuple(sorted(spans)), memory=tuple(sorted(memory))
    )


def _span(start_s: float, end_s: float, rank: int, kind: SpanKind, name: str) -> Span:
    return Span(start_s=start_s, end_s=end_s, rank=rank, kind=kind, name=name)
