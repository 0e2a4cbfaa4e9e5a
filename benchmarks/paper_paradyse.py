"""ParaDySe: where one method overtakes another, from its own fits and from our closed forms; Table 5's ablation."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from pages import Section

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel, ProfileRow, ProfileTable
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method, PipelineConfig, uniform_scheme
from lengthwise.core.specs import ModelSpec, cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.memory_model import state_bytes
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.cost.profiled.hybrid import HybridCost
from lengthwise.cost.profiled.measured_schemes import ProfiledCost
from lengthwise.cost.weight_shards import held_params
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace, make_problem

METHODS = (Method.MEGATRON_TS, Method.MEGATRON_CZ, Method.ULYSSES_Z, Method.METP)
"""Those of its experiments; ColossalZ was left out there and is not in its code."""
CLUSTER = "8xA100-80GB"
DEGREE = 8
STEP_TOKENS = 256
LONGEST = 327_680
"""Of the search for crossovers."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Seconds a s^2 + b s + c of some layers under each method, 8 GPUs, from its ``time_calculator.py``."""

    preset: str
    num_layers: int
    fits: dict[Method, tuple[float, float, float]]
    crossover: int
    """First length in steps of 256 at which Megatron is not the fastest any more, worked out from the fits."""

    @property
    def model(self) -> ModelSpec:
        """As its code runs it: every token sees every other."""
        return replace(model_preset(self.preset), num_layers=self.num_layers, causal=False)


FITS = (
    Fits(
        preset="gpt-12288",
        num_layers=1,
        fits={
            Method.MEGATRON_TS: (1.08e-10, 6.22e-6, 0.010117),
            Method.ULYSSES_Z: (1.03e-10, 5.07e-6, 0.093456),
            Method.MEGATRON_CZ: (1.03e-10, 5.89e-6, 0.093685),
            Method.METP: (1.04e-10, 6.81e-6, 0.112750),
        },
        crossover=58_112,
    ),
    Fits(
        preset="llama-66b",
        num_layers=5,
        fits={
            Method.MEGATRON_TS: (3.59e-10, 1.6e-5, 0.017448),
            Method.ULYSSES_Z: (3.41e-10, 1.2e-5, 0.316047),
            Method.MEGATRON_CZ: (3.53e-10, 1.4e-5, 0.342677),
            Method.METP: (3.33e-10, 2.0e-5, 0.290053),
        },
        crossover=59_136,
    ),
    Fits(
        preset="bert-1024",
        num_layers=24,
        fits={
            Method.MEGATRON_TS: (2.36e-10, 5.22e-6, 0.028366),
            Method.ULYSSES_Z: (2.41e-10, 7.30e-7, 0.162314),
            Method.MEGATRON_CZ: (2.30e-10, 3.37e-6, 0.222728),
            Method.METP: (3.28e-10, -1.2e-5, 1.368680),
        },
        crossover=30_976,
    ),
    Fits(
        preset="llama-7b",
        num_layers=32,
        fits={
            Method.MEGATRON_TS: (1.23e-9, 3.3e-5, 0.098259),
            Method.ULYSSES_Z: (1.05e-9, 2.7e-5, 0.970848),
            Method.MEGATRON_CZ: (1.05e-9, 2.7e-5, 0.970848),
            Method.METP: (1.18e-9, 3.9e-5, 1.436488),
        },
        crossover=55_040,
    ),
)

TABLE_5 = {
    "full": (329_728, 0.0),
    Method.MEGATRON_TS: (300_032, 11.80),
    Method.MEGATRON_CZ: (300_032, -0.13),
    Method.ULYSSES_Z: (300_032, 0.49),
    Method.METP: (112_128, 1.03),
}
"""What is left out -> longest sequence, per cent of time that the full set saves up to there."""
FOREST, SMOOTHING = "the forest", "smoothing"
TABLE_5_COSTS = {FOREST: (270_336, 1.29), SMOOTHING: (None, 0.04)}
"""The same of what is left out of the choice; the paper gives no length for smoothing."""
MEASURED = tuple(2**power for power in range(10, 18))
"""Lengths at which each method is measured for the learned costs, in tokens."""
NOISE = 0.02
"""Of measurements, relative."""
LAYERS_RUN = 8
"""Of the 96, what its authors ran on one node."""
SORTED_SEQUENCES = 400


