"""What a run recorded at every step, as lines over steps: throughput, learning rate, gradient norm and memory."""

import math
from collections.abc import Callable

from lengthwise.core.wording import GIB
from lengthwise.report.charts.lines import LineStyle, Series, line_chart
from lengthwise.report.pages.run_figures import Figure, RunReport
from lengthwise.report.units import count, memory, number


def history_figures(run: RunReport) -> list[Figure]:
    """One figure for each quantity; those that the run did not record say so."""
    record = run.record
    device_bytes = record.device_memory_bytes
    limit = None if device_bytes is None else (device_bytes / GIB, f"memory of a device, {memory(device_bytes)}")

    def figure(
        title: str, column: str, y_title: str, value: Callable[[float], str] = number, *, zero: bool = True,
        caption: str = "", limit: tuple[float, str] | None = None,
    ) -> Figure:  # fmt: skip
        points = [
            (float(row["step"]), math.nan if row.get(column) is None else float(row[column])) for row in record.rows
        ]
        style = LineStyle(
            x_title="step", y_title=y_title, value=value, zero=zero, height=150, limit=limit, moments=record.moments
        )
        finite = [y for _, y in points if math.isfinite(y)]
        chart = line_chart([Series(name=title.lower(), points=tuple(points))], label=f"{title} over steps", style=style)
        missing = f"One step: {value(finite[0])}." if len(finite) == 1 else f"The run did not record it ({column})."
        return Figure(title=title, caption=caption, chart=chart, missing=missing)

    return [
        figure("Throughput", "perf/tokens_per_s", "tokens per second", count, caption="All ranks, padding left out."),
        figure("Memory", "memory/max_reserved_gib", "GiB", caption="Most that any rank held so far.", limit=limit),
        figure("Learning rate", "lr", "learning rate"),
        figure("Gradient norm", "grad_norm", "norm", caption="Before clipping."),
    ]
