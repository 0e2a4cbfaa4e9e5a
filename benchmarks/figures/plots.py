"""Panels of lines, dots and bars in one SVG file, for light and dark screens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from lengthwise.report.charts.ticks import Axis, Labels, inner_ticks, log_ticks, plain_labels, value_axis

Points = Sequence[tuple[float, float]]
WIDTH, PLOT_HEIGHT = 780, 210
LEFT, RIGHT, ABOVE, BELOW = 66, 18, 44, 64
"""Pixels around the plot of a panel."""
HEADER = 62
"""Pixels of the title and the legend."""
NUM_COLOURS = 6
STYLE = (
    ":root{--paper:#fff;--ink:#16191d;--soft:#555c66;--rule:#dfe3e8;"
    "--s0:#0072b2;--s1:#d55e00;--s2:#00875f;--s3:#a8467f;--s4:#9a6b00;--s5:#6b7280}"
    "@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e9ebee;--soft:#a7afba;--rule:#30363e;"
    "--s0:#58aef0;--s1:#ff8f52;--s2:#38c79d;--s3:#e592c4;--s4:#e2b53f;--s5:#a9b1bd}}"
    "text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',Arial,sans-serif;fill:var(--soft)}"
    ".key,.axis{fill:var(--ink)}.head{fill:var(--ink);font-size:14px;font-weight:600}.paper{fill:var(--paper)}"
    ".grid{stroke:var(--rule)}.line{fill:none;stroke-width:2}"
    + "".join(f".line.s{k}{{stroke:var(--s{k})}}.fill.s{k}{{fill:var(--s{k})}}" for k in range(NUM_COLOURS))
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot: series by name on shared axes."""

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Points] = field(default_factory=dict)
    dots: Mapping[str, Points] = field(default_factory=dict)
    bars: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """One value a group; None leaves a gap."""
    groups: Sequence[str] = ()
    """The names of the groups of bars."""
    stacked: bool = False
    zero: bool = True
    """The vertical axis starts at zero."""
    log_x: bool = False
    log_y: bool = False
    x_labels: Labels = plain_labels
    y_labels: Labels = plain_labels

    @property
    def names(self) -> tuple[str, ...]:
        """All series of the panel."""
        return *self.lines, *self.dots, *self.bars

    @property
    def y_axis(self) -> Axis:
        """Round numbers at both ends."""
        values = [y for points in (*self.lines.values(), *self.dots.values()) for _, y in points if math.isfinite(y)]
        if self.stacked:
            values += [sum(filter(None, group)) for group in zip(*self.bars.values())]
        else:
            values += [value for series in self.bars.values() for value in series if value is not None]
        return value_axis(
            values, title=self.y_title, labels=self.y_labels, zero=self.zero and not self.log_y, log=self.log_y
        )

    @property
    def x_axis(self) -> Axis:
        """The range of the points, or one unit a group of bars."""
        if self.bars:
            ticks = tuple(k + 0.5 for k in range(len(self.groups)))
            return Axis(low=0, high=len(self.groups), ticks=ticks, labels=tuple(self.groups))
        xs = [x for points in (*self.lines.values(), *self.dots.values()) for x, _ in points]
        low, high = min(xs), max(xs)
        if not self.log_x:
            low = 0 if low < 0.3 * high else low
        ticks = [x for x in log_ticks(low, high) if low <= x <= high] if self.log_x else inner_ticks(low, high)
        return Axis(low=low, high=high, ticks=tuple(ticks), labels=self.x_labels(ticks), log=self.log_x)


def picture(title: str, *panels: Panel, columns: int = 2) -> str:
    """An SVG file of panels in rows of at most ``columns``, one legend above them all."""
    columns = min(columns, len(panels))
    names = list(dict.fromkeys(name for panel in panels for name in panel.names))
    colours = {name: k % NUM_COLOURS for k, name in enumerate(names)}
    across, high = WIDTH / columns, ABOVE + PLOT_HEIGHT + BELOW
    height = HEADER + high * -(-len(panels) // columns)
    parts = [_text(title, 16, 24, "head"), *_legend(colours)]
    for number, panel in enumerate(panels):
        x, y = across * (number % columns) + LEFT, HEADER + high * (number // columns) + ABOVE
        inside = "".join(_plot(panel, across - LEFT - RIGHT, colours))
        parts.append(f'<g transform="translate({x:g} {y:g})">{inside}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>' + "\n".join(["", *parts, "</svg>", ""])
    )


def _legend(colours: Mapping[str, int]) -> list[str]:
    parts, across = [], 16.0
    for name, colour in colours.items():
        parts.append(f'<rect class="fill s{colour}" x="{across:g}" y="38" width="12" height="12"/>')
        parts.append(_text(name, across + 17, 48, "key"))
        across += 34 + 6.6 * len(name)
    return parts if len(colours) > 1 else []


def _plot(panel: Panel, width: float, colours: Mapping[str, int]) -> list[str]:
    x, y = panel.x_axis, panel.y_axis
    parts = [_text(panel.title, 0, -26, "axis"), _text(panel.y_title, -LEFT + 12, -9, "tick")]
    for tick, label in zip(y.ticks, y.labels):
        down = PLOT_HEIGHT * (1 - y.at(tick))
        parts.append(f'<line class="grid" x1="0" x2="{width:g}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(_text(label, -8, down + 4, "tick", "end"))
    for tick, label in zip(x.ticks, x.labels):
        parts.append(_text(label, width * x.at(tick), PLOT_HEIGHT + 18, "tick", "middle"))
    parts.append(_text(panel.x_title, width, PLOT_HEIGHT + 38, "axis", "end"))
    for name, points in panel.lines.items():
        places = [_place(point, x, y, width) for point in points if math.isfinite(point[1])]
        outline = "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
        parts.append(f'<path class="line s{colours[name]}" d="M{outline}"/>')
    for name, points in panel.dots.items():
        for across, down in (_place(point, x, y, width) for point in points):
            parts.append(f'<circle class="fill s{colours[name]}" cx="{across:.1f}" cy="{down:.1f}" r="3"/>')
    return [*parts, *_bars(panel, y, width, colours)]


def _bars(panel: Panel, y: Axis, width: float, colours: Mapping[str, int]) -> list[str]:
    parts = []
    room = width / max(1, len(panel.groups))
    thick = room * 0.8 / (1 if panel.stacked else max(1, len(panel.bars)))
    bases = [0.0] * len(panel.groups)
    for number, (name, values) in enumerate(panel.bars.items()):
        for group, value in enumerate(values):
            if value is None:
                continue
            top = PLOT_HEIGHT * (1 - y.at(bases[group] + value))
            tall = PLOT_HEIGHT * (y.at(bases[group] + value) - y.at(bases[group] if panel.stacked else y.low))
            across = room * group + room * 0.1 + (0 if panel.stacked else number * thick)
            parts.append(
                f'<rect class="fill s{colours[name]}" x="{across:.1f}" y="{top:.1f}" width="{thick * 0.94:.1f}" '
                f'height="{tall:.1f}"/>'
            )
            bases[group] += value if panel.stacked else 0
    return parts


def _place(point: tuple[float, float], x: Axis, y: Axis, width: float) -> tuple[float, float]:
    return width * x.at(point[0]), PLOT_HEIGHT * (1 - y.at(point[1]))


def _text(words: str, x: float, y: float, class_: str, anchor: str = "start") -> str:
    return f'<text class="{class_}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
