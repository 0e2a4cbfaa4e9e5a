"""Every policy on every kind of lengths, simulated: `auto` beside tuned baselines and the published systems.

    python benchmarks/compare_policies.py [--quick] [--steps N] [--check]

Runs what ``lengthwise compare`` runs. Nothing is trained: steps are planned and simulated under closed-form costs.
Writes compare_policies.md and results/compare_policies.json.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clock import timed
from contests import play
from pages import Cell, Goal, Section, check, number, on_one_core, say, write

from lengthwise.report.pages.compare_results import ClusterResult, PolicyResult
from lengthwise.session.plan_lengths import TOKENS_PER_DEVICE

TITLE = "Policies compared"
FIRST = (
    "**Simulated**, not measured on GPUs: every policy plans the same global batches, the simulator runs the plans "
    "under closed-form costs of 80 GB H100s in nodes of 8. Lengths are synthetic, made to match what papers say of "
    "their data. All policies have the same pool of schemes: every degree, up to 8 stages, any number of recomputed "
    "layers, activations and optimizer on the host, gradients sharded, micro-batches in slices and backwards split "
    "where that pays, methods ulysses, ring, megatron_ts, megatron_cz, ulysses_z and metp; each takes from it what its "
    "paper uses."
)
BASELINES = ("padded", "static", "bucket", "packed")
PUBLISHED = ("hotspa", "dcp-inter", "dcp-intra", "paradyse", "hydraulis")
ALL = (*BASELINES, *PUBLISHED, "auto")
TEXT = ("commoncrawl", "githubcode", "grch38")
VIDEO = ("dcp-short", "dcp-balanced", "dcp-long")
LLAMAS = ("llama-7b", "llama-13b", "llama-32b")
TRANSFORMERS = ("transformer-1d-5b", "transformer-2d-1.2b")
GPUS = 64
SCALING = (
    ("llama-7b", "commoncrawl", TOKENS_PER_DEVICE, (8, 32, 64, 1024)),
    ("transformer-1d-5b", "dcp-short", 54_000, (8, 16, 32, 64)),
)
"""Model, corpus, tokens of a step a device, devices: the longest video has as many tokens as a step of the fewest."""
ROUNDING = 1e-6
"""Relative: the simulator's sums round differently from the plans'."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """All policies on one model, corpus and cluster."""

    model: str
    lengths: str
    gpus: int
    result: ClusterResult

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model}, {self.lengths}"

    def of(self, policy: str) -> PolicyResult | None:
        """What a policy came to; None where it is refused."""
        return next((one for one in self.result.ranked if one.policy == policy), None)

    def over(self, policy: str) -> float | None:
        """Tokens per second of `auto` over those of a policy."""
        ours, other = self.of("auto"), self.of(policy)
        return ours.tokens_per_s / other.tokens_per_s if ours and other else None

    @property
    def best_baseline(self) -> PolicyResult | None:
        """The fastest of the hand-tuned baselines."""
        return next((one for one in self.result.ranked if one.policy in BASELINES), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three settings, a few steps; for a look")
    parser.add_argument("--steps", type=int, help="global batches of each setting; default 6, quick 3")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page has other numbers")
    options = parser.parse_args()
    on_one_core()
    steps = options.steps or (3 if options.quick else 6)
    grid = [_match(model, lengths, GPUS, steps) for model, lengths in cells(quick=options.quick)]
    scaling = [
        _match(model, lengths, gpus, min(steps, most_steps(gpus)), tokens_per_device)
        for model, lengths, tokens_per_device, sizes in (SCALING[:1] if options.quick else SCALING)
        for gpus in (sizes[:2] if options.quick else sizes)
    ]
    sections = [say(ratios(grid)), say(speeds(grid)), say(weak_scaling(scaling)), say(refusals([*grid, *scaling]))]
    first = FIRST + (" **A quick run.**" if options.quick else "")
    if options.check:
        check("compare_policies", sections)
    else:
        write("compare_policies", title=TITLE, first=first, sections=sections)


def most_steps(gpus: int) -> int:
    """Steps that are enough, since large ones resemble one another."""
    return 1000 if gpus < 1024 else 3


def cells(*, quick: bool) -> Iterator[tuple[str, str]]:
    """Models and corpora at 64 GPUs."""
    if quick:
        yield from (("llama-7b", "commoncrawl"), ("llama-13b", "githubcode"), ("transformer-1d-5b", "dcp-short"))
        return
    yield from ((model, lengths) for model in LLAMAS for lengths in (*TEXT, *VIDEO))
    yield from ((model, lengths) for model in TRANSFORMERS for lengths in VIDEO)


def _match(model: str, lengths: str, gpus: int, steps: int, tokens_per_device: float = TOKENS_PER_DEVICE) -> Match:
    result, time_s = timed(
        play, model, lengths, gpus=gpus, steps=steps, policies=ALL, tokens_per_device=tokens_per_device
    )
    match = Match(model=model, lengths=lengths, gpus=gpus, result=result)
    best = match.best_baseline
    gain = match.over(best.policy) if best else None
    sys.stdout.write(f"{match.name}, {gpus} GPUs: {_ratio(gain)} over the best baseline ({time_s:.0f} s)\n")
    sys.stdout.flush()
    return match


def ratios(matches: Sequence[Match]) -> Section:
    """`auto` over the others."""
    rows: list[tuple[Cell, ...]] = []
    for match in matches:
        ours, best = match.of("auto"), match.best_baseline
        if ours is None:
            rows.append((match.name, "refused", *[""] * (3 + len(PUBLISHED))))
            continue
        rows.append(
            (
                match.name,
                f"{_ratio(match.over(best.policy))} {best.policy}" if best else "refused",
                *(_ratio(match.over(name)) for name in PUBLISHED),
                f"{ours.idle * 100:.1f} %",
                f"{ours.median_gap * 100:.1f} %",
                number(ours.planning_s, "ms"),
            )
        )
    worst = [value for match in matches for name in ALL[:-1] if (value := match.over(name)) is not None]
    return Section(
        title="`auto` over tuned baselines and published systems, 64 H100s",
        text="Tokens per second of `auto` over those of each policy on the same steps. *Best baseline*: the fastest of "
        "padded, static, bucket and packed, each tuned on other steps of the same corpus. *Idle*: device time in "
        "bubbles and waits under `auto`. *Gap*: its predicted time over a bound that no plan of the whole pool beats, "
        "median. *Planning*: one step, one core. Empty: refused, see below.",
        head=("setting", "best baseline", *PUBLISHED, "idle", "median gap", "planning"),
        measured=("planning",),
        rows=rows,
        goals=(
            Goal(
                what="`auto` over every other policy, the least of all settings",
                aim="at least 1x",
                measured=f"{min(worst):.4f}x" if worst else "-",
                met=min(worst) >= 1 - ROUNDING if worst else None,
            ),
        ),
    )


def speeds(matches: Sequence[Match]) -> Section:
    """Tokens per second of every policy."""
    rows = [
        (
            match.name,
            f"{match.result.tokens_per_step:,}",
            *(f"{one.tokens_per_s:,.0f}" if (one := match.of(name)) else "" for name in ALL),
        )
        for match in matches
    ]
    return Section(
        title="Tokens per second, 64 H100s",
        text="Trained tokens, padding left out.",
        head=("setting", "tokens a step", *ALL),
        rows=rows,
    )


def weak_scaling(matches: Sequence[Match]) -> Section:
    """The same work per GPU on more GPUs."""
    rows: list[tuple[Cell, ...]] = []
    for match in matches:
        ours, best = match.of("auto"), match.best_baseline
        first = next(other for other in matches if other.name == match.name)
        start = first.of("auto")
        rows.append(
            (
                match.name,
                f"{match.gpus:,}",
                f"{match.result.tokens_per_step:,}",
                f"{ours.tokens_per_s / match.gpus:,.0f}" if ours else "refused",
                _ratio(ours.tokens_per_s / match.gpus / (start.tokens_per_s / first.gpus) if ours and start else None),
                f"{_ratio(match.over(best.policy))} {best.policy}" if best else "",
                _ratio(match.over("hydraulis")),
                f"{ours.idle * 100:.1f} %" if ours else "",
                f"{ours.median_gap * 100:.1f} %" if ours else "",
                number(ours.planning_s, "ms") if ours else "",
            )
        )
    return Section(
        title="Weak scaling",
        text="The same tokens a GPU and step, but no step holds fewer than the longest sequence: 3,125 of CommonCrawl, "
        "54,000 of the videos, whose longest sequence is a whole step of 8 GPUs.",
        head=(
            "setting", "GPUs", "tokens a step", "tokens/s per GPU, `auto`", "over the fewest GPUs",
            "over the best baseline", "over hydraulis", "idle", "median gap", "planning",
        ),
        measured=("planning",),
        rows=rows,
    )  # fmt: skip


def refusals(matches: Sequence[Match]) -> Section:
    """Who could not run, and why."""
    rows: list[tuple[Cell, ...]] = []
    for match in matches:
        for one in match.result.policies:
            if one.refused:
                rows.append((match.name, f"{match.gpus:,}", one.policy, one.refused))
    return Section(
        title="Refused",
        text="Policies that could not hold the longest sequence." if rows else "None.",
        head=("setting", "GPUs", "policy", "why"),
        rows=rows,
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


if __name__ == "__main__":
    main()
