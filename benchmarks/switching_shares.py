"""What a step consists of, with pull and push beneath computation and without, beside Hydraulis' table 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from method_ranks import Ranks
from pages import Cell, Section, at_most
from switching_runs import HETEROGENEOUS, HOMOGENEOUS, Ran, overlap_round

from lengthwise.core.timeline import PUSH, SpanKind, merge

MODES = {
    "homogeneous, overlapped": (HOMOGENEOUS, False),
    "heterogeneous, not overlapped": (HETEROGENEOUS, True),
    "heterogeneous, overlapped": (HETEROGENEOUS, False),
}
PUBLISHED = {
    "homogeneous, overlapped": (6.78, 0.02, 1.11, 7.91),
    "heterogeneous, not overlapped": (4.29, 0.02, 1.71, 6.02),
    "heterogeneous, overlapped": (4.29, 0.02, 1.18, 5.49),
}
"""P, O, O-P and E2E in seconds: Hydraulis, table 1."""


@dataclass(frozen=True)
class Shares:
    """Seconds of one step, means over ranks; they add up to the step but for what no span names."""

    propagation: float
    pull: float
    push: float
    optimizer: float
    step: float

    @property
    def between(self) -> float:
        """All that is neither propagation nor optimizer: O-P."""
        return self.step - self.propagation - self.optimizer


def shares(step: Sequence[Ran]) -> Shares:
    """From the spans that ranks recorded; what a rank waits in a push for slower ones is part of the propagation."""
    timeline = merge(one.timeline for one in step).with_waits()
    count = len(step)

    def seconds(kinds: tuple[SpanKind, ...], *names: str) -> float:
        spans = (s for s in timeline.spans if s.kind in kinds and (not names or s.name in names) and s.end_s > 0)
        return sum(span.duration_s for span in spans) / count

    return Shares(
        propagation=seconds((SpanKind.COMPUTE, SpanKind.DATA, SpanKind.WAIT)),
        pull=seconds((SpanKind.COMMUNICATE,), "layout", "pull"),
        push=seconds((SpanKind.COMMUNICATE,), PUSH),
        optimizer=seconds((SpanKind.UPDATE,), "optimizer"),
        step=max(one.time_s for one in step),
    )


def section(ranks: Ranks, *, rounds: int) -> Section:
    """All modes take turns in every round."""
    found: dict[str, list[Shares]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        by_rank = ranks.run(overlap_round, [*MODES.values()], seed=100 + number)
        for mode, step in zip(MODES, zip(*by_rank)):
            found[mode].append(shares(step))
    waits, overlaps = found["heterogeneous, not overlapped"], found["heterogeneous, overlapped"]
    gain = median(ours.step / theirs.step for ours, theirs in zip(overlaps, waits))
    between = median(ours.between / theirs.between for ours, theirs in zip(overlaps, waits))
    return Section(
        title="What a step consists of",
        text=f"Homogeneous: {HOMOGENEOUS}; heterogeneous: {HETEROGENEOUS}. Medians of {rounds} rounds in which the "
        "three take turns, means over ranks, milliseconds and shares of the step. *Not overlapped*: every weight is "
        "waited for before the first forward, and gradients are pushed after the last backward; *overlapped* is what "
        "the runtime does. *P*: forward, backward, data, and waiting for slower ranks. *O*: the optimizer. *O-P*: "
        "all the rest of the step; of it *pull* is laying out, posting and waiting for weights, *push* what is left "
        "of the pushes after the last backward; the others are the check of the plan, the collective of norm and "
        "loss, and making lists of operations.",
        head=("", "P", "O", "O-P", "of it pull", "of it push", "step", "P", "O", "O-P", "published P", "O", "O-P"),
        rows=[_row(mode, found[mode]) for mode in MODES],
        goals=(at_most("step with overlap over without, heterogeneous, median of rounds", gain, 1.0, "x"),),
        after=f"Overlapped over not overlapped, medians within a round: the step {gain:.3f}x, O-P {between:.3f}x. "
        "Published (Hydraulis, table 1, 32B on 64 A800s; seconds 6.78, 0.02, 1.11 / 4.29, 0.02, 1.71 / 4.29, 0.02, "
        "1.18): the step 0.912x, O-P 0.690x. **Two cores cannot show what overlap is for**: four ranks compute on "
        "them all the time, and a message beneath computation takes the core that it would leave idle on a GPU. What "
        "overlap takes from pull and push it gives to the forward and backward that run beside them. The published "
        "step is seconds long and its model larger than a device; here O-P is a large part because a step is short.",
    )


def _row(mode: str, rows: Sequence[Shares]) -> list[Cell]:
    seconds = [(row.propagation, row.optimizer, row.between, row.pull, row.push, row.step) for row in rows]
    of_step = [[part / row.step for part in parts[:3]] for parts, row in zip(seconds, rows)]
    *published, published_step = PUBLISHED[mode]
    return [
        mode,
        *(f"{median(values) * 1e3:,.1f}" for values in zip(*seconds)),
        *(f"{median(values):.1%}" for values in zip(*of_step)),
        *(f"{part / published_step:.1%}" for part in published),
    ]
