"""How many examples a property is tried with."""

from hypothesis import settings

FEWEST = 8


def examples(count: int, *, fewest: int = FEWEST, most: int | None = None) -> int:
    """``count`` in deep runs (``make test-deep``); in others a tenth, at least ``fewest`` and at most ``most``."""
    share = settings().max_examples / 100
    quick = max(min(count, fewest), -(-count * settings().max_examples // 100))
    return quick if most is None or share == 1 else min(most, quick)
