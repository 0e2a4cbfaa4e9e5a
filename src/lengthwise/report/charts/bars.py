"""Bars that lie: policies side by side, and one bar cut into shares. Words stand above a bar, so none is too narrow."""

from collections.abc import Callable, Sequence

from lengthwise.report.charts.svg import Chart, drawing, element, hint, percent, shortened, text
from lengthwise.report.units import number, ratio, share

_ROW = 46
_THICK = 16


def bar_chart(
    bars: Sequence[tuple[str, float | None]],
    *,
    label: str,
    quantity: str,
    value: Callable[[float | None], str] = number,
    relative: bool = False,
    full: float | None = None,
) -> Chart | None:
    """One bar a name, its value at the right; None when no value is known.

    Args:
        bars: names and values; None for a value that is not known.
        label: what the chart shows, for who cannot see it.
        quantity: what the values are, for the table.
        value: how a value is written.
        relative: also write each as a multiple of the first.
        full: the value of a whole bar; the largest if not given.
    """
    largest = max((v for _, v in bars if v is not None), default=0.0)
    if all(v is None for _, v in bars):
        return None
    total = full or largest
    first = bars[0][1] if relative else None
    parts, rows = [], []
    for k, (name, amount) in enumerate(bars):
        times = ratio(amount / first) if first and amount is not None else ""
        words = f"{value(amount)}  ({times})" if times else value(amount)
        width = max(0.0, amount or 0.0) / total if total > 0 else 0.0
        said = hint(f"{name}: {words}")
        parts += [
            text(shortened(name, 24), 0, k * _ROW + 14, class_="bar-name"),
            text(words, "100%", k * _ROW + 14, anchor="end", class_="bar-value"),
            element("rect", x=0, y=k * _ROW + 20, width="100%", height=_THICK, class_="track"),
            element("rect", said, x=0, y=k * _ROW + 20, width=percent(width), height=_THICK, class_=f"fill s{k % 6}"),
        ]
        rows.append((name, value(amount), times) if relative else (name, value(amount)))
    columns = ("run", quantity, "of the first") if relative else ("run", quantity)
    return Chart(svg=drawing(parts, label=label, height=len(bars) * _ROW - 6), columns=columns, rows=tuple(rows))


def share_bar(parts: Sequence[tuple[str, str, float]], *, label: str) -> Chart | None:
    """One bar cut into (name, CSS class, amount); the legend carries the shares. None when all is nothing."""
    total = sum(amount for _, _, amount in parts)
    if total <= 0:
        return None
    pieces, start = [], 0.0
    for name, class_, amount in parts:
        width = amount / total
        words = hint(f"{name}: {share(width)}")
        place = {"x": percent(start), "width": percent(width)}
        pieces.append(element("rect", words, y=0, height=28, class_=f"fill {class_}", **place))
        start += width
    return Chart(
        svg=drawing(pieces, label=label, height=28),
        legend=tuple((class_, f"{name} {share(amount / total)}") for name, class_, amount in parts if amount > 0),
        columns=("spent on", "share of device time"),
        rows=tuple((name, share(amount / total)) for name, _, amount in parts),
    )