def crossovers(**_: bool) -> Section:
    """Longest length for which Megatron's tensor and sequence parallel is the fastest method."""
    rows = []
    for held in FITS:
        grid = np.arange(STEP_TOKENS, LONGEST + 1, STEP_TOKENS)
        fitted = {method: np.polyval(fit, grid) for method, fit in held.fits.items()}
        closed = _closed_forms(held, grid)
        where = f"{held.preset}, {held.num_layers} layers"
        from_fits, from_closed = _first_ranges(fitted, grid), _first_ranges(closed, grid)
        rows.append(
            (
                f"{where}: megatron_ts fastest below (their fits)",
                f"{held.crossover:,}",
                f"{from_fits[0][1] + STEP_TOKENS:,}",
                f"{(from_fits[0][1] + STEP_TOKENS) / held.crossover - 1:+.1%}",
                f"the same arithmetic; then {_words(from_fits[1:])}",
            )
        )
        short = from_closed[0][1] + STEP_TOKENS if from_closed[0][0] is Method.MEGATRON_TS else 0
        rows.append(
            (
                f"{where}: megatron_ts fastest below (our closed forms)",
                f"{held.crossover:,}",
                f"{short:,}",
                f"{short / held.crossover - 1:+.1%}",
                f"then {_words(from_closed[1:]) or 'no other'}; their fits pay "
                f"{held.fits[Method.ULYSSES_Z][2] / held.num_layers * 1e3:.0f} ms a layer before the first token, most "
                f"of it to gather weights, ours {_overhead_ms(held):.1f} ms: their bytes over the links",
            )
        )
    return Section(
        title="ParaDySe: which method is fastest, by length",
        text=f"One sequence on 8 A100s, steps of {STEP_TOKENS} tokens up to {LONGEST:,}. Its fits are those of its "
        "code (its Figure 2 has no numbers); *published* is their crossover.",
        head=("quantity", "published", "reproduced", "difference", "why"),
        rows=rows,
    )


def _overhead_ms(held: Fits) -> float:
    """What a layer of sharded weights costs before the first token by our closed forms."""
    cost = AnalyticCost(model=held.model, cluster=cluster_preset(CLUSTER))
    scheme = uniform_scheme(held.num_layers, degree=DEGREE, method=Method.ULYSSES_Z)
    return cost.overhead_s(scheme) / held.num_layers * 1e3


def _closed_forms(held: Fits, grid: np.ndarray) -> dict[Method, np.ndarray]:
    cost = AnalyticCost(model=held.model, cluster=cluster_preset(CLUSTER))
    times_s = {}
    for method in METHODS:
        scheme = uniform_scheme(held.num_layers, degree=DEGREE, method=method)
        times_s[method] = cost.sequence_times_s(grid, scheme) + cost.overhead_s(scheme)
    return times_s


def _first_ranges(times_s: dict[Method, np.ndarray], grid: np.ndarray) -> list[tuple[Method, int]]:
    """Fastest method and the last length of each range in which it stays the fastest."""
    methods = list(times_s)
    fastest = np.argmin([times_s[method] for method in methods], axis=0)
    ends = [*np.flatnonzero(np.diff(fastest)), len(grid) - 1]
    return [(methods[fastest[end]], int(grid[end])) for end in ends]


def _words(ranges: list[tuple[Method, int]]) -> str:
    return ", ".join(f"{method} up to {end:,}" for method, end in ranges)


