"""What a run comes to, in numbers: how fast, how much idle and padded, how well predicted, how far from optimal."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lengthwise.core.run_folder import RunFolder
from lengthwise.core.timeline import SpanKind
from lengthwise.report.record import RunRecord, read_record

MOST_PICKED = 8
"""Steps among which a reader picks; the page holds the timelines of all of them."""

MOST_NAMED = 8
"""Stretches of missing steps that a sentence names."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """One finished step; None stands for what the run did not record."""

    step: int
    num_tokens: int | None
    """Trained, without padding."""
    num_sequences: int | None
    max_length: int | None
    time_s: float | None
    predicted_s: float | None
    gap: float | None
    """Predicted time above the lower bound, as a share of the bound."""
    padding_fraction: float | None
    idle_fraction: float | None
    imbalance: float | None
    loss: float | None
    num_ranks: int = 1
    validation_loss: float | None = None
    """Computed after the step; None after most."""

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured time, less 1: positive when the step was faster than predicted."""
        if not self.time_s or self.predicted_s is None:
            return None
        return self.predicted_s / self.time_s - 1.0

    @property
    def idle_s(self) -> float | None:
        """Device-seconds in which ranks are idle in this step."""
        return None if self.idle_fraction is None or self.device_s is None else self.idle_fraction * self.device_s

    @property
    def device_s(self) -> float | None:
        """Seconds of all ranks together."""
        return None if self.time_s is None else self.time_s * self.num_ranks


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. Speeds, times, idle share, prediction and gap leave out the warm-up; None stands for not recorded."""

    name: str
    path: str
    status: str
    policy: str
    num_ranks: int
    """The most of any step: a run may go on with another number."""
    num_steps: int
    num_warmup: int
    """First steps that the speed figures leave out; fewer than asked for when the run has too few steps."""
    num_tokens: int
    tokens_per_s: float | None
    """Non-padding tokens of the timed steps over the sum of their times."""
    padding_fraction: float | None
    """Share of all computed tokens that is padding."""
    idle_fraction: float | None
    """Share of all device-seconds in which a rank waits or does nothing."""
    data_wait: float | None
    """Share of all device-seconds in which a rank waits for its data."""
    imbalance: float | None
    """Median over steps of the busiest rank's compute time over the mean."""
    step_time_s: float | None
    """Median."""
    predicted_step_time_s: float | None
    """Median."""
    prediction_error: float | None
    """Median over steps of the absolute value."""
    gap: float | None
    """Median over steps of predicted time over lower bound, less 1."""
    final_loss: float | None
    """Of the last step; not finite if training diverged."""
    missing_steps: tuple[tuple[int, int], ...]
    """First and last of each stretch of steps that no row of metrics is of, though others follow or it has a plan: the
    figures leave them out."""
    steps: tuple[StepSummary, ...]

    @property
    def timed(self) -> tuple[StepSummary, ...]:
        """The steps after the warm-up."""
        return self.steps[self.num_warmup :]

    @property
    def ranks_in_words(self) -> str:
        """How many ranks the steps have, such as ``2``, or ``1 to 2`` where a run went on with another number."""
        fewest = min(step.num_ranks for step in self.steps)
        return f"{self.num_ranks:,}" if fewest == self.num_ranks else f"{fewest:,} to {self.num_ranks:,}"

    @property
    def missing_in_words(self) -> str:
        """Which steps have no row of metrics, in a sentence; empty if none lacks one."""
        if not self.missing_steps:
            return ""
        number = sum(last - first + 1 for first, last in self.missing_steps)
        stretches = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in self.missing_steps[:MOST_NAMED]]
        more = ", ..." if len(self.missing_steps) > MOST_NAMED else ""
        return (
            f"The metrics lack {'a row of step' if number == 1 else f'rows of {number:,} steps:'} "
            f"{', '.join(stretches)}{more}; all figures leave {'it' if number == 1 else 'them'} out."
        )

    def to_json(self) -> dict[str, Any]:
        """The figures without the single steps; what is not finite becomes null."""
        document = asdict(self)
        del document["steps"]
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in document.items()}


def summarise(run: RunFolder, *, warmup: int = 1) -> RunSummary:
    """The summary of a run folder; see :func:`summarise_record` and, for errors, :func:`read_record`."""
    return summarise_record(read_record(run), warmup=warmup)


def summarise_record(record: RunRecord, *, warmup: int = 1) -> RunSummary:
    """The summary of a run; its first ``warmup`` steps do not count for speed, if others remain."""
    steps = tuple(_step(record, row) for row in record.rows)
    num_warmup = min(max(0, warmup), len(steps) - 1)
    timed = steps[num_warmup:]
    return RunSummary(
        name=record.name,
        path=str(record.folder.path),
        status=str(record.status.get("state") or "unknown"),
        policy=_policy(record),
        num_ranks=max(step.num_ranks for step in steps),
        num_steps=len(steps),
        num_warmup=num_warmup,
        num_tokens=sum(step.num_tokens or 0 for step in steps),
        tokens_per_s=_tokens_per_s(timed),
        padding_fraction=_padding(steps),
        idle_fraction=_idle(timed),
        data_wait=_data_wait(record.rows[num_warmup:], timed),
        imbalance=_middle(step.imbalance for step in timed),
        step_time_s=_middle(step.time_s for step in timed),
        predicted_step_time_s=_middle(step.predicted_s for step in timed),
        prediction_error=_middle(abs(e) for step in timed if (e := step.prediction_error) is not None),
        gap=_middle(step.gap for step in timed),
        final_loss=steps[-1].loss,
        missing_steps=record.missing_steps,
        steps=steps,
    )


