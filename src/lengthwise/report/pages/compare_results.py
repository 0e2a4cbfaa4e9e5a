"""Policies on the same batches, in numbers and words: what a comparison found out for one or several clusters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.core.wording import GIB
from lengthwise.report.charts.histogram import LengthBin
from lengthwise.report.pages.run_text import KeyFigure
from lengthwise.report.units import count, memory, ratio, seconds, share

PARTS = {
    "compute": "compute",
    "padding": "compute padding",
    "communicate": "communicate",
    "bubble": "pipeline bubble",
    "imbalance": "wait for slower pipelines",
    "switch": "switch strategy",
    "update": "update weights",
}
"""What the device time of a step goes to -> in words."""
YARDSTICK = "static"
"""The policy that others are measured against."""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy on one cluster; where it is refused, its numbers are 0."""

    policy: str
    refused: str = ""
    """Why the policy cannot run; empty where it can."""
    tokens_per_s: float = 0.0
    """Trained, padding left out."""
    step_time_s: float = 0.0
    """Mean over the steps, as are the shares, weighted by time."""
    idle: float = 0.0
    """Share of the device time without work: bubbles and waiting for slower pipelines."""
    bubble: float = 0.0
    padding: float = 0.0
    """Share of the computed tokens."""
    gap: float = 0.0
    """Median over the steps of predicted time above the proven bound, as a share of the bound."""
    peak_bytes: int = 0
    planning_s: float = 0.0
    """Seconds of one core that deciding a step took, nothing known of it before; of this machine, so it varies."""
    preparing_s: float = 0.0
    """Seconds before the first step: proposals and tuning, once a run. What `auto` finds prepared by policies before it
    is not counted again, nor what other processes searched meanwhile."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Device-seconds of all steps by name of ``PARTS``."""
    times_s: tuple[float, ...] = ()
    """Seconds of each step."""

    def to_json(self, *, over_static: float | None, over_best_other: float | None) -> dict[str, Any]:
        """Plain values; None for every number of a policy that is refused."""
        names = ("tokens_per_s", "step_time_s", "idle", "bubble", "padding", "gap", "planning_s", "preparing_s")
        document: dict[str, Any] = {name: None if self.refused else getattr(self, name) for name in names}
        total_s = sum(self.spent_s.values())
        return {
            "policy": self.policy,
            **document,
            "peak_gib": None if self.refused else self.peak_bytes / GIB,
            "time_shares": {name: self.spent_s.get(name, 0.0) / total_s for name in PARTS} if total_s else None,
            "over_static": over_static,
            "over_best_other": over_best_other,
            "refused": self.refused or None,
        }


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """One step of one policy, planned and simulated."""

    plan: StepPlan
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """All policies on one cluster, in the order asked for."""

    num_devices: int
    cluster: str
    tokens_per_step: int
    """Of the average global batch."""
    policies: tuple[PolicyResult, ...]
    steps: dict[str, ComparedStep] = field(default_factory=dict)
    """The same typical step by policy, for the page; may be empty."""

    @property
    def ranked(self) -> list[PolicyResult]:
        """Policies that can run, the fastest first; of equally fast ones, the last asked for."""
        running = [result for result in reversed(self.policies) if not result.refused]
        return sorted(running, key=lambda result: -float(f"{result.tokens_per_s:.9g}"))

    @property
    def refusals(self) -> dict[str, list[str]]:
        """Policies that cannot run, by reason."""
        refusals: dict[str, list[str]] = {}
        for result in self.policies:
            if result.refused:
                refusals.setdefault(result.refused, []).append(result.policy)
        return refusals

    def over_static(self, one: PolicyResult) -> float | None:
        """Tokens per second of ``one`` over those of ``YARDSTICK``; None where either is missing."""
        other = next((p for p in self.ranked if p.policy == YARDSTICK), None)
        return one.tokens_per_s / other.tokens_per_s if other and not one.refused else None

    def over_best_other(self, one: PolicyResult) -> float | None:
        """Tokens per second of ``one`` over those of the fastest other policy; None where either is missing."""
        other = next((p for p in self.ranked if p.policy != one.policy), None)
        return one.tokens_per_s / other.tokens_per_s if other and not one.refused else None

    def to_json(self) -> dict[str, Any]:
        """Plain values of the result, for JSON."""
        return {
            "gpus": self.num_devices,
            "cluster": self.cluster,
            "tokens_per_step": self.tokens_per_step,
            "policies": [
                result.to_json(over_static=self.over_static(result), over_best_other=self.over_best_other(result))
                for result in self.policies
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What every policy would make of the same sequences on one or several clusters."""

    model: str
    device: str
    source: str
    """Where the lengths come from."""
    num_steps: int
    facts: tuple[tuple[str, str], ...]
    """Terms and descriptions of what was asked."""
    clusters: tuple[ClusterResult, ...]
    length_bins: tuple[LengthBin, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Dtype, seed, and what the length limit did, for ``to_json``."""

    def to_json(self) -> dict[str, Any]:
        """Plain values: a document a cluster, and that of a single cluster at the top as well."""
        documents = [result.to_json() for result in self.clusters]
        asked = {"model": self.model, "lengths": self.source, "num_steps": self.num_steps}
        return {**(documents[0] if len(documents) == 1 else {}), "clusters": documents, **asked, **self.settings}


def headline(cluster: ClusterResult) -> str:
    """The result in one sentence."""
    ranked = cluster.ranked
    best = ranked[0]
    speed = f"{best.policy} trains {count(best.tokens_per_s)} tokens per second on {cluster.num_devices} devices"
    if len(ranked) == 1:
        return f"{speed}."
    second = ranked[1]
    times = []
    if (over := cluster.over_static(best)) and best.policy != YARDSTICK and second.policy != YARDSTICK:
        times.append(f"{over:.2f} times as many as {YARDSTICK}")
    lead = best.tokens_per_s / second.tokens_per_s
    as_many = f"{lead:.2f} times as many as" if lead >= 1.005 else "about as many as"
    times.append(f"{as_many} {second.policy}, the next best")
    return f"{speed}: {' and '.join(times)}."


def certificate(cluster: ClusterResult) -> str:
    """How far the best policy can be from the best possible, in one sentence."""
    best = cluster.ranked[0]
    return (
        f"With the schemes that {best.policy} may use, no plan for the same batches can be more than "
        f"{share(max(0.0, best.gap))} faster (median over the steps): that is proven under the cost model."
    )


def tiles(cluster: ClusterResult) -> list[KeyFigure]:
    """Key figures of the fastest policy."""
    best = cluster.ranked[0]
    over = cluster.over_static(best)
    return [
        KeyFigure("tokens per second", count(best.tokens_per_s), f"{best.policy}, padding not counted"),
        KeyFigure("speed-up", ratio(over), f"over {YARDSTICK}: packs to the context length under one scheme"),
        KeyFigure("idle", share(best.idle), "of the device time: bubbles and waiting"),
        KeyFigure("gap to the bound", share(best.gap), "median of predicted time above the proven lower bound"),
        KeyFigure("peak memory", memory(best.peak_bytes), "per device, of all steps"),
        KeyFigure("planning", seconds(best.planning_s), f"a step, which takes {seconds(best.step_time_s)}"),
    ]


COLUMNS = (
    "policy", "tokens/s", "over static", "step time", "idle", "bubble", "padding", "gap", "peak", "planning",
)  # fmt: skip


def row(cluster: ClusterResult, one: PolicyResult) -> tuple[str, ...]:
    """One policy under ``COLUMNS``; of a refused one, its name alone."""
    if one.refused:
        return (one.policy,)
    return (
        one.policy, count(one.tokens_per_s), ratio(cluster.over_static(one)), seconds(one.step_time_s),
        share(one.idle), share(one.bubble), share(one.padding), share(one.gap), memory(one.peak_bytes),
        seconds(one.planning_s),
    )  # fmt: skip


def fastest_first(clusters: Sequence[ClusterResult]) -> list[str]:
    """Names of the policies that can run somewhere, ranked on the largest cluster, those refused there last."""
    names: dict[str, None] = {}
    for cluster in sorted(clusters, key=lambda result: -result.num_devices):
        names.update(dict.fromkeys(result.policy for result in cluster.ranked))
    return list(names)