def ablation(*, quick: bool) -> Section:
    """Table 5: GPT on GRCh38 with one method removed from the pool, short sequences first."""
    lengths = np.sort(synthetic_lengths("grch38", 60 if quick else SORTED_SEQUENCES, 0))
    full = sorted_run(METHODS, lengths, gpt())
    rows = []
    for left_out, (published_longest, published_saving) in TABLE_5.items():
        found = (
            full if left_out == "full" else sorted_run(tuple(m for m in METHODS if m is not left_out), lengths, gpt())
        )
        longest, times_s = found
        shared = min(len(times_s), len(full[1]))
        saving = 1 - float(np.sum(full[1][:shared])) / float(np.sum(times_s[:shared]))
        name = "all four methods" if left_out == "full" else f"without {left_out}"
        rows.append(
            (
                f"{name}: longest sequence",
                f"{published_longest:,}",
                f"{longest:,}",
                f"{longest / published_longest - 1:+.0%}",
                "ours counts what each layer keeps; theirs is a fit to peaks, and its buffers never shrink",
            )
        )
        if left_out != "full":
            rows.append(
                (
                    f"{name}: time that the full set saves",
                    f"{published_saving:.2f} %",
                    f"{saving * 100:.2f} %",
                    f"{saving * 100 - published_saving:+.2f} points",
                    "over the sequences that both can run",
                )
            )
    return Section(
        title="ParaDySe, Table 5: what each method carries",
        text=f"GPT of hidden size 12,288, {LAYERS_RUN} layers (what its authors ran), 8 A100s of 80 GB, GRCh38-like "
        f"lengths in order, one sequence a step, policy `paradyse` on our closed forms; {len(lengths)} sequences of "
        "the published histogram.",
        head=("quantity", "published", "reproduced", "difference", "why"),
        rows=rows,
        after=_order(rows),
    )


def _order(rows: list[tuple[str, ...]]) -> str:
    """Which removal costs most time and which most reach, in theirs and in ours."""

    def worst(word: str, column: int, *, lowest: bool) -> str:
        held = [row for row in rows if word in row[0] and row[0].startswith("without")]
        value = {row[0].split(":")[0]: float(row[column].replace(",", "").replace(" %", "")) for row in held}
        return (min if lowest else max)(value, key=lambda name: value[name])

    return (
        f"Most time is carried by: published {worst('saves', 1, lowest=False)}, reproduced "
        f"{worst('saves', 2, lowest=False)}. Most reach: published {worst('longest', 1, lowest=True)}, reproduced "
        f"{worst('longest', 2, lowest=True)}."
    )


def choices(*, quick: bool) -> Section:
    """Table 5's other rows: costs without the forest, and choices without smoothing."""
    lengths = np.sort(synthetic_lengths("grch38", 60 if quick else SORTED_SEQUENCES, 0))
    rows: list[tuple[str, ...]] = []
    runs = {
        "": learned_run(HybridCost, lengths),
        FOREST: learned_run(FittedCost, lengths),
        SMOOTHING: learned_run(HybridCost, lengths, smoothing=0.0),
    }
    longest, full_s, switches = runs[""]
    rows.append(("all: longest sequence", f"{TABLE_5['full'][0]:,}", f"{longest:,}", "", _LONGEST))
    for left_out, (published_longest, published_saving) in TABLE_5_COSTS.items():
        other_longest, times_s, other_switches = runs[left_out]
        shared = min(len(times_s), len(full_s))
        saving = 100 * (1 - float(full_s[:shared].sum() / times_s[:shared].sum()))
        why = f"{other_switches} switches of methods between steps, {switches} with it"
        published = f"{published_longest:,}" if published_longest else ""
        rows.append((f"without {left_out}: longest sequence", published, f"{other_longest:,}", "", _LONGEST))
        rows.append(
            (
                f"without {left_out}: time that it saves",
                f"{published_saving:.2f} %",
                f"{saving:.2f} %",
                f"{saving - published_saving:+.2f} points",
                why + ("; a switch costs nothing here, and no buffers stay" if left_out is SMOOTHING else ""),
            )
        )
    return Section(
        title="ParaDySe, Table 5: the forest and smoothing",
        text=f"As before, but methods are chosen by costs learned from {len(MEASURED)} lengths of each method, up to "
        f"{MEASURED[-1]:,} tokens, our closed forms with {NOISE:.0%} of noise; the times are those of the closed "
        "forms. *Without the forest*: a polynomial alone, inside the measured lengths too.",
        head=("quantity", "published", "reproduced", "difference", "why"),
        rows=rows,
    )


_LONGEST = "what the learned bytes let a device hold beyond the measured lengths"


