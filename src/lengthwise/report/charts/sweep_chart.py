"""A ratio over sizes that grow by factors: one line a setting, a tick at every size that was tried."""

import math
from collections.abc import Callable, Sequence

from lengthwise.report.charts.lines import NUM_COLOURS, Series
from lengthwise.report.charts.svg import WIDTH, Chart, brief, element, hint, path, percent, plot, stretched
from lengthwise.report.charts.ticks import Axis, value_axis
from lengthwise.report.units import ratio, token_count

HEIGHT = 220
MOST_LABELS = 10


def sweep_chart(
    series: Sequence[Series], *, label: str, x_title: str, y_title: str, size: Callable[[float], str] = token_count
) -> Chart | None:
    """The chart, with a dot at every point; None with fewer than two sizes.

    Args:
        series: lines; each point is a size above 0 and the ratio there.
        label: what the chart reads aloud.
        x_title: what grows.
        y_title: of what to what the ratio is.
        size: writes a size under its tick and in the table.
    """
    sizes = sorted({x for line in series for x, _ in line.points})
    if len(sizes) < 2:
        return None
    ticks = tuple(sizes[:: -(-len(sizes) // MOST_LABELS)])
    x = Axis(low=sizes[0], high=sizes[-1], ticks=ticks, labels=tuple(map(size, ticks)), title=x_title, log=True)
    y = value_axis([1.0, *(ratio for line in series for _, ratio in line.points)], title=y_title)
    shapes = [path(_outline(line, x, y), f"line s{k % NUM_COLOURS}", line.name) for k, line in enumerate(series)]
    dots = [
        element(
            "circle", hint(f"{line.name}, {size(across)}: {ratio(value)}"), cx=percent(x.at(across)),
            cy=brief((1 - y.at(value)) * HEIGHT), r=4, class_=f"dot s{k % NUM_COLOURS}",
        )
        for k, line in enumerate(series)
        for across, value in line.points
    ]  # fmt: skip
    values = [dict(line.points) for line in series]
    return Chart(
        svg=plot([stretched(shapes, HEIGHT), *dots], x=x, y=y, height=HEIGHT, label=label),
        legend=tuple((f"s{k % NUM_COLOURS}", line.name) for k, line in enumerate(series) if len(series) > 1),
        columns=(x_title, *(line.name for line in series)),
        rows=tuple((size(across), *(ratio(of.get(across, math.nan)) for of in values)) for across in sizes),
    )


def _outline(line: Series, x: Axis, y: Axis) -> str:
    """The path through the points, in the stretched drawing."""
    places = [f"{brief(x.at(across) * WIDTH)} {brief((1 - y.at(value)) * HEIGHT)}" for across, value in line.points]
    return "M" + "L".join(places)
