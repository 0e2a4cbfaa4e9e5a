"""Two stages under 1F1B and GPipe: how long they wait, with balanced packs and packs of equal length; predicted too.

    python benchmarks/pipeline.py [--quick] [--rounds 5]

Two ranks are processes of one thread joined by Gloo, started here; each is one stage. Writes pipeline.md and
results/pipeline.json. A full run takes about five minutes on two cores; leave the machine alone meanwhile.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from method_ranks import Ranks
from pages import Cell, Goal, Section, at_most, number, say, write
from pipeline_runs import (
    CAPACITY,
    SCHEME,
    SPEC,
    STAGES,
    TOKENS,
    Lengths,
    as_they_come,
    balanced,
    batch_of,
    filled,
    measured_profile,
    one_step,
    problem_of,
    stage_cost,
)

from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind, Timeline, merge
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.sim.engine import simulate

TITLE = "Pipeline stages: how long they wait"
FIRST = (
    "Two stages of one rank each, processes of one thread joined by Gloo on one machine of two cores. A Llama of "
    "{params:.1f} M parameters in float32 ({layers} layers of {hidden}, {split} of them on each stage, bytes as "
    "vocabulary), {tokens:,} tokens a step, packs of at most {capacity:,}. Every step is "
    "trained by the runtime and recorded; all packings and schedules take turns on the same sequences in every round. "
    "Load average {load}.{quick}"
)
OURS, FILLED, UNSORTED = "balanced", "equal length, costliest first", "equal length, as they come"
PACKINGS = {OURS: balanced, FILLED: filled, UNSORTED: as_they_come}
LENGTHS = (Lengths("commoncrawl", CAPACITY), Lengths("githubcode", CAPACITY), Lengths("commoncrawl", CAPACITY // 4))
CLOSE = 0.05
"""Share of the device time by which a prediction may be off."""
IDLE_TEXT = (
    "Medians of {rounds} steps. *Idle*: between the first forward and the last backward, the share of both ranks' "
    "time that is not forward or backward. *Predicted*: the simulator's, of the same plan, before it ran; micro-batch "
    "times are a fit (`a l^2 + b l + c`) to a profile taken in this run, half of the whole model's for a stage. "
    "*Off*: predicted minus measured. *With its own times*: the simulator's with what each micro-batch took, mean "
    "over the stages: what is off then is the simulator's, not the fit's. *Even*: (S - 1) / (V + S - 1), what V "
    "micro-batches of one cost leave idle on S stages. *Time*: first forward to last backward over that of balanced "
    "packs under 1F1B, median of ratios within a round. The simulator executes 1F1B alone."
)
IDLE_AFTER = (
    "*Balanced*: what our packer makes, as many packs as end earliest, of equal cost, the costliest first. *Equal "
    f"length*: first fit to {CAPACITY:,} tokens, decreasing and the costliest first (policy `static`), or each "
    "sequence into the first pack with room and packs in the order of the stream, as loaders that fill packs to the "
    "context length do. Where one sequence is as long as a pack, nothing can be balanced against it: then packs of "
    "equal length that are sorted by cost leave a small one for the end, which drains sooner than a balanced one, "
    "and only the order matters. Where no sequence is that long, more and smaller packs of equal cost idle less."
)
Variant = tuple[str, PipelineSchedule]
VARIANTS: tuple[Variant, ...] = (
    *((name, PipelineSchedule.ONE_F_ONE_B) for name in PACKINGS),
    *((name, PipelineSchedule.GPIPE) for name in (OURS, FILLED)),
)


@dataclass(kw_only=True)
class Steps:
    """Of one packing under one schedule, over the rounds."""

    plans: list[StepPlan] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def idle(self) -> list[float]:
        """Shares of the ranks' time between the first forward and the last backward in which they do not compute."""
        return [1.0 - sum(busy_s(timeline)) / (STAGES * span_s(timeline)) for timeline in self.timelines]

    def spans_s(self) -> list[float]:
        """Seconds from the first forward to the last backward."""
        return [span_s(timeline) for timeline in self.timelines]

    def predicted(self) -> list[float]:
        """The idle share that the simulator tells of the plan."""
        return [simulate(plan).idle_fraction for plan in self.plans]

    def replayed(self) -> list[float]:
        """The same with each micro-batch's own measured time, mean over the stages, instead of the fit's."""
        return [
            simulate(with_times(plan, timeline)).idle_fraction for plan, timeline in zip(self.plans, self.timelines)
        ]

    def skew(self) -> float:
        """Compute time of the last stage over that of the first."""
        return median(busy_s(timeline)[-1] / busy_s(timeline)[0] for timeline in self.timelines)