def learned_run(make_cost: type[ProfiledCost], lengths: np.ndarray, **options: float) -> tuple[int, np.ndarray, int]:
    """Longest sequence that is planned, its seconds and those of all before it in truth, and switches of methods."""
    cost, truth, schemes = learned_costs(make_cost)
    longest = max(cost.max_tokens(scheme, num_devices=DEGREE) for scheme in schemes)
    planner = _planner(cost, lengths[lengths <= longest], METHODS, LAYERS_RUN)
    planner = replace(planner, problem=replace(planner.problem, **options))
    times_s, mixes = [], []
    for step, length in enumerate(lengths[lengths <= longest].tolist()):
        (pipeline,) = planner(GlobalBatch(step=step, ids=(0,), lengths=(length,))).pipelines
        methods = pipeline.micro_batches[0].methods or pipeline.scheme.methods
        times_s.append(truth.time_s([length], replace(pipeline.scheme, methods=methods)))
        mixes.append(sorted(methods))
    return int(longest), np.array(times_s), sum(a != b for a, b in pairwise(mixes))


def learned_costs(make_cost: type[ProfiledCost]) -> tuple[ProfiledCost, AnalyticCost, list[PipelineConfig]]:
    """Costs learned from measured lengths of every method, those they are learned from, and the methods' schemes."""
    model, cluster = gpt(), cluster_preset(CLUSTER)
    truth, rng = AnalyticCost(model=model, cluster=cluster), np.random.default_rng(0)
    schemes = [uniform_scheme(LAYERS_RUN, degree=DEGREE, method=method) for method in METHODS]
    cost = make_cost([(scheme, _measure(truth, scheme, rng)) for scheme in schemes], model=model, cluster=cluster)
    return cost, truth, schemes


def _measure(truth: AnalyticCost, scheme: PipelineConfig, rng: np.random.Generator) -> ProfileTable:
    """A profile of one scheme as its closed forms and noise would give it."""
    num_held = held_params(truth.model, scheme, stage=0)
    state = state_bytes(truth.model, num_devices=DEGREE, dtype=truth.dtype, num_held=num_held)
    rows = tuple(
        ProfileRow(
            lengths=(length,), time_s=truth.time_s([length], scheme) * float(np.exp(NOISE * rng.standard_normal())),
            spread_s=0.0, kept_bytes=int(truth.peak_bytes(length, scheme, num_devices=DEGREE)) - state,
        )
        for length in MEASURED
    )  # fmt: skip
    return ProfileTable(
        model_digest=truth.model.digest, model_name=truth.model.name, device=truth.cluster.device.name,
        dtype=truth.dtype, recompute=False, num_ranks=DEGREE, update_s=0.0, rows=rows,
    )  # fmt: skip


def gpt() -> ModelSpec:
    return replace(model_preset("gpt-12288"), num_layers=LAYERS_RUN, causal=False)


def _space(methods: tuple[Method, ...]) -> SearchSpace:
    return SearchSpace(max_degree=DEGREE, max_stages=1, methods=methods, recompute=RecomputeMode.NONE)


def _planner(cost: CostModel, lengths: np.ndarray, methods: tuple[Method, ...], num_layers: int) -> Planner:
    if not len(lengths):
        raise InfeasibleError(f"no sequence fits {CLUSTER}")
    problem = make_problem(
        cost, cluster=cluster_preset(CLUSTER), num_layers=num_layers, max_length=int(lengths[-1]),
        search_space=_space(methods), samples=[lengths],
    )  # fmt: skip
    return Planner(policy="paradyse", problem=problem)


def sorted_run(methods: tuple[Method, ...], lengths: np.ndarray, model: ModelSpec) -> tuple[int, np.ndarray]:
    """Longest sequence that fits, and seconds of each sequence up to it, one a step."""
    cluster = cluster_preset(CLUSTER)
    cost = AnalyticCost(model=model, cluster=cluster)
    schemes = _space(methods).schemes(model.num_layers, cluster)
    longest = max(cost.max_tokens(scheme, num_devices=DEGREE) for scheme in schemes if scheme.degree == DEGREE)
    fitting = lengths[lengths <= longest]
    planner = _planner(cost, fitting, methods, model.num_layers)
    times_s = [
        planner(GlobalBatch(step=step, ids=(0,), lengths=(int(length),))).time_s for step, length in enumerate(fitting)
    ]
    return int(longest), np.array(times_s)
