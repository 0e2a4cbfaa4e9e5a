"""How many examples a property is tried with."""

from hypothesis import settings

FEWEST = 12


def examples(count: int) -> int:
    """``count`` in deep runs (``make test-deep``); in others a quarter of it, and no fewer than 12."""
    return max(min(count, FEWEST), -(-count * settings().max_examples // 100))
