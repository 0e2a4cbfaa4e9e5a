"""Where an axis has its ticks, and what it writes there: steps of 1, 2 or 5 times a power of ten."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.report.units import compact

MOST_TICKS = 6
"""So many labels of a number fit under a chart on a telephone."""

_NOTHING = 1e-280
"""Below this, floating-point numbers lose digits and their steps have no power of ten; a chart draws them as zero."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a chart: its range, the ticks inside it and their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    title: str = ""
    log: bool = False

    def at(self, value: float) -> float:
        """Where ``value`` lies, from 0 at ``low`` to 1 at ``high``."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def nice_step(span: float, most: int = MOST_TICKS) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts ``span`` into fewer than ``most`` parts."""
    raw = span / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= raw * (1 - 1e-9)), 10 * power)


def nice_ticks(low: float, high: float, *, most: int = MOST_TICKS, whole: bool = False) -> tuple[float, ...]:
    """Evenly spaced round numbers of which the first is at most ``low`` and the last at least ``high``.

    Args:
        low: smallest value shown.
        high: largest value shown; an empty range is widened.
        most: so many ticks, and at most one more.
        whole: only whole numbers.
    """
    assert math.isfinite(low) and math.isfinite(high) and low <= high, f"no axis from {low} to {high}"
    low, high = _widen(low, high)
    step = max(nice_step(high - low, most), 1.0 if whole else 0.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(_round(k * step, step) for k in range(first, last + 1))


def inner_ticks(low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """At most ``MOST_TICKS`` round numbers, evenly spaced, that lie between ``low`` and ``high``."""
    slack = (high - low) * 1e-9
    return tuple(t for t in nice_ticks(low, high, most=MOST_TICKS + 1, whole=whole) if low - slack <= t <= high + slack)


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten that enclose [low, high]; 1, 2 and 5 times them when there are few."""
    assert 0 < low <= high, f"no logarithmic axis from {low} to {high}"
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 2:
        stride = -(-(last - first) // MOST_TICKS)
        return tuple(10.0**k for k in range(first, last + stride, stride))
    every = [factor * 10.0**k for k in range(first, last + 1) for factor in (1, 2, 5)]
    start = max(k for k, tick in enumerate(every) if tick <= low * (1 + 1e-9))
    stop = min(k for k, tick in enumerate(every) if tick >= high * (1 - 1e-9))
    return tuple(every[start : max(stop, start + 1) + 1])


def plain_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Labels with the decimals that the distance between the ticks needs."""
    largest = max(abs(tick) for tick in ticks)
    step = min((b - a for a, b in pairwise(ticks)), default=largest or 1.0)
    if largest >= 10_000 or step < 1e-5:
        return tuple(map(compact, ticks))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    return tuple(f"{tick:,.{decimals}f}" for tick in ticks)


def second_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Labels of durations, all in the unit that suits the largest."""
    largest = max(abs(tick) for tick in ticks)
    size, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if largest >= s), (1e-6, "µs"))
    labels = plain_labels([_round(tick / size, 1e-3) for tick in ticks])
    return tuple(f"{label} {unit}" if tick else "0" for tick, label in zip(ticks, labels))


def share_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Labels of fractions, in per cent."""
    return tuple(f"{label} %" for label in plain_labels([_round(t * 100, 1e-3) for t in ticks]))


Labels = Callable[[Sequence[float]], tuple[str, ...]]


def value_axis(
    values: Sequence[float], *, title: str = "", labels: Labels = plain_labels, zero: bool = False, log: bool = False
) -> Axis:
    """A vertical axis: round numbers at both ends; from zero on if ``zero``."""
    low, high = min(values), max(values)
    if log:
        ticks = log_ticks(low, high)
    else:
        ticks = nice_ticks(min(0.0, low) if zero else low, max(0.0, high) if zero else high)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, labels=labels(ticks), title=title, log=log)


def range_axis(low: float, high: float, *, title: str = "", labels: Labels = plain_labels, whole: bool = False) -> Axis:
    """A horizontal axis that ends where the data ends, with ticks inside."""
    low, high = _widen(low, high) if low == high else (low, high)
    ticks = inner_ticks(low, high, whole=whole)
    return Axis(low=low, high=high, ticks=ticks, labels=labels(ticks) if ticks else (), title=title)


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range wide enough for floating-point ticks."""
    largest = max(abs(low), abs(high))
    if largest < _NOTHING:
        return -0.5, 0.5
    if high - low > 1e-9 * largest:
        return low, high
    half = 0.5 * largest
    return low - half, high + half


def _round(value: float, step: float) -> float:
    """``value`` without the dust of multiplication."""
    return round(value, max(0, 3 - math.floor(math.log10(step)))) + 0.0
