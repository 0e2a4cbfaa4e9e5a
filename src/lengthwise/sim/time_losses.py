"""Break down the device time of a simulated step: compute, communication, bubbles, imbalance, update."""

from dataclasses import dataclass
from math import fsum

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind, Timeline
from lengthwise.sim.engine import BUBBLE, SWITCH


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Shares of the device-seconds of a step. All but ``padding`` add up to 1; of a step without time, to 0."""

    compute: float
    communicate: float
    """Communication in micro-batches, not hidden by computation."""
    bubble: float
    """Waiting for other stages of the same pipeline, from the start of its phase until its last stage is done."""
    imbalance: float
    """Waiting for other pipelines."""
    switch: float
    """Moving weights and gradients between phases."""
    update: float
    padding: float
    """Share of the computed tokens, not of the time."""

    @property
    def idle(self) -> float:
        """Bubble and imbalance: what :attr:`Timeline.idle_fraction` is."""
        return self.bubble + self.imbalance


def losses(timeline: Timeline, plan: StepPlan) -> Losses:
    """Split the device time of a simulated step."""
    seconds: dict[tuple[SpanKind, bool], list[float]] = {}
    for span in timeline.spans:
        seconds.setdefault((span.kind, span.name in (BUBBLE, SWITCH)), []).append(span.duration_s)
    total_s = timeline.step_time_s * timeline.num_ranks

    def share(kind: SpanKind, named: bool = False) -> float:
        return fsum(seconds.get((kind, named), ())) / total_s if total_s else 0.0

    return Losses(
        compute=share(SpanKind.COMPUTE),
        communicate=share(SpanKind.COMMUNICATE),
        bubble=share(SpanKind.WAIT, named=True),
        imbalance=share(SpanKind.WAIT),
        switch=share(SpanKind.COMMUNICATE, named=True),
        update=share(SpanKind.UPDATE),
        padding=plan.padding_fraction,
    )
