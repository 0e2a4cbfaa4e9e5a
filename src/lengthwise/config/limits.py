"""Limits and defaults that settings and the code behind them share."""

MOST_BLOCKS = 1024


WINDOW = 4096
"""Sequences that ``windowed`` sorts at a time."""
