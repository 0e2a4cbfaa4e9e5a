"""A plan's pipeline in virtual time: what its stages run when. S stages, V micro-batches in issue order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lengthwise.core.one_f_one_b import PassTimes, StagePass, run_stages
from lengthwise.core.pass_order import PassKind
from lengthwise.core.step_plan import Pipeline
from lengthwise.core.zero_bubble import pass_orders, pass_times, stage_times


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

    def comm_share(self, stage: int, stage_pass: StagePass) -> float:
        """Share of a pass in communication: none of a weight pass, whose products need nothing of other ranks.

        That of the whole backward is in the part that sends a gradient on.
        """
        number = stage_pass.micro_batch
        if stage_pass.kind is PassKind.WEIGHTS:
            return 0.0
        whole_s, weights_s = (self._predicted[kind][number] for kind in (PassKind.BACKWARD, PassKind.WEIGHTS))
        if stage_pass.kind is PassKind.FORWARD or not stage or whole_s <= weights_s:
            return self.comm_shares[number]
        return min(1.0, self.comm_shares[number] * whole_s / (whole_s - weights_s))

    @cached_property
    def _predicted(self) -> PassTimes:
        return pass_times(self.pipeline)

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """[V] what each micro-batch keeps on each stage from its forward until all of its backward is done.

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
            number, is_forward = stage_pass.micro_batch, stage_pass.kind is PassKind.FORWARD
            if stage_pass.kind is PassKind.BACKWARD and stage and self._predicted.weights_s[number] > 0:
                continue  # inputs of products and their outputs' gradients are as many numbers as the forward kept
            num_bytes += self.kept_bytes[number] if is_forward else -self.kept_bytes[number]
            bytes_at[stage_pass.start_s if is_forward else stage_pass.end_s] = num_bytes
        samples = list(bytes_at.items())
        return samples[:1] + [after for before, after in pairwise(samples) if after[1] != before[1]]


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
    predicted = pass_times(pipeline)
    slowed = [PassTimes(*([t * k for t, k in zip(times_s, factors)] for times_s in predicted)) for factors in slowdowns]
    times = [stage_times(of_stage, stage) for stage, of_stage in enumerate(slowed)]
    stages = run_stages(times, start_s, transfer_s, orders=pass_orders(pipeline))
    return PipelineRun(pipeline=pipeline, start_s=start_s, stages=stages)
