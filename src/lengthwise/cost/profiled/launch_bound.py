"""Which rows of a profile took as long as launching their kernels, whatever they computed.

A GPU computes while the host launches, so that a pack takes the longer of the two. Fitted as a l^2 + b l + c, the
launches of short packs become c, and b lacks what hid beneath them: half of it for a Llama of 0.85B on an H100, which
then took twice as long as predicted for packs of many sequences. On a CPU both add up, and no row is left out.
"""

import numpy as np

from lengthwise.cost.profiled.relative_fit import akaike, non_negative

FLAT = 1.5
"""Most that launch-bound rows differ by: noise, and kernels that differ by size."""
LEAST_ROWS = 4
"""Rows that are left at least: one more than a curve has coefficients."""


def launch_bound_rows(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """A flag for each row: the shortest ones, if a floor under them and a curve through the others fit better.

    ``columns``: [rows, 3] sum of l^2, sum of l, 1.
    """
    order = np.argsort(columns[:, 1], kind="stable")
    columns, ordered_s = columns[order], seconds[order]
    counts = range(2, len(seconds) - LEAST_ROWS + 1)
    flat = [count for count in counts if ordered_s[:count].max() <= FLAT * ordered_s[:count].min()]
    number = min([0, *flat], key=lambda count: _criterion(columns, ordered_s, count))
    flags = np.zeros(len(seconds), dtype=bool)
    flags[order[:number]] = True
    return flags


def _criterion(columns: np.ndarray, seconds: np.ndarray, number: int) -> float:
    weights, _ = non_negative(columns[number:], seconds[number:], seconds[number:])
    predicted = columns @ weights
    if number:
        predicted = np.maximum(predicted, np.median(seconds[:number]))
    return akaike(predicted / seconds - 1, 5 if number else 3)  # also the floor, and how many rows lie on it
