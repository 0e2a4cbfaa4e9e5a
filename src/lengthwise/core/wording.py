"""Words of messages: sizes in the unit that suits them, and the known name nearest to a typo; numbers from text."""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from fractions import Fraction

GIB = 2**30
MOST_SUGGESTED = 3
"""Names that a suggestion holds at most."""
_TOKENS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMBT]?|[KM]i|E\+?[0-9]{1,2})", re.ASCII | re.IGNORECASE)
_QUOTED = re.compile(r"'([^']*)'")
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20}
_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bytes_in_words(num_bytes: float, *, digits: int = 1) -> str:
    """A size in the unit that suits it, such as 1.5 GiB or 40.0 MiB: what is not nothing never reads like it."""
    unit, word = next(((unit, word) for unit, word in _UNITS if num_bytes >= unit / 10), (1, "bytes"))
    return f"{num_bytes / unit:,.{digits}f} {word}" if unit > 1 else f"{num_bytes:,.0f} bytes"


def needed_and_available(needed_bytes: float, available_bytes: float) -> tuple[str, str]:
    """Both sizes in words, in one unit and with as many digits as it takes to tell them apart.

    What is needed is rounded up, what is there as everywhere else: a need of more than there is never reads like less,
    nor what fits like what does not.
    """
    smaller = min(needed_bytes, available_bytes) or max(needed_bytes, available_bytes)
    unit, word = next(
        ((unit, word) for unit, word in _UNITS if smaller >= unit / 10),
        (1, "bytes"),
    )
    fits = needed_bytes <= available_bytes
    for digits in (1, 2, 3) if unit > 1 else ():
        scale = 10**digits
        needed = f"{math.ceil(needed_bytes / unit * scale) / scale:,.{digits}f}"
        available = f"{available_bytes / unit:,.{digits}f}"
        reads_as_less = float(needed.replace(",", "")) <= float(available.replace(",", ""))
        if (needed != available and reads_as_less == fits) or needed_bytes == available_bytes:
            return f"{needed} {word}", f"{available} {word}"
    return f"{math.ceil(needed_bytes):,} bytes", f"{math.floor(available_bytes):,} bytes"


def counted(number: int, noun: str) -> str:
    """A number of things, such as 1 sequence or 2,048 sequences."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def whole_number(text: str) -> int | None:
    """The number that up to nine digits spell; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def parse_tokens(text: str) -> int | None:
    """The number of tokens in text such as 200000, 200K, 32Ki, 10B or 1e6; None for any other text.

    K, M, B and T are powers of a thousand; Ki and Mi of 1,024.
    """
    match = _TOKENS.fullmatch(text)
    if match is None:
        return None
    suffix = match[2].upper()
    scale = 10 ** int(suffix[1:]) if suffix.startswith("E") else _SUFFIXES[suffix]
    number = Fraction(match[1]) * scale
    return int(number) if number.denominator == 1 else None


def with_nearest(message: str, mistyped: object) -> str:
    """A message about a mistyped word, with the nearest of the words that it quotes if one is close."""
    words = [word for word in _QUOTED.findall(message) if word != mistyped]
    close = _closest(mistyped, words) if isinstance(mistyped, str) else []
    return f"{message.rstrip('.')}; did you mean {close[0]}?" if close else message


def nearest(name: str, names: Iterable[str]) -> str:
    """A clause that suggests the known names that go on from a name, or the one closest to it, or lists them all."""
    names = sorted(names)
    longer = [full_name for full_name in names if full_name.lower().startswith(f"{name.lower()}-")]
    close = longer if 0 < len(longer) <= MOST_SUGGESTED else _closest(name, names)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def _closest(name: str, names: list[str]) -> list[str]:
    """The name that is closest to another, in capitals or not; none if none is close."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[close] for close in get_close_matches(name[:200].lower(), by_lower, n=1)]
