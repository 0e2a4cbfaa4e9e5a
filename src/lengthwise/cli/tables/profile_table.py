"""What `lengthwise profile` prints: every pack's time and fit error, and the fitted coefficients."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.core.cost import ProfileTable
from lengthwise.session.console import stdout

if TYPE_CHECKING:
    from rich.table import Table

    from lengthwise.cost.profiled.accuracy import Extrapolation, ModelErrors
    from lengthwise.cost.profiled.fitted import Fit

_log = logging.getLogger("lengthwise")
LEAST_SHARE = 0.8
"""Of the time of a pack alone, divided by the ranks that share it: what caches do not explain."""
_PLACES = {"within": "within a node", "across": "across nodes", "host": "to and from the host"}


def profile_document(table: ProfileTable, fitted: "Fit", out: Path, unseen: "Sequence[ModelErrors]") -> dict[str, Any]:
    """The JSON document of a profile; ``unseen``: errors on rows that were left out."""
    errors = {model.name: {"median": model.median, "worst": model.worst} for model in unseen}
    document = {
        "profile": str(out),
        "model": table.model_name,
        "device": table.device,
        "dtype": table.dtype,
        "num_ranks": table.num_ranks,
        "update_s": table.update_s,
        "a_s": fitted.a_s,
        "b_s": fitted.b_s,
        "c_s": fitted.c_s,
        "bytes_per_token": fitted.bytes_per_token,
        "median_error": fitted.median_error,
        "shared": [asdict(part) for part in table.shared],
        "links": table.links and asdict(table.links),
        "rows": [
            {
                **{name: value for name, value in asdict(row).items() if name != "spread_s"},
                "residual": residual,
            }
            for row, residual in zip(table.rows, fitted.time_residuals)
        ],
    }
    return {**document, "leave_out": errors} if errors else document


def print_profile(table: ProfileTable, fitted: "Fit", out: Path, unseen: "Sequence[ModelErrors]") -> None:
    """Print the rows of a profile, its fit, and how far off predictions of rows are that were left out."""
    from rich.table import Table

    shown = Table(title=f"{table.model_name} on {table.num_ranks} x {table.device}, {table.dtype}")
    for heading in ("pack", "time", "+-", "fit error", "kept"):
        shown.add_column(heading, justify="left" if heading == "pack" else "right")
    for row, residual in zip(table.rows, fitted.time_residuals):
        shown.add_row(
            pack_name(row.lengths), f"{row.time_s * 1e3:,.1f} ms", f"{row.spread_s / row.time_s:.0%}",
            f"{residual:+.1%}", f"{row.kept_bytes / 2**20:,.1f} MiB",
        )  # fmt: skip
    console = stdout()
    console.print(shown)
    console.print(_parts_table(table))
    for part in table.shared:
        alone = {row.lengths: row.time_s for row in table.rows}
        ratios = ", ".join(f"{pack_name(row.lengths)}: {row.time_s / alone[row.lengths]:.2f}" for row in part.rows[-3:])
        console.print(f"time shared by {part.degree} ranks ({part.method}) over time alone: {ratios}", soft_wrap=True)
        if too_fast := [row for row in part.rows if row.time_s * part.degree < LEAST_SHARE * alone[row.lengths]]:
            _log.warning(
                "%s took less than one rank's share of their time alone where %d ranks shared them (%s): others "
                "computed beside them then; profile again on an idle machine",
                ", ".join(pack_name(row.lengths) for row in too_fast), part.degree, part.method,
            )  # fmt: skip
    for place, link in asdict(table.links).items() if table.links else ():
        if link:
            rate = f"{link['bytes_per_s'] / 1e9:,.2f} GB/s, {link['call_s'] * 1e3:.2f} ms a call"
            console.print(f"links {_PLACES[place]}: {rate}", soft_wrap=True)
    console.print(
        f"T = {fitted.a_s:.3g} s l^2 + {fitted.b_s:.3g} s l per sequence + {fitted.c_s:.3g} s per micro-batch; "
        f"{fitted.bytes_per_token / 1024:,.1f} KiB per token; update {table.update_s * 1e3:.1f} ms; "
        f"median fit error {fitted.median_error:.1%}. Written to {out}",
        soft_wrap=True,
    )
    for model in unseen:
        console.print(
            f"rows it has not seen, {model.name}: off by {model.median:.1%} (median), {model.worst:.1%} (worst)"
        )


def accuracy_document(errors: "Sequence[ModelErrors]", beyond: "Sequence[Extrapolation]") -> dict[str, Any]:
    """What a profile's JSON document says of cross-validated errors and of lengths beyond; empty without any."""
    rows = [
        {"cost": of.name, "degree": of.degree, "method": of.method, "median": of.median, "worst": of.worst}
        for of in errors
    ]
    return {"cross_validation": rows, "beyond": list(map(asdict, beyond))} if rows else {}


def print_accuracy(errors: "Sequence[ModelErrors]", beyond: "Sequence[Extrapolation]") -> None:
    """Print how far off costs are on fifths of the rows that they have not seen, and how sure beyond the longest."""
    from rich.table import Table

    if not errors:
        return
    longer = {(of.name, of.degree, of.method): [] for of in errors}  # type: dict[tuple[str, int, str], list[Extrapolation]]
    for answer in beyond:
        longer[answer.name, answer.degree, answer.method].append(answer)
    headings = [f"{answer.num_tokens:,} tokens" for answer in next(iter(longer.values()))]
    shown = Table(title="costs on rows they have not seen (cross-validated), and beyond the longest measured")
    for heading in ("method", "ranks", "plan.cost", "median error", "worst", *headings):
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    for of in errors:
        bars = (
            f"{answer.time_s:.3g} s {answer.low_s / answer.time_s - 1:+.0%} {answer.high_s / answer.time_s - 1:+.0%}"
            for answer in longer[of.name, of.degree, of.method]
        )
        shown.add_row(of.method, str(of.degree), of.name, f"{of.median:.1%}", f"{of.worst:.1%}", *bars)
    stdout().print(shown)


def _parts_table(table: ProfileTable) -> "Table":
    """Attention and feed-forward of one layer, for single sequences under every method."""
    from rich.table import Table

    shown = Table(title="one layer, forward and backward, without recompute")
    for heading in ("method", "ranks", "tokens", "attention", "feed-forward", "attention", "feed-forward"):
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    measured = [("dense", 1, table.rows), *((part.method, part.degree, part.rows) for part in table.shared)]
    for method, degree, rows in measured:
        for row in rows:
            if len(row.lengths) == 1 and (parts := row.parts):
                shown.add_row(
                    method, str(degree), f"{row.lengths[0]:,}",
                    *(f"{seconds * 1e3:,.2f} ms" for seconds in (parts.attention_s, parts.ffn_s)),
                    *(f"{size / 2**20:,.2f} MiB" for size in (parts.attention_bytes, parts.ffn_bytes)),
                )  # fmt: skip
    return shown


def pack_name(lengths: tuple[int, ...]) -> str:
    """Runs of equal lengths, such as ``1 x 4,096 + 8 x 512``."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1][0] += 1
        else:
            runs.append([1, length])
    return " + ".join(f"{count} x {length:,}" for count, length in runs)