def typical_step(summary: RunSummary, among: Iterable[int]) -> int | None:
    """The timed step in ``among`` whose time is nearest to the median; None without any."""
    if summary.step_time_s is None:
        return None
    middle_s = summary.step_time_s
    return _chosen(summary, among, lambda step: -abs((step.time_s or 0.0) - middle_s))


def worst_step(summary: RunSummary, among: Iterable[int]) -> int | None:
    """The timed step in ``among`` that loses most time to idling; None without any."""
    return _chosen(summary, among, lambda step: step.idle_s or 0.0)


def steps_to_pick(record: RunRecord) -> list[int]:
    """At most so many steps with timelines, evenly chosen, the first and the last among them."""
    steps = sorted(record.timelines)
    if len(steps) <= MOST_PICKED:
        return steps
    return [steps[k * (len(steps) - 1) // (MOST_PICKED - 1)] for k in range(MOST_PICKED)]


def slowest_steps(summary: RunSummary) -> list[StepSummary]:
    """The ten timed steps that took longest, longest first."""
    return sorted((s for s in summary.timed if s.time_s), key=lambda s: -(s.time_s or 0.0))[:10]


def time_shares(record: RunRecord, summary: RunSummary) -> dict[str, float]:
    """Device-seconds of the timed steps by span kind; ``idle`` is waiting and what no span covers. Empty if unknown."""
    timelines = [record.timelines[s.step] for s in summary.timed if s.step in record.timelines]
    if not timelines:
        return {}
    shares = {str(kind): 0.0 for kind in SpanKind if kind is not SpanKind.WAIT}
    for span in (span for timeline in timelines for span in timeline.spans if span.kind is not SpanKind.WAIT):
        shares[str(span.kind)] += max(0.0, span.end_s - max(0.0, span.start_s))  # planning ahead costs no step time
    total_s = sum(t.step_time_s * t.num_ranks for t in timelines)
    return {**shares, "idle": max(0.0, total_s - sum(shares.values()))}


def _step(record: RunRecord, row: dict[str, Any]) -> StepSummary:
    step = row["step"]
    plan, timeline = record.plans.get(step), record.timelines.get(step)
    packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches] if plan else []
    lengths = [length for pack in packs for length in pack.lengths]
    bound_s, predicted_s = row.get("plan/lower_bound_s"), row.get("plan/pred_time_s")
    if plan:
        bound_s, predicted_s = plan.lower_bound_s, plan.time_s or None  # one made by hand may predict nothing
    return StepSummary(
        step=step,
        num_tokens=row.get("data/num_tokens", sum(lengths) if plan else None),
        num_sequences=row.get("data/num_sequences", len(lengths) if plan else None),
        max_length=row.get("data/max_len", max(lengths, default=None)),
        time_s=row.get("perf/step_time_s", timeline.step_time_s if timeline else None),
        predicted_s=predicted_s,
        gap=predicted_s / bound_s - 1.0 if predicted_s is not None and bound_s else None,
        padding_fraction=row.get("data/pad_frac", plan.padding_fraction if plan else None),
        idle_fraction=timeline.idle_fraction if timeline else None,
        imbalance=timeline.imbalance if timeline else row.get("balance/time_max_over_mean"),
        loss=row.get("loss/avg"),
        num_ranks=plan.num_devices if plan else timeline.num_ranks if timeline else 1,
        validation_loss=row.get("val/loss"),
    )


def _policy(record: RunRecord) -> str:
    plans = list(record.plans.values())
    return plans[-1].policy if plans else str(record.setting("plan", "policy") or "unknown")


def _tokens_per_s(steps: Sequence[StepSummary]) -> float | None:
    measured = [(s.num_tokens, s.time_s) for s in steps if s.num_tokens is not None and s.time_s]
    return sum(tokens for tokens, _ in measured) / sum(time_s for _, time_s in measured) if measured else None


def _padding(steps: Sequence[StepSummary]) -> float | None:
    measured = [
        (s.num_tokens, s.padding_fraction)
        for s in steps
        if s.num_tokens and s.padding_fraction is not None and s.padding_fraction < 1
    ]
    computed = sum(tokens / (1.0 - padding) for tokens, padding in measured)
    return 1.0 - sum(tokens for tokens, _ in measured) / computed if measured else None


def _idle(steps: Sequence[StepSummary]) -> float | None:
    measured = [(s.idle_s, s.device_s) for s in steps if s.idle_s is not None and s.device_s]
    return sum(idle_s for idle_s, _ in measured) / sum(device_s for _, device_s in measured) if measured else None


def _data_wait(rows: Sequence[dict[str, Any]], steps: Sequence[StepSummary]) -> float | None:
    waits = [(row.get("time/data_wait_s"), step) for row, step in zip(rows, steps) if row.get("perf/step_time_s")]
    measured = [(wait_s * s.num_ranks, s.device_s) for wait_s, s in waits if wait_s is not None and s.device_s]
    return sum(wait_s for wait_s, _ in measured) / sum(device_s for _, device_s in measured) if measured else None


def _middle(values: Iterable[float | None]) -> float | None:
    values_known = [value for value in values if value is not None]
    return median(values_known) if values_known else None


def _chosen(summary: RunSummary, among: Iterable[int], merit: Callable[[StepSummary], float]) -> int | None:
    wanted = set(among)
    candidates = [s for s in summary.timed if s.step in wanted and s.time_s]
    return max(candidates, key=lambda s: (merit(s), -s.step)).step if candidates else None
