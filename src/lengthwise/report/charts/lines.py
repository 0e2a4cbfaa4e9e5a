"""Line charts: something over steps or tokens, one line a run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lengthwise.report.charts.svg import WIDTH, Chart, brief, limit_line, path, plot, shortened, stretched, thinned_rows
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
    limit: tuple[float, str] | None = None
    """A value that is drawn as a dashed line, and its name."""
    moments: Mapping[float, str] = field(default_factory=dict)
    """Horizontal position -> words about when it was, said to who points at it."""


def line_chart(series: Sequence[Series], *, label: str, style: LineStyle) -> Chart | None:
    """The chart; None with fewer than two finite values, or one not positive on a logarithmic axis."""
    points = [point for line in series for point in line.finite]
    if len({x for x, _ in points}) < 2 or (style.log and min(y for _, y in points) <= 0):
        return None
    xs = [x for x, _ in points]
    are_whole = all(float(x).is_integer() for x in xs)
    x = range_axis(min(xs), max(xs), title=style.x_title, labels=style.x_labels, whole=are_whole)
    heights = [y for _, y in points] + ([style.limit[0]] if style.limit else [])
    y = value_axis(heights, title=style.y_title, labels=style.y_labels, zero=style.zero, log=style.log)
    shapes = [
        path(_outline(thin(line.points), x, y, style.height), f"line s{k % NUM_COLOURS}", line.name)
        for k, line in enumerate(series)
        if line.finite
    ]
    labels: list[str] = []
    if style.limit:
        value, name = style.limit
        line, words = limit_line(name, y.at(value), style.height)
        shapes.append(line)
        labels.append(words)
    drawn = stretched([*shapes, *_strips(series, x, style)], style.height)
    return Chart(
        svg=plot([drawn, *labels], x=x, y=y, height=style.height, label=label),
        legend=tuple(
            (f"s{k % NUM_COLOURS}", shortened(line.name, 60)) for k, line in enumerate(series) if len(series) > 1
        ),
        columns=(style.x_title, *(shortened(line.name, 40) for line in series)),
        rows=tuple(
            (f"{position:,.0f}", *(style.value(values[k]) if k in values else "" for k in range(len(series))))
            for position, values in _values(series)
        ),
    )


def thin(points: Sequence[Point]) -> list[Point]:
    """A bounded number of points that keep every spike: the lowest and the highest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    thinned: list[Point] = []
    stretches = _MOST_POINTS // 2
    for k in range(stretches):
        part = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        finite = [point for point in part if math.isfinite(point[1])] or list(part[:1])
        thinned += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return thinned


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


def _values(series: Sequence[Series]) -> tuple[tuple[float, dict[int, float]], ...]:
    """The values of all series by position: every position of few, an even choice of many."""
    values: dict[float, dict[int, float]] = {}
    for k, line in enumerate(series):
        for x, y in line.points:
            values.setdefault(x, {})[k] = y
    return thinned_rows(sorted(values.items()))


def _strips(series: Sequence[Series], x: Axis, style: LineStyle) -> Iterator[str]:
    """An invisible area around each position, which says the values there to who points at it."""
    values = [row for row in _values(series) if x.low <= row[0] <= x.high]
    edges = [x.low, *((left + right) / 2 for (left, _), (right, _) in pairwise(values)), x.high]
    for (position, by_series), low, high in zip(values, edges, edges[1:]):
        left, width = x.at(low) * WIDTH, (x.at(high) - x.at(low)) * WIDTH
        said = ", ".join(
            f"{shortened(series[k].name, 24)} {style.value(value)}" for k, value in sorted(by_series.items())
        )
        shape = f"M{brief(left)} 0h{brief(width)}v{style.height}h-{brief(width)}z"
        moment = f" ({style.moments[position]})" if position in style.moments else ""
        yield path(shape, "hit", f"{style.x_title} {position:,.0f}{moment}: {said}")
