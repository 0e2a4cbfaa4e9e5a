"""A plan's pipeline in virtual time: stages under 1F1B, micro-batches in issue order. S stages, V micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lengthwise.core.one_f_one_b import StagePass, forwards_in, run_stages
from lengthwise.core.step_plan import Pipeline


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineRun:
    """When each stage of a pipeline computed what, in seconds from the start of the step."""

    pipeline: Pipeline
    start_s: float
    stages: tuple[tuple[StagePass, ...], ...]
    """The passes of each stage, one after another."""

    @cached_property
    def end_s(self) -> float:
        """When the last stage is done; ``start_s`` without micro-batches."""
        return max((passes[-1].end_s for passes in self.stages if passes), default=self.start_s)

    @cached_property
    def comm_shares(self) -> tuple[float, ...]:
        """[V] of each micro-batch's time, the share in communication that computation does not hide."""
        return tuple(m.comm_s / m.time_s if m.time_s else 0.0 for m in self.pipeline.micro_batches)

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """[V] what each micro-batch keeps on each stage from its forward to its backward.

        A plan's peak is that of the first stage with S micro-batches as large as this one in flight, so one of them
        keeps an S-th of what is above the model state.
        """
        state, stages = self.pipeline.state_bytes, self.pipeline.scheme.num_stages
        return tuple(max(0, m.peak_bytes - state) // stages for m in self.pipeline.micro_batches)

    def memory_of(self, stage: int) -> list[tuple[float, int]]:
        """Bytes in use on each rank of ``stage``: the time of each change and the bytes from then on."""
        num_bytes = self.pipeline.state_bytes
        bytes_at = {self.start_s: num_bytes}  # what is freed and taken at the same moment is one change
        for stage_pass in self.stages[stage]:
            kept_bytes = self.kept_bytes[stage_pass.micro_batch]
            num_bytes += -kept_bytes if stage_pass.is_backward else kept_bytes
            bytes_at[stage_pass.end_s if stage_pass.is_backward else stage_pass.start_s] = num_bytes
        samples = list(bytes_at.items())
        return samples[:1] + [after for before, after in pairwise(samples) if after[1] != before[1]]


def forwards_s(pipeline: Pipeline) -> list[float]:
    """[V] seconds of each forward on one stage."""
    return [m.time_s / forwards_in(pipeline.recompute_of(m)) for m in pipeline.micro_batches]


def run_pipeline(
    pipeline: Pipeline, slowdowns: Sequence[Sequence[float]], *, start_s: float = 0.0, transfer_s: float = 0.0
) -> PipelineRun:
    """Execute a pipeline.

    Args:
        pipeline: its micro-batches run in the order they have.
        slowdowns: [S][V] how many times longer than predicted each stage takes.
        start_s: when the first forward starts.
        transfer_s: from the end of a pass until the neighbouring stage has its result.
    """
    forwards = forwards_s(pipeline)
    backwards = [m.time_s - f for m, f in zip(pipeline.micro_batches, forwards)]
    times = [
        ([f * k for f, k in zip(forwards, factors)], [b * k for b, k in zip(backwards, factors)])
        for factors in slowdowns
    ]
    return PipelineRun(pipeline=pipeline, start_s=start_s, stages=run_stages(times, start_s, transfer_s))
