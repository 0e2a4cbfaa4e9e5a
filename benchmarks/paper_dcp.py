"""DCP: idle time of its accumulation search, imbalance of the bucket baseline, and its headline speed-ups."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from as_published import FIXED_DEGREES, BucketRun, bucket_run, recomputing_groups
from clock import timed
from contests import METHODS, setting
from pages import Section, number
from published import accumulation

from lengthwise.plan.dcp.accumulation import AccumulationRange, accumulate, idle_share
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace
from lengthwise.report.pages.compare_results import ClusterResult
from lengthwise.session.plan_lengths import TOKENS_PER_DEVICE

SEEDS = 12
MOST = 5
"""G_max of the published benchmarks."""
CASES = ((4, 8), (4, 32), (2, 32), (8, 32), (20, 32))
"""Ratio of the slowest micro-batch to the fastest, and groups."""
MODELS = {"transformer-1d-5b": (2.88, 2.70), "transformer-2d-1.2b": (None, 1.68)}
"""Preset -> published speed-ups over bucket parallel of DCP-intra and DCP-inter, the best over three data sets."""
POLICIES = ("bucket", "dcp-inter", "dcp-intra")
WHY = (
    "simulated by closed forms on corpora like the published ones; the tuned baseline packs instead of padding, "
    "accumulates, and may take one group of all devices; against the published one, the gain is that of its degree"
)
LENGTHS = ("dcp-short", "dcp-balanced", "dcp-long")
AS_PUBLISHED = SearchSpace(
    methods=METHODS, offload=OffloadMode.NONE, tile_tokens=0, has_selective=False, has_head_groups=False
)
"""Nothing is put into host memory, feed-forwards compute all tokens and attention all heads at once, layers that are
recomputed keep nothing but their input, and gradients are whole: the paper does nothing else."""


def idle(**_: bool) -> Section:
    """Idle share of the step under three ways to choose the accumulation counts."""
    rows = []
    for ratio, groups in CASES:
        shares, times_s = [], []
        for seed in range(SEEDS):
            times = np.exp(np.random.default_rng(seed).uniform(0, np.log(ratio), groups))
            theirs, theirs_s = timed(accumulation, times, MOST)
            ours, ours_s = timed(accumulate, times, AccumulationRange(g_max=MOST))
            small = accumulate(times, AccumulationRange(g_max=MOST), max_size=max(groups, int(theirs.sum())))
            shares.append([idle_share(times, counts) for counts in (np.ones(groups), theirs, ours, small)])
            times_s.append((theirs_s, ours_s))
        mean, (theirs_s, ours_s) = np.mean(shares, axis=0), np.median(times_s, axis=0)
        rows.append(
            (
                f"slowest {ratio}x the fastest, {groups} groups",
                *(f"{share * 100:.1f} %" for share in mean),
                f"{number(float(theirs_s), 'ms')} / {number(float(ours_s), 'ms')}",
            )
        )
    return Section(
        title="DCP, accumulation: idle share of a step",
        text=f"Seconds of a micro-batch log-uniform between 1 and the ratio, mean of {SEEDS} seeds, at most {MOST} "
        "times the slowest. *Published*: our writing of the search in its code, which minimises absolute seconds from "
        "a target. *Exact*: the least idle share of all counts. *Exact, no larger*: the same with no more "
        "micro-batches in all than the published search takes.",
        head=("groups", "one each", "published", "exact", "exact, no larger", "time of published / exact search"),
        rows=rows,
        measured=("time of published / exact search",),
        after="Absolute seconds favour small steps, so with many groups the published search falls back towards one "
        "micro-batch each. The paper gives no numbers for this.",
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """DCP and both bucket baselines on one model and corpus."""

    result: ClusterResult
    fixed: dict[int, BucketRun]
    """Bucket parallel as published, by its one degree; those that do not hold the longest sequence are left out."""
    recomputing: float | None
    """Tokens per second of dcp-inter as published, which recomputes every layer (r = L); None: it does not fit."""

    @property
    def speeds(self) -> dict[str, float]:
        """Tokens per second by policy."""
        return {policy.policy: policy.tokens_per_s for policy in self.result.ranked}

    def over_tuned(self, policy: str) -> float:
        """How many times faster than the tuned bucket baseline."""
        return self.speeds[policy] / self.speeds["bucket"]

    def over_fixed(self, policy: str) -> list[float]:
        """How many times faster than bucket parallel at each of its degrees."""
        return [self.speeds[policy] / run.tokens_per_s for run in self.fixed.values()]


def against_bucket(
    model: str, lengths: str, *, gpus: int = 32, steps: int, tokens_per_device: float = TOKENS_PER_DEVICE
) -> Comparison:
    """Both bucket baselines, dcp-inter and dcp-intra on H200s of which 80 GB are used, as in the paper."""
    played = partial(
        setting, model, lengths, gpus=gpus, steps=steps, device="H200-141GB", memory_gib=80,
        tokens_per_device=tokens_per_device,
    )  # fmt: skip
    comparison, entry = played(policies=POLICIES, search_space=AS_PUBLISHED)
    result = comparison.run(entry, with_steps=False, on_step=lambda *_: None)
    every_layer, recomputing = played(
        policies=("dcp-inter",), search_space=replace(AS_PUBLISHED, recompute=RecomputeMode.ALL)
    )
    inter = every_layer.run(recomputing, with_steps=False, on_step=lambda *_: None)
    fixed = {}
    for degree in FIXED_DEGREES:
        if entry.problem and degree <= gpus:
            groups = recomputing_groups(entry.problem, degree, comparison.model.num_layers)
            if groups:
                fixed[degree] = bucket_run(entry.problem, groups, comparison.batches(entry))
    return Comparison(result=result, fixed=fixed, recomputing=inter.ranked[0].tokens_per_s if inter.ranked else None)


def speed_ups(*, quick: bool) -> Section:
    """DCP against bucket parallel, simulated."""
    rows: list[tuple[str, ...]] = []
    for model, published in MODELS.items():
        compared = {lengths: against_bucket(model, lengths, steps=4 if quick else 20) for lengths in LENGTHS}
        for lengths, one in compared.items():
            idles = {policy.policy: policy.idle for policy in one.result.ranked}
            rows.append(
                (
                    f"{model}, {lengths}: idle of bucket / dcp-inter / dcp-intra",
                    "",
                    " / ".join(f"{idles[name] * 100:.1f} %" if name in idles else "refused" for name in POLICIES),
                    " / ".join(f"SP {degree}: {run.idle * 100:.1f} %" for degree, run in one.fixed.items()),
                    "",
                )
            )
        for name, value in zip(("dcp-intra", "dcp-inter"), published):
            tuned = [one.over_tuned(name) for one in compared.values()]
            fixed = [ratio for one in compared.values() for ratio in one.over_fixed(name)]
            rows.append(
                (
                    f"{model}: {name} over bucket parallel, three corpora",
                    f"up to {value}x" if value else "",
                    f"{min(tuned):.2f} to {max(tuned):.2f}x",
                    f"{min(fixed):.2f} to {max(fixed):.2f}x",
                    WHY,
                )
            )
    rows.append(_imbalance(quick=quick))
    return Section(
        title="DCP, section 4.2: speed-ups on 32 H200s with 80 GB each",
        text="All simulated. The published data sets are proprietary mixtures described by figures only. *Tuned*: "
        "policy `bucket`, the best of all degrees, batch sizes and levels of recompute. *As published*: one degree for "
        "the whole run (`sp_size` 4, 8, 16 or 32; the paper does not say which), every layer recomputed, batch sizes "
        "that take as long as the longest sequence, one micro-batch a group and step.",
        head=("quantity", "published", "bucket tuned", "bucket as published", "why"),
        rows=rows,
    )


def _imbalance(*, quick: bool) -> tuple[str, ...]:
    comparison, entry = setting(
        "transformer-2d-1.2b", "dcp-short", gpus=32, steps=4 if quick else 20, policies=("bucket",),
        search_space=AS_PUBLISHED,
    )  # fmt: skip
    idle_ = comparison.run(entry, with_steps=False, on_step=lambda *_: None).policies[0].idle
    return (
        "idle of bucket parallel, 32 H100s, short videos (project page)",
        "16.4 %",
        f"{idle_ * 100:.1f} %",
        "",
        "depends on tokens per step, which are not given; here as many as the longest sequence has, 432K",
    )
