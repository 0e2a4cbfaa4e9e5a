"""A plan's pipeline in virtual time: what its stages run when.

S stages, N slices in issue order: the micro-batches, and the parts of those that are cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lengthwise.core.one_f_one_b import PassTimes, StagePass, run_stages
from lengthwise.core.pass_order import PassKind
from lengthwise.core.sliced_passes import Slice, slices_of
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
    def slices(self) -> tuple[Slice, ...]:
        """[N] what passes compute, by their numbers: micro-batches, or slices of those that are cut."""
        return slices_of(self.pipeline)

    @cached_property
    def comm_shares(self) -> tuple[float, ...]:
        """[N] of each slice's time, the share in communication that computation does not hide."""
        shares = [m.comm_s / m.time_s if m.time_s else 0.0 for m in self.pipeline.micro_batches]
        return tuple(shares[part.micro_batch] for part in self.slices)

    def comm_share(self, stage: int, stage_pass: StagePass) -> float:
        """Share of a pass in communication: none of a weight pass, whose products need nothing of other ranks.

        That of the whole backward is in the part that sends a gradient on.
        """
        number = stage_pass.number
        if stage_pass.kind is PassKind.WEIGHTS:
            return 0.0
        whole_s, weights_s = (self._predicted[kind][number] for kind in (PassKind.BACKWARD, PassKind.WEIGHTS))
        if stage_pass.kind is PassKind.FORWARD or not stage or whole_s <= weights_s:
            return self.comm_shares[number]
        return min(1.0, self.comm_shares[number] * whole_s / (whole_s - weights_s))

    @cached_property
    def _predicted(self) -> PassTimes:
        return pass_times(self.pipeline)

    def memory_of(self, stage: int) -> list[tuple[float, int]]:
        """Bytes in use on each rank of ``stage``: the time of each change and the bytes from then on."""
        num_bytes = self.pipeline.state_bytes
        bytes_at = {self.start_s: num_bytes}  # what is freed and taken at the same moment is one change
        for stage_pass in self.stages[stage]:
            number, is_forward = stage_pass.number, stage_pass.kind is PassKind.FORWARD
            if stage_pass.kind is PassKind.BACKWARD and stage and self._predicted.weights_s[number] > 0:
                continue  # inputs of products and their outputs' gradients are as many numbers as the forward kept
            kept_bytes = self.slices[number].kept_bytes
            num_bytes += kept_bytes if is_forward else -kept_bytes
            bytes_at[stage_pass.start_s if is_forward else stage_pass.end_s] = num_bytes
        samples = list(bytes_at.items())
        return samples[:1] + [after for before, after in pairwise(samples) if after[1] != before[1]]


def run_pipeline(
    pipeline: Pipeline, slowdowns: Sequence[Sequence[float]], *, start_s: float = 0.0, transfer_s: float = 0.0
) -> PipelineRun:
    """Execute a pipeline.

    Args:
        pipeline: its micro-batches run in the order they have.
        slowdowns: [S][N] how many times longer than predicted each stage takes.
        start_s: when the first forward starts.
        transfer_s: from the end of a pass until the neighbouring stage has its result.
    """
    predicted = pass_times(pipeline)
    slowed = [PassTimes(*([t * k for t, k in zip(times_s, factors)] for times_s in predicted)) for factors in slowdowns]
    times = [stage_times(of_stage, stage) for stage, of_stage in enumerate(slowed)]
    stages = run_stages(times, start_s, transfer_s, orders=pass_orders(pipeline))
    return PipelineRun(pipeline=pipeline, start_s=start_s, stages=stages)
