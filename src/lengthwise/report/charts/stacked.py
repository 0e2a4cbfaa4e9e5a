"""Bars one below the other on one scale, each cut into parts; the name and the total stand above each bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.report.charts.svg import drawing, element, hint, percent, shortened, text

_ROW = 44
_THICK = 16
_NAME = 22
"""Characters of a name that leave room for the words at the right end on a telephone."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: (CSS class, what it is, amount) of each part, and the words at its right end."""

    name: str
    parts: tuple[tuple[str, str, float], ...]
    words: str
    strong: bool = False
    """Its name is set in bold."""

    @property
    def total(self) -> float:
        """Length of the whole bar."""
        return sum(amount for _, _, amount in self.parts)


def stacked_bars(bars: Sequence[Bar], *, label: str) -> str:
    """The drawing of at least one bar, of which the longest is as wide as the chart; empty when all are nothing."""
    longest = max(bar.total for bar in bars)
    if longest <= 0:
        return ""
    drawn = []
    for k, bar in enumerate(bars):
        top = k * _ROW
        drawn.append(
            text(shortened(bar.name, _NAME), 0, top + 14, class_="bar-name strong" if bar.strong else "bar-name")
        )
        drawn.append(text(bar.words, "100%", top + 14, anchor="end", class_="bar-value"))
        drawn.append(element("rect", x=0, y=top + 20, width="100%", height=_THICK, class_="track"))
        start = 0.0
        for class_, what, amount in bar.parts:
            place = {"x": percent(start), "width": percent(amount / longest)}
            words = hint(f"{bar.name}, {what}" if what else f"{bar.name}: {bar.words}")
            drawn.append(element("rect", words, y=top + 20, height=_THICK, class_=f"fill {class_}", **place))
            start += amount / longest
    return drawing(drawn, label=label, height=len(bars) * _ROW - 6)
