"""Numbers as a reader wants them: three or four significant digits, with their unit. The one place that rounds."""

import math

from lengthwise.core.wording import bytes_in_words

MISSING = "n/a"
"""What stands where a number is not known."""
_GLUE = "\u00a0"
"""Keeps a unit on the line of its number."""


def count(value: float | None) -> str:
    """A whole number with thousands separators: ``12,345``."""
    return MISSING if value is None or not math.isfinite(value) else f"{round(value):,}"


def compact(value: float) -> str:
    """A number in little room, in thousands and millions: ``12.5k``, ``3M``."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def token_count(value: float) -> str:
    """A number of tokens in thousands, millions and billions, as options take it: ``200K``, ``1.5M``, ``10B``."""
    return compact(value).replace("k", "K").replace("G", "B")


def tokens(value: int) -> str:
    """A length in the powers of two that lengths are spoken of in: ``512``, ``4K``, ``1M``."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size and value % (size >> 1) == 0:
            return f"{value / size:g}{suffix}"
    return f"{value:,}"


def seconds(value: float | None) -> str:
    """A duration: ``1.23 s``, ``45.6 ms``, ``789 µs``."""
    if value is None or not math.isfinite(value):
        return MISSING
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size * 0.9995:
            return f"{significant(value / size, 3)}{_GLUE}{unit}"
    return f"{significant(value / 1e-6, 3)}{_GLUE}µs" if value else f"0{_GLUE}s"


def hours(value: float | None) -> str:
    """A number of hours, with digits where there are few: ``0.25``, ``12.3``, ``1,234``."""
    return MISSING if value is None or not math.isfinite(value) else significant(value, max(3, len(f"{value:.0f}")))


def memory(num_bytes: float) -> str:
    """A size in the unit that suits it: ``1.5 GiB``, ``40.0 MiB``; never 0 for what is more."""
    return bytes_in_words(num_bytes).replace(" ", _GLUE)


def share(value: float | None, *, signed: bool = False) -> str:
    """A fraction in per cent: ``12.3 %``; with its sign if ``signed``."""
    if value is None or not math.isfinite(value):
        return MISSING
    percent = value * 100
    digits = 0 if abs(percent) >= 99.95 and not signed else 1
    text = f"{percent:+.{digits}f}" if signed else f"{percent:.{digits}f}"
    return f"{text}{_GLUE}%"


def rough_share(value: float) -> str:
    """A round fraction in whole per cent: ``10 %``."""
    return f"{value * 100:.0f}{_GLUE}%"


def ratio(value: float | None) -> str:
    """How many times as much: ``2.31x``."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.2f}x"


def number(value: float | None) -> str:
    """A plain number with four significant digits; what is not finite is named."""
    if value is None:
        return MISSING
    return significant(value, 4) if math.isfinite(value) else str(value).replace("nan", "NaN")


def significant(value: float, digits: int) -> str:
    """``value`` rounded to ``digits`` significant digits, without exponents in the usual range."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= magnitude < 9:
        return f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return f"{value:.{digits - 1}e}"
