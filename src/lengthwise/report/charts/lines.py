"""Line charts: something over steps or tokens, one line a run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.report.charts.svg import WIDTH, Chart, brief, path, plot, shortened, stretched, thinned_rows
from lengthwise.report.charts.ticks import Axis, Labels, plain_labels, range_axis, value_axis
from lengthwise.report.units import number

NUM_COLOURS = 6
_MOST_POINTS = 400
"""More would not be seen on a screen; see :func:`thin`."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line. Points whose value is not finite leave a gap."""

    name: str
    points: tuple[Point, ...]

    @property
    def finite(self) -> list[Point]:
        """The points that can be drawn."""
        return [point for point in self.points if math.isfinite(point[1])]


@dataclass(frozen=True, kw_only=True)
class LineStyle:
    """What the axes of a line chart say."""

    x_title: str
    y_title: str
    x_labels: Labels = plain_labels
    y_labels: Labels = plain_labels
    value: Callable[[float], str] = number
    """How the table below writes a value."""
    zero: bool = False
    """The vertical axis starts at zero."""
    log: bool = False
    height: int = 220


def line_chart(series: Sequence[Series], *, label: str, style: LineStyle) -> Chart | None:
    """The chart; None with fewer than two finite values, or one not positive on a logarithmic axis."""
    points = [point for one in series for point in one.finite]
    if len({x for x, _ in points}) < 2 or (style.log and min(y for _, y in points) <= 0):
        return None
    xs = [x for x, _ in points]
    whole = all(float(x).is_integer() for x in xs)
    x = range_axis(min(xs), max(xs), title=style.x_title, labels=style.x_labels, whole=whole)
    y = value_axis([y for _, y in points], title=style.y_title, labels=style.y_labels, zero=style.zero, log=style.log)
    shapes = [
        path(_outline(thin(one.points), x, y, style.height), f"line s{k % NUM_COLOURS}", one.name)
        for k, one in enumerate(series)
        if one.finite
    ]
    return Chart(
        svg=plot([stretched(shapes, style.height)], x=x, y=y, height=style.height, label=label),
        legend=tuple(
            (f"s{k % NUM_COLOURS}", shortened(one.name, 60)) for k, one in enumerate(series) if len(series) > 1
        ),
        columns=(style.x_title, *(shortened(one.name, 40) for one in series)),
        rows=_rows(series, style),
    )


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most ``most`` points that keep every spike: the lowest and the highest of each stretch."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    stretches = most // 2
    for k in range(stretches):
        part = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        finite = [point for point in part if math.isfinite(point[1])] or list(part[:1])
        kept += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return kept


def _outline(points: Sequence[Point], x: Axis, y: Axis, height: float) -> str:
    commands, pen = [], "M"
    for across, value in points:
        if not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{brief(x.at(across) * WIDTH)} {brief((1 - y.at(value)) * height)}")
        if pen == "M":
            commands.append("h0")  # a lone point becomes a dot: its line has round ends
        pen = "L"
    return "".join(commands)


def _rows(series: Sequence[Series], style: LineStyle) -> tuple[tuple[str, ...], ...]:
    values: dict[float, dict[int, float]] = {}
    for k, one in enumerate(series):
        for x, y in one.points:
            values.setdefault(x, {})[k] = y
    return thinned_rows([
        (f"{x:,.0f}", *(style.value(found[k]) if k in found else "" for k in range(len(series))))
        for x, found in sorted(values.items())
    ])  # fmt: skip
