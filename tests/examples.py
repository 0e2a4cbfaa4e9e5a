"""How many examples a property is tried with."""

from hypothesis import settings

FEWEST = 8


def examples(count: int, *, fewest: int = FEWEST) -> int:
    """``count`` in deep runs (``make test-deep``); in others a quarter of it, and no fewer than ``fewest``."""
    return max(min(count, fewest), -(-count * settings().max_examples // 100))
