"""Policies on the same batches, in numbers and words: what a comparison found out for one or several clusters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import median
from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.core.wording import GIB, counted
from lengthwise.report.charts.histogram import LengthBin
from lengthwise.report.pages.run_text import KeyFigure
from lengthwise.report.units import MISSING, count, hours, memory, ratio, seconds, share, token_count

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
    """Predicted time of all steps above the sum of their proven bounds, as a share of that."""
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
    planned_s: tuple[float, ...] = ()
    """Seconds of each step as its plan predicts them."""
    bounds_s: tuple[float, ...] = ()
    """The proven lower bound of each step, for the schemes that the policy may use."""
    strategies: tuple[str, ...] = ()
    """The pipelines of each step in words."""
    num_used: int = 0
    """Devices that some step computes on; the others of the cluster are idle."""

    @property
    def median_gap(self) -> float:
        """Median over the steps of predicted time above the proven bound, as a share of the bound."""
        gaps = [time_s / bound_s - 1 for time_s, bound_s in zip(self.planned_s, self.bounds_s) if bound_s]
        return median(gaps) if gaps else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for every number of a policy that is refused."""
        names = (
            "num_used",
            "tokens_per_s",
            "step_time_s",
            "idle",
            "bubble",
            "padding",
            "gap",
            "planning_s",
            "preparing_s",
        )
        document: dict[str, Any] = {name: None if self.refused else getattr(self, name) for name in names}
        total_s = sum(self.spent_s.values())
        return {
            "policy": self.policy,
            **document,
            "bound_s": fsum(self.bounds_s) / len(self.bounds_s) if self.bounds_s else None,
            "strategies": list(self.strategies) or None,
            "peak_gib": None if self.refused else self.peak_bytes / GIB,
            "time_shares": {name: self.spent_s.get(name, 0.0) / total_s for name in PARTS} if total_s else None,
            "refused": self.refused or None,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """Tokens of a whole training, and what a device costs for an hour; None: not known."""

    num_tokens: int | None = None
    price_per_hour: float | None = None

    def hours(self, tokens_per_s: float) -> float | None:
        """Hours that all tokens take."""
        return None if self.num_tokens is None else self.num_tokens / tokens_per_s / 3600

    def cost(self, tokens_per_s: float, *, num_devices: int) -> float | None:
        """The price of all devices for as long, in the currency of ``price_per_hour``."""
        hours = self.hours(tokens_per_s)
        return None if hours is None or self.price_per_hour is None else hours * num_devices * self.price_per_hour


NO_BUDGET = TrainingBudget()


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
    token_budget: int = 0
    """Most tokens of a global batch."""
    network_gbit_per_s: float = 0.0
    """Rate of each device's network port."""
    link_gbyte_per_s: float = 0.0
    """Rate and direction of each device to the others of its node."""
    flops_per_token: float = 0.0
    """Model FLOPs of forward and backward, without recompute; 0: not known."""
    peak_flops_per_s: float = 0.0
    """Peak rate of one device in the compute dtype."""
    budget: TrainingBudget = NO_BUDGET

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

    def gap(self, one: PolicyResult) -> float:
        """Predicted time of all steps of ``one`` above their bounds for all policies: the lowest of theirs."""
        bound_s = fsum(min(bounds) for bounds in zip(*(result.bounds_s for result in self.ranked)))
        return fsum(one.planned_s) / bound_s - 1 if bound_s else one.gap

    def mfu(self, one: PolicyResult) -> float | None:
        """Model FLOPs utilization: FLOPs that the trained tokens need over what the devices could do meanwhile."""
        peak_flops_per_s = self.num_devices * self.peak_flops_per_s
        return one.tokens_per_s * self.flops_per_token / peak_flops_per_s if peak_flops_per_s else None

    def hours(self, one: PolicyResult) -> float | None:
        """Hours of the whole training."""
        return self.budget.hours(one.tokens_per_s)

    def cost(self, one: PolicyResult) -> float | None:
        """Price of the whole training."""
        return self.budget.cost(one.tokens_per_s, num_devices=self.num_devices)

    def to_json(self) -> dict[str, Any]:
        """Plain values of the result, for JSON."""
        return {
            "gpus": self.num_devices,
            "cluster": self.cluster,
            "tokens_per_step": self.tokens_per_step,
            "token_budget": self.token_budget,
            "network_gbit_per_s": self.network_gbit_per_s,
            "link_gbyte_per_s": self.link_gbyte_per_s,
            "tokens": self.budget.num_tokens,
            "price_per_hour": self.budget.price_per_hour,
            "policies": [{**result.to_json(), **self._compared(result)} for result in self.policies],
        }

    def _compared(self, one: PolicyResult) -> dict[str, float | None]:
        """Numbers of a policy beside the others and on this cluster; None where it is refused."""
        numbers: dict[str, Callable[[PolicyResult], float | None]] = {
            "over_static": self.over_static, "over_best_other": self.over_best_other, "gap_to_common_bound": self.gap,
            "tokens_per_s_per_gpu": self.per_device, "mfu": self.mfu, "hours": self.hours, "cost": self.cost,
        }  # fmt: skip
        return {name: None if one.refused else number(one) for name, number in numbers.items()}

    def per_device(self, one: PolicyResult) -> float:
        """Tokens per second and device."""
        return one.tokens_per_s / self.num_devices


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
    used = f"{best.num_used} of " if 0 < best.num_used < cluster.num_devices else ""
    devices = f"{used}{counted(cluster.num_devices, 'device')}"
    speed = f"{best.policy} trains {count(best.tokens_per_s)} tokens per second on {devices}"
    idle = _idle_words(best.num_used, cluster.num_devices)
    if len(ranked) == 1:
        return f"{speed}.{idle}"
    second = ranked[1]
    times = []
    if (over := cluster.over_static(best)) and best.policy != YARDSTICK and second.policy != YARDSTICK:
        times.append(f"{over:.2f} times as many as {YARDSTICK}")
    lead = best.tokens_per_s / second.tokens_per_s
    as_many = f"{lead:.2f} times as many as" if lead >= 1.005 else "about as many as"
    times.append(f"{as_many} {second.policy}, the next best")
    return f"{speed}: {' and '.join(times)}.{idle}"


def _idle_words(num_used: int, num_devices: int) -> str:
    """A sentence where devices compute nothing: the update has to reach them all the same."""
    if not 0 < num_used < num_devices:
        return ""
    idle = num_devices - num_used
    verbs = "computes nothing, yet takes" if idle == 1 else "compute nothing, yet take"
    return f" {counted(idle, 'device')} {verbs} part in every update: a cluster of {num_used:,} may be faster."


def certificate(cluster: ClusterResult) -> str:
    """How far the best policy can be from the best possible, in one sentence."""
    best = cluster.ranked[0]
    return (
        f"With the schemes that these policies may use, no plan for the same batches can be more than "
        f"{share(max(0.0, cluster.gap(best)))} faster over these steps: that is proven under the cost model."
    )


def tiles(cluster: ClusterResult) -> list[KeyFigure]:
    """Key figures of the fastest policy."""
    best = cluster.ranked[0]
    over = cluster.over_static(best)
    figures = [
        KeyFigure("tokens per second", count(best.tokens_per_s), f"{best.policy}, padding not counted"),
        KeyFigure("speed-up", ratio(over), f"over {YARDSTICK}: packs to the context length under one scheme"),
        KeyFigure("MFU", share(cluster.mfu(best)), f"{count(cluster.per_device(best))} tokens per second and device"),
        KeyFigure("idle", share(best.idle), "of the device time: bubbles and waiting"),
        KeyFigure("gap to the bound", share(cluster.gap(best)), "predicted time of all steps above their lower bounds"),
        KeyFigure("peak memory", memory(best.peak_bytes), "per device, of all steps"),
    ]
    words = f"for {token_count(cluster.budget.num_tokens or 0)} tokens"
    for name, value in (("hours", hours(cluster.hours(best))), ("cost", count(cluster.cost(best)))):
        if value != MISSING:
            figures.append(KeyFigure(name, value, words))
    return figures


def outlook(cluster: ClusterResult) -> str:
    """What the speed of the fastest policy means for a device, and for a whole training where its tokens are known."""
    best = cluster.ranked[0]
    sentence = f"{count(cluster.per_device(best))} tokens per second and device, an MFU of {share(cluster.mfu(best))}"
    if (hours_needed := cluster.hours(best)) is None:
        return f"{sentence}."
    price = "" if (cost := cluster.cost(best)) is None else f" and cost {count(cost)}"
    return f"{sentence}; {token_count(cluster.budget.num_tokens or 0)} tokens take {hours(hours_needed)} hours{price}."


CELLS: dict[str, Callable[[ClusterResult, PolicyResult], str]] = {
    "policy": lambda _, one: one.policy,
    "tokens/s": lambda _, one: count(one.tokens_per_s),
    "per device": lambda cluster, one: count(cluster.per_device(one)),
    "over static": lambda cluster, one: ratio(cluster.over_static(one)),
    "MFU": lambda cluster, one: share(cluster.mfu(one)),
    "step time": lambda _, one: seconds(one.step_time_s),
    "idle": lambda _, one: share(one.idle),
    "bubble": lambda _, one: share(one.bubble),
    "padding": lambda _, one: share(one.padding),
    "gap": lambda cluster, one: share(cluster.gap(one)),
    "peak": lambda _, one: memory(one.peak_bytes),
    "planning": lambda _, one: seconds(one.planning_s),
    "hours": lambda cluster, one: hours(cluster.hours(one)),
    "cost": lambda cluster, one: count(cluster.cost(one)),
}
"""Columns of a table of policies, and what they say of one."""


def columns(cluster: ClusterResult) -> tuple[str, ...]:
    """Columns about which something is known."""
    best, unknown = cluster.ranked[0], set()
    for name, number in (("MFU", cluster.mfu), ("hours", cluster.hours), ("cost", cluster.cost)):
        if number(best) is None:
            unknown.add(name)
    return tuple(name for name in CELLS if name not in unknown)


def row(cluster: ClusterResult, one: PolicyResult, names: Sequence[str]) -> tuple[str, ...]:
    """One policy under the columns ``names``; of a refused one, its name alone."""
    return (one.policy,) if one.refused else tuple(CELLS[name](cluster, one) for name in names)


def fastest_first(clusters: Sequence[ClusterResult]) -> list[str]:
    """Names of the policies that can run somewhere, ranked on the largest cluster, those refused there last."""
    names: dict[str, None] = {}
    for cluster in sorted(clusters, key=lambda result: -result.num_devices):
        names.update(dict.fromkeys(result.policy for result in cluster.ranked))
    return list(names)