def busy_s(timeline: Timeline) -> list[float]:
    """Seconds that each rank computes."""
    return [timeline.time_s(SpanKind.COMPUTE, rank) for rank in range(timeline.num_ranks)]


def span_s(timeline: Timeline) -> float:
    """Seconds from the first forward of any rank to the last backward of any."""
    spans = [span for span in timeline.spans if span.kind is SpanKind.COMPUTE]
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def with_times(plan: StepPlan, timeline: Timeline) -> StepPlan:
    """The plan, its micro-batches taking what they took."""
    pipeline = plan.pipelines[0]
    taken_s = [0.0] * len(pipeline.micro_batches)
    for span in timeline.spans:
        if span.kind is SpanKind.COMPUTE:
            taken_s[int(span.name.split()[1])] += span.duration_s / STAGES
    micro_batches = tuple(replace(m, time_s=time_s) for m, time_s in zip(pipeline.micro_batches, taken_s))
    return replace(plan, pipelines=(replace(pipeline, micro_batches=micro_batches),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one kind of lengths, one round; for a look")
    parser.add_argument("--rounds", type=int, default=0, help="steps of every packing under every schedule")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 4)
    lengths = LENGTHS[-1:] if options.quick else LENGTHS
    loads = [os.getloadavg()[0]]
    ranks = Ranks(STAGES)
    try:
        cost = stage_cost(ranks.run(measured_profile, repeats=1 if options.quick else 5)[0])
        found = {drawn: measure(ranks, problem_of(cost), drawn, rounds=rounds) for drawn in lengths}
    finally:
        ranks.close()
    loads.append(os.getloadavg()[0])
    sections = [say(idle_section(found, rounds=rounds)), say(balance_section(found))]
    first = FIRST.format(
        params=SPEC.num_params / 1e6, layers=SPEC.num_layers, hidden=SPEC.hidden_size, split=SCHEME.stage_layers[0],
        tokens=TOKENS, capacity=CAPACITY, load=" to ".join(f"{load:.1f}" for load in loads),
        quick=" **A quick run.**" if options.quick else "",
    )  # fmt: skip
    write("pipeline", title=TITLE, first=first, sections=sections)


def measure(ranks: Ranks, problem: PlanningProblem, drawn: Lengths, *, rounds: int) -> dict[Variant, Steps]:
    """Step after step; the same sequences for all variants of a round."""
    found = {variant: Steps() for variant in VARIANTS}
    for step in range(rounds):
        plans = {name: make(problem, batch_of(drawn, step)) for name, make in PACKINGS.items()}
        for name, schedule in VARIANTS:
            found[name, schedule].plans.append(plans[name])
            found[name, schedule].timelines.append(merge(ranks.run(one_step, plans[name], drawn, schedule)))
    return found


def idle_section(found: Mapping[Lengths, Mapping[Variant, Steps]], *, rounds: int) -> Section:
    """Measured beside predicted."""
    rows: list[list[Cell]] = []
    off = []
    gains: dict[str, list[float]] = {FILLED: [], UNSORTED: []}
    for drawn, variants in found.items():
        ours = variants[OURS, PipelineSchedule.ONE_F_ONE_B]
        for (name, schedule), steps in variants.items():
            is_simulated = schedule is PipelineSchedule.ONE_F_ONE_B
            rows.append([drawn.name, str(schedule), name, *_cells(steps, ours, is_simulated=is_simulated)])
            if is_simulated:
                off.append(abs(median(_differences(steps))))
            if is_simulated and name != OURS:
                gains[name].append(median(mine / theirs for mine, theirs in zip(ours.idle(), steps.idle())))
    beside = "idle share under 1F1B, balanced packs over"
    return Section(
        title="Idle share of two stages",
        text=IDLE_TEXT.format(rounds=rounds),
        head=(
            "lengths like", "schedule", "packs", "micro-batches", "idle", "predicted", "off, points",
            "with its own times", "even", "time",
        ),
        rows=rows,
        goals=(
            Goal(
                what="idle share under 1F1B, predicted minus measured, median of steps; worst packing and lengths",
                aim=f"at most {number(CLOSE * 100, 'points')}",
                measured=number(max(off) * 100, "points"),
                met=max(off) <= CLOSE,
            ),
            at_most(f"{beside} packs of {UNSORTED}; worst lengths", max(gains[UNSORTED]), 1.0, "x"),
            at_most(f"{beside} packs of {FILLED}; worst lengths", max(gains[FILLED]), 1.0, "x"),
        ),
        after=IDLE_AFTER,
    )  # fmt: skip


def balance_section(found: Mapping[Lengths, Mapping[Variant, Steps]]) -> Section:
    """How even the micro-batches and the stages are."""
    rows: list[list[Cell]] = []
    for drawn, variants in found.items():
        for name in PACKINGS:
            steps = variants[name, PipelineSchedule.ONE_F_ONE_B]
            planned = [[m.time_s for m in plan.pipelines[0].micro_batches] for plan in steps.plans]
            taken = [
                [m.time_s for m in with_times(plan, timeline).pipelines[0].micro_batches]
                for plan, timeline in zip(steps.plans, steps.timelines)
            ]
            tokens = [[m.pack.num_tokens for m in plan.pipelines[0].micro_batches] for plan in steps.plans]
            share = median(forward_share(timeline) for timeline in steps.timelines)
            uneven = (_uneven(each) for each in (tokens, planned, taken))
            rows.append([drawn.name, name, *uneven, f"{steps.skew():.2f}", f"{share:.2f}"])
    return Section(
        title="How even packs and stages are",
        text="The costliest micro-batch of a step over the mean, in tokens, in planned and in measured time; medians "
        "over steps under 1F1B. *Stages*: compute time of the last stage, which has the head, over that of the first; "
        "the simulator takes them as equal. *Forward*: its share of forward and backward; the simulator takes a third.",
        head=("lengths like", "packs", "tokens", "planned time", "measured time", "stages", "forward"),
        rows=rows,
    )


def forward_share(timeline: Timeline) -> float:
    """Of the compute time."""
    forward_s = sum(s.duration_s for s in timeline.spans if s.kind is SpanKind.COMPUTE and s.name.startswith("forward"))
    return forward_s / sum(busy_s(timeline))


def _uneven(steps: Sequence[Sequence[float]]) -> str:
    return f"{median(max(values) / mean(values) for values in steps):.2f}"


def _differences(steps: Steps) -> list[float]:
    return [told - seen for told, seen in zip(steps.predicted(), steps.idle())]


def _cells(steps: Steps, ours: Steps, *, is_simulated: bool) -> list[Cell]:
    counts = [len(plan.pipelines[0].micro_batches) for plan in steps.plans]
    even = median((STAGES - 1) / (count + STAGES - 1) for count in counts)
    told: list[Cell] = [None, None, None]
    if is_simulated:
        told = [
            f"{median(steps.predicted()):.1%}",
            f"{median(_differences(steps)) * 100:+.1f}",
            f"{median(steps.replayed()):.1%}",
        ]
    time = median(theirs / mine for theirs, mine in zip(steps.spans_s(), ours.spans_s()))
    return [f"{median(counts):.0f}", f"{median(steps.idle()):.1%}", *told, f"{even:.1%}", f"{time:.2f}x"]


if __name__ == "__main__":
    main()
