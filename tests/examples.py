"""How many examples a property is tried with."""

from hypothesis import settings

FEWEST = 20


def examples(count: int) -> int:
    """``count`` in deep runs (``make test-deep``); in others two fifths of it, and no fewer than 20."""
    return max(min(count, FEWEST), -(-count * settings().max_examples // 100))
