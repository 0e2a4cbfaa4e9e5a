"""Hydraulis, Figures 1, 4 and 16a: what its published costs say of schemes, one by one."""

import numpy as np
from cells import Cell
from hydraulis_cost import TABLES
from paper_page import Figure, Row
from plots import Panel, picture

from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate

THRESHOLD = 0.85
"""Of the best throughput, which UtilLen is the length of (appendix C)."""


def _name(candidate: Candidate) -> str:
    return f"<{candidate.scheme.degree},{candidate.num_stages}>"


def _length_labels(ticks: list[float]) -> tuple[str, ...]:
    return tuple(f"{tick / 1000:g}K" if tick >= 1000 else f"{tick:g}" for tick in ticks)


def attention() -> Figure:
    """Figure 1, right: one sequence of N K tokens against N sequences of 1K in one pack."""
    lengths = 1024 * np.arange(1, 33)
    lines = {}
    for degree in (2, 4, 8):
        a_ms = TABLES["llama-7b"].fits_ms[degree, 1][0]
        lines[f"one, TP {degree}"] = list(zip(lengths / 1024, a_ms * lengths**2.0))
        lines[f"1K each, TP {degree}"] = list(zip(lengths / 1024, a_ms * 1024**2 * (lengths / 1024)))
    svg = picture(
        "Hydraulis, Figure 1: attention of one sequence and of packed sequences, LLaMA 7B",
        Panel(
            title="all layers, forward and backward",
            x_title="tokens of the pack (K)",
            y_title="attention (ms)",
            lines=lines,
            log_y=True,
        ),
        columns=1,
    )
    row = Row(
        what="one sequence of 32K over 32 packed ones of 1K (attention)", published=20.0,
        ours=float(lines["one, TP 8"][-1][1] / lines["1K each, TP 8"][-1][1]), unit="x",
        why="the squared term alone, without launches and idle units of short sequences; theirs is measured",
    )  # fmt: skip
    return Figure(svg=svg, rows=(row,), text="The squared term of the published fits on A800s (tensor parallel).")


def trade_offs() -> Figure:
    """Figure 4: throughput of 16 GPUs, and the longest sequence a pipeline holds."""
    cell = Cell(model="llama-13b", num_devices=16, data="cc")
    lengths = np.array([1024, 4096, 16_384, 32_768])
    candidates = [each for each in cell.problem.candidates if each.num_devices <= 16]
    rates = {}
    for candidate in candidates:
        times_s = candidate.times_s(lengths) + candidate.overhead_s
        rate = lengths / times_s * (16 // candidate.num_devices)
        rates[_name(candidate)] = np.where(lengths <= candidate.max_tokens, rate, np.nan)
    order = sorted(candidates, key=lambda each: (each.num_devices, each.scheme.degree))
    groups = [_name(candidate) for candidate in order]
    bars = {
        f"{length // 1024}K tokens": [float(r) if np.isfinite(r := rates[name][k]) else None for name in groups]
        for k, length in enumerate(lengths)
    }
    svg = picture(
        "Hydraulis, Figure 4: throughput and reach of schemes <TP,PP>, LLaMA 13B on 16 A800s",
        Panel(
            title="one sequence a micro-batch, many of them; no bar: out of memory", x_title="scheme",
            y_title="tokens/s of 16 GPUs", bars=bars, groups=groups,
        ),
        Panel(
            title="longest sequence that fits", x_title="scheme", y_title="K tokens",
            bars={"longest": [candidate.max_tokens / 1024 for candidate in order]}, groups=groups,
        ),
        columns=1,
    )  # fmt: skip
    by_name = {_name(candidate): candidate for candidate in candidates}
    rows = tuple(
        Row(
            what=f"{many} over {few}, {words}", published="figure only", ours=f"{value:.2f}x",
            why="as its text says: more GPUs a pipeline compute fewer tokens per GPU and hold longer sequences",
        )
        for few, many in (("<2,1>", "<8,1>"), ("<4,1>", "<8,1>"))
        for words, value in (
            ("tokens/s at 4K", rates[many][1] / rates[few][1]),
            ("longest sequence", by_name[many].max_tokens / by_name[few].max_tokens),
        )
        if few in by_name and many in by_name
    )  # fmt: skip
    return Figure(svg=svg, rows=rows, text="Published fits and memory model; 16 GPUs of equal pipelines.")


def efficiency() -> Figure:
    """Figure 16a: tokens per second against length, and where they level off."""
    table = TABLES["llama-13b"]
    lengths = 2.0 ** np.arange(6, 15.01, 0.125)
    lines, rows = {}, []
    for degree in (1, 2, 4, 8):
        a_ms, b_ms, c_ms = table.fits_ms[degree, 1]
        rate = 1e3 * lengths / (a_ms * lengths**2 + b_ms * lengths + c_ms) / degree
        lines[f"TP {degree}"] = list(zip(lengths, rate))
        reached = float(lengths[np.argmax(rate >= THRESHOLD * rate.max())])
        rows.append(
            Row(
                what=f"UtilLen of TP {degree}, PP 1 (85 % of the best tokens/s)",
                published=float(table.util_tokens[degree]), ours=reached, unit="tokens",
                why="ours is read off its fits, whose constant every micro-batch pays; theirs off measurements",
            )
        )  # fmt: skip
    model = model_preset("llama-13b")
    closed = AnalyticCost(model=model, cluster=cluster_preset("2x8xA800-80GB"))
    for degree in (2, 4, 8):
        scheme = uniform_scheme(model.num_layers, degree=degree, method=Method.MEGATRON_TS)
        rows.append(
            Row(
                what=f"UtilLen of TP {degree}, PP 1, by our closed forms",
                published=float(table.util_tokens[degree]), ours=float(closed.util_tokens(scheme)), unit="tokens",
                why="closed forms have launches alone as a constant, a third of that of its fits",
            )
        )  # fmt: skip
    svg = picture(
        "Hydraulis, Figure 16a: efficiency of a scheme by length, LLaMA 13B",
        Panel(
            title="one sequence a micro-batch, forward and backward", x_title="length (tokens)",
            y_title="tokens/s per GPU", lines=lines, log_x=True, x_labels=_length_labels,
        ),
        columns=1,
    )  # fmt: skip
    text = "Its fits a l² + b l + c, beyond the memory of a device too; *published* is UtilLen of its code."
    return Figure(svg=svg, rows=tuple(rows), text=text)
