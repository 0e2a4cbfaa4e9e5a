"""What one document and one compressed archive may hold, so that no input takes all memory or all time."""

from dataclasses import dataclass

MAX_DOCUMENT = 1 << 28
"""Bytes of a document, as it is in its file; the longest human chromosome is below."""
MAX_RATIO = 250
"""Unpacked bytes of a compressed archive per byte of its file; text takes 3 to 20, a gigabyte of zeros 1,000."""
FREE_BYTES = 1 << 30
"""Unpacked bytes that every archive may hold, whatever the ratio."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a source."""

    document: int = MAX_DOCUMENT
    """Most bytes of a document."""
    ratio: int = MAX_RATIO
    """Most unpacked bytes per byte of a compressed archive."""

    def unpacked(self, num_bytes: int) -> int:
        """Most bytes that a compressed archive of ``num_bytes`` may unpack to."""
        return max(FREE_BYTES, self.ratio * num_bytes)


DEFAULT_LIMITS = Limits()
