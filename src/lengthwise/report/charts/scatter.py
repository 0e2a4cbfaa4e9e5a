"""Predicted against measured: on the diagonal the cost model is right."""

from collections.abc import Sequence

from lengthwise.report.charts.svg import (
    WIDTH,
    Chart,
    brief,
    element,
    hint,
    path,
    percent,
    plot,
    stretched,
    thinned_rows,
)
from lengthwise.report.charts.ticks import Axis, nice_ticks, second_labels
from lengthwise.report.units import rough_share, seconds, share

BAND = 0.1
"""Half the width of the shaded band, as a share of the measured time."""
_HEIGHT = 280
_MOST_POINTS = 500


def scatter_chart(points: Sequence[tuple[int, float, float]], *, label: str) -> Chart | None:
    """Step, predicted seconds and measured seconds of each point; None without any."""
    if not points:
        return None
    times = [time for _, *pair in points for time in pair]
    ticks = nice_ticks(min(times), max(times), most=5)
    labels = second_labels(ticks)
    x = Axis(low=ticks[0], high=ticks[-1], ticks=ticks, labels=labels, title="predicted step time")
    y = Axis(low=ticks[0], high=ticks[-1], ticks=ticks, labels=labels, title="measured step time")
    stride = -(-len(points) // _MOST_POINTS)
    dots = [
        _dot(x.at(predicted), y.at(measured), _words(step, predicted, measured))
        for step, predicted, measured in points[::stride]
    ]
    guides = [path(_band(x, y), "band"), path(f"M0 {_HEIGHT}L{WIDTH} 0", "diagonal")]
    return Chart(
        svg=plot([stretched(guides, _HEIGHT), *dots], x=x, y=y, height=_HEIGHT, label=label),
        legend=(("s0", "one step"), ("band", f"within {rough_share(BAND)} of the measured time")),
        columns=("step", "predicted", "measured", "error"),
        rows=thinned_rows([(f"{s:,}", seconds(p), seconds(m), share(p / m - 1, signed=True)) for s, p, m in points]),
    )


def _words(step: int, predicted_s: float, measured_s: float) -> str:
    return f"step {step:,}: predicted {seconds(predicted_s)}, measured {seconds(measured_s)}"


def _dot(across: float, up: float, title: str) -> str:
    return element("circle", hint(title), cx=percent(across), cy=brief((1 - up) * _HEIGHT), r=4, class_="dot s0")


def _band(x: Axis, y: Axis) -> str:
    """The region where predicted / measured is within ``BAND`` of 1, cut off at the edges of the plot."""

    def corner(predicted: float, measured: float) -> str:
        return f"{brief(x.at(predicted) * WIDTH)} {brief((1 - y.at(measured)) * _HEIGHT)}"

    def edge(factor: float) -> list[tuple[float, float]]:
        """Ends, inside the plot, of the line predicted = factor * measured."""
        low, high = max(x.low, x.low / factor), min(x.high, x.high / factor)
        return [(factor * m, m) for m in (max(low, 0.0), max(high, low))]

    (under_0, under_1), (over_0, over_1) = edge(1 - BAND), edge(1 + BAND)
    outline = [under_0, under_1, (x.high, y.high), over_1, over_0, (x.low, y.low)]
    return "M" + "L".join(corner(*point) for point in outline) + "z"
