"""SVG that needs neither script nor scaling: percentages across, pixels down, so text keeps its size on every screen.

A chart is as wide as its column. What has a shape (paths) lives in an inner drawing 1000 units wide that stretches
sideways only, with strokes that do not; ticks and labels are placed in per cent around it. Labels of the vertical axis
hang to the left of the drawing, in room that the page's style leaves; every second label of the horizontal one is
of class ``alt``, which narrow screens hide. Colours are CSS classes; see report.css.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar
from xml.sax.saxutils import escape, quoteattr

from lengthwise.report.charts.ticks import Axis

WIDTH = 1000
"""Units across the inner drawing."""
_TOP = 28
_BARE_TOP = 6
_BOTTOM = 44
_NUMBERS_SHOWN = 60
_Row = TypeVar("_Row")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One drawing with everything that must accompany it."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """(CSS class of the colour, words)."""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """The numbers that are drawn, as text."""


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """One element; underscores in attribute names stand for hyphens, ``class_`` for class. Content is not escaped."""
    names = " ".join(f"{k.rstrip('_').replace('_', '-')}={quoteattr(str(v))}" for k, v in attributes.items())
    opening = f"<{tag} {names}" if names else f"<{tag}"
    return f"{opening}>{content}</{tag}>" if content else f"{opening}/>"


def text(words: str, x: object, y: float, *, anchor: str = "start", class_: str = "tick", **attributes: object) -> str:
    """A line of text; escaped."""
    return element("text", escape(words), x=x, y=brief(y), text_anchor=anchor, class_=class_, **attributes)


def hint(words: str) -> str:
    """What is read when someone points at the element this goes into; escaped."""
    return element("title", escape(words)) if words else ""


def path(shape: str, class_: str, title: str = "") -> str:
    """A path in the stretched drawing, with words for who points at it."""
    return element("path", hint(title), d=shape, class_=class_)


def percent(fraction: float) -> str:
    """A position across the chart, rounded down, so that parts of a whole never reach beyond it."""
    return f"{brief(math.floor(fraction * 10_000 + 1e-6) / 100, 2)}%"


def brief(value: float, digits: int = 1) -> str:
    """A coordinate without needless digits."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def stretched(shapes: Iterable[str], height: float) -> str:
    """The inner drawing: ``WIDTH`` units across, ``height`` pixels down."""
    return element(
        "svg", "".join(shapes), x=0, y=0, width="100%", height=brief(height), viewBox=f"0 0 {WIDTH} {brief(height)}",
        preserveAspectRatio="none",
    )  # fmt: skip


def drawing(parts: Iterable[str], *, label: str, height: float, **attributes: object) -> str:
    """A whole chart that reads ``label`` aloud."""
    return element(
        "svg", hint(label) + "".join(parts), role="img", aria_label=label, class_="chart",
        width="100%", height=brief(height), **attributes,
    )  # fmt: skip


def plot(parts: Iterable[str], *, x: Axis, y: Axis, height: float, label: str, end_s: float | None = None) -> str:
    """A chart with both axes: grid and labels around ``parts``, which count pixels down from the top of the plot.

    With ``end_s``, the seconds that the whole width stands for, the page's script can zoom into the chart.
    """
    top = _TOP if y.title else _BARE_TOP
    inside = [*_grid(y, height), *parts, *_x_labels(x, height, is_zoomable=end_s is not None)]
    if y.title:
        inside.append(text(y.title, -54, -14, class_="axis-title"))
    body = element("g", "".join(inside), transform=f"translate(0 {top})")
    attributes = {} if end_s is None else {"data_end": f"{end_s:.6g}"}
    return drawing([body], label=label, height=top + height + _BOTTOM, **attributes)


def limit_line(name: str, share: float, height: float) -> tuple[str, str]:
    """A dashed line across the stretched drawing at ``share`` of its height, and its name for the chart around it."""
    down = (1 - share) * height
    return path(f"M0 {brief(down)}H{WIDTH}", "diagonal", name), text(name, "100%", down - 6, anchor="end")


def thinned_rows(rows: list[_Row]) -> tuple[_Row, ...]:
    """At most sixty rows, evenly taken, the last one always among them."""
    stride = -(-len(rows) // _NUMBERS_SHOWN)
    return tuple(rows[(len(rows) - 1) % stride :: stride]) if rows else ()


def shortened(words: str, most: int) -> str:
    """``words`` cut to ``most`` characters, the cut marked."""
    return words if len(words) <= most else words[: most - 1] + "…"


def _grid(y: Axis, height: float) -> list[str]:
    parts = []
    for tick, label in zip(y.ticks, y.labels):
        down = brief((1 - y.at(tick)) * height)
        class_ = "grid base" if tick == y.low else "grid"
        parts.append(element("line", x1=0, x2="100%", y1=down, y2=down, class_=class_))
        parts.append(text(label, -8, float(down) + 4, anchor="end"))
    return parts


def _x_labels(x: Axis, height: float, *, is_zoomable: bool) -> list[str]:
    parts = []
    for k, (tick, label) in enumerate(zip(x.ticks, x.labels)):
        place = {"data_at": brief(x.at(tick), 4)} if is_zoomable else {}
        class_ = "tick alt" if k % 2 and len(x.ticks) > 3 else "tick"
        parts.append(text(label, percent(x.at(tick)), height + 18, anchor="middle", class_=class_, **place))
    if x.title:
        parts.append(text(x.title, "100%", height + 37, anchor="end", class_="axis-title"))
    return parts
