"""DCP, Figures 5 and 10: communication of sequence parallel by length, and what less recompute is worth by length."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from contests import setting
from paper_dcp import AS_PUBLISHED
from paper_page import Figure, Row
from plots import Panel, picture

from lengthwise.core.pipeline_config import Method, spread, uniform_scheme
from lengthwise.core.specs import model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.dcp.recompute_levels import BucketSetting, fastest_setting
from lengthwise.plan.space.candidate import Candidate, make_candidates
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.session.planning_args import make_cluster

MODEL = "transformer-1d-5b"
DEGREES = (2, 4, 8, 16, 32)
LENGTHS = (4096, 16_384, 65_536, 262_144)
GAIN = (1.20, 1.25)
"""Of DCP-intra over DCP-inter for most lengths below 200K (section 4.4)."""
LIMIT = 200_000


def _k(length: float) -> str:
    return f"{length / 1024:g}K"


def communication() -> Figure:
    """Figure 5: the part of a micro-batch that Ulysses spends in all-to-all, by degree and length."""
    cluster = make_cluster("H200-141GB", 32, devices_per_node=8, memory_gib=80)
    model = model_preset(MODEL)
    cost = AnalyticCost(model=model, cluster=cluster)
    shares: dict[str, list[float]] = {f"{_k(length)} tokens": [] for length in LENGTHS}
    for degree in DEGREES:
        scheme = uniform_scheme(model.num_layers, degree=degree, method=Method.ULYSSES)
        lengths = np.array(LENGTHS)
        parts = cost.comm_times_s(lengths, scheme) / (cost.sequence_times_s(lengths, scheme) + cost.overhead_s(scheme))
        for values, part in zip(shares.values(), parts.tolist()):
            values.append(100 * part)
    svg = picture(
        "DCP, Figure 5: communication of sequence parallel, Transformer-1D on H200s",
        Panel(
            title="one sequence, forward and backward", x_title="sequence parallel size",
            y_title="time in all-to-all (%)", bars=shares, groups=[f"SP {degree}" for degree in DEGREES],
        ),
        columns=1,
    )  # fmt: skip
    rows = tuple(
        Row(
            what=f"share of communication at SP {degree}, {_k(LENGTHS[0])} / {_k(LENGTHS[-1])} tokens",
            published="figure only",
            ours=f"{values[0][k]:.0f} % / {values[-1][k]:.0f} %",
            why="closed forms: bytes over data-sheet bandwidth; the figure is measured",
        )
        for values in [list(shares.values())]
        for k, degree in enumerate(DEGREES)
        if degree >= 8
    )
    text = "Closed forms of DeepSpeed-Ulysses, nodes of 8 H200s; beyond SP 8 the all-to-all crosses nodes."
    return Figure(svg=svg, rows=rows, text=text)


def recompute() -> Figure:
    """Figure 10: throughput of the best setting with free recompute over the best with full recompute, by length."""
    _, entry = setting(
        MODEL, "dcp-balanced", gpus=32, steps=1, device="H200-141GB", memory_gib=80, policies=("dcp-inter",),
        search_space=AS_PUBLISHED,
    )  # fmt: skip
    assert entry.problem is not None
    candidates = _every_count(entry.problem)
    lengths = [2048 * 2**k for k in range(4)] + list(range(32_768, 425_985, 16_384))
    settings = [(length, pair) for length in lengths if (pair := _settings(candidates, length))]
    gains = [(length, full.device_s / best.device_s) for length, (full, best) in settings]
    last = settings[-1][1][1].candidate.scheme
    svg = picture(
        "DCP, Figure 10: DCP-intra over DCP-inter by length, Transformer-1D on H200s of 80 GB",
        Panel(
            title="best setting of each", x_title="length (K tokens)", y_title="speed-up (x)",
            lines={"DCP-intra over DCP-inter": [(length / 1024, gain) for length, gain in gains]},
        ),
        columns=1,
    )  # fmt: skip
    short = [gain for length, gain in gains if length < LIMIT]
    inside = sum(GAIN[0] <= gain <= GAIN[1] for gain in short) / len(short)
    rows = (
        Row(
            what="speed-up below 200K tokens, from least to most", published="1.20x to 1.25x, most lengths",
            ours=f"{min(short):.2f}x to {max(short):.2f}x ({inside:.0%} within the published range)",
            why="a forward again is a third more at most; measured steps also hold what is not repeated",
        ),
        Row(
            what="speed-up of the longest sequence", published="figure only", ours=f"{gains[-1][1]:.2f}x",
            why=f"at SP {last.degree} it still recomputes {last.num_recomputed} of {last.num_layers} layers",
        ),
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Algorithm 1 on closed forms, 32 GPUs: each length with its best setting.")


def _every_count(problem: PlanningProblem) -> tuple[Candidate, ...]:
    """Ulysses groups of every degree with every number of recomputed layers."""
    schemes = {
        replace(candidate.scheme, recompute=spread(count, candidate.scheme.num_layers))
        for candidate in problem.candidates
        if candidate.num_stages == 1 and set(candidate.scheme.methods) <= {Method.ULYSSES, Method.DENSE}
        for count in range(candidate.scheme.num_layers + 1)
    }
    order = sorted(schemes, key=lambda scheme: (scheme.degree, scheme.num_recomputed))
    return make_candidates(order, problem.cost, num_devices=problem.num_devices)


def _settings(ulysses: Sequence[Candidate], length: int) -> tuple[BucketSetting, BucketSetting] | None:
    """The best setting with full recompute and the best of all; None where nothing holds the sequence."""
    full = [candidate for candidate in ulysses if all(candidate.scheme.recompute)]
    inter, intra = fastest_setting(length, full), fastest_setting(length, ulysses)
    return (inter, intra) if inter and intra else None
