"""How long a pipeline takes at least beyond what its stages compute, whatever the sizes of its micro-batches.

Under 1F1B stages wait where a pipeline fills and drains, less if the first and last micro-batches are small; but small
ones in between leave stages idle as well. For a number of micro-batches the sizes that end first are those of a linear
program (``least_ends_program``). The programs' optima are kept beside this file, rounded down, since a planner has no
time to solve them; ``python tools/least_ends.py`` solves them again. S stages.
"""

from functools import cache
from pathlib import Path

import numpy as np

FORWARDS = (3.0, 3.0), (3.0, 3.125), (3.125, 3.5), (3.0, 3.5), (3.5, 4.0), (3.0, 4.0)
"""How many times its forward's seconds a micro-batch takes: at least, and at most."""
STAGES = tuple(range(2, 9))
WEIGHTS = (0.0, 0.06, 0.12, 0.18, 0.22, 0.25, 0.26, 0.27, 0.28, 0.29, 0.3, 0.31, 0.32, 1 / 3)
"""The share of a micro-batch's seconds that gradients of weights take at most where these may wait."""
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Micro-batches. Of a number in between, no sizes end sooner than of the next one."""
FILE = Path(__file__).with_name("least_ends.npy")


def least_ends(num_stages: int, forwards: tuple[float, float], weights: float) -> np.ndarray:
    """[len(COUNTS)] seconds that so many micro-batches take at least, of one second a stage together.

    Args:
        num_stages: S; beyond ``STAGES`` nothing is known, and stages are taken to be never idle.
        forwards: how many times its forward's seconds a micro-batch takes, at least and at most.
        weights: the share of its seconds in gradients of weights that may wait, at most; 0: backwards are whole.
    """
    fitting = [pair for pair in FORWARDS if pair[0] <= forwards[0] and forwards[1] <= pair[1]]
    if num_stages not in STAGES or not fitting or weights > WEIGHTS[-1]:
        return np.ones(len(COUNTS))
    narrowest = min(fitting, key=lambda pair: pair[1] - pair[0])
    row = next(number for number, share in enumerate(WEIGHTS) if weights <= share)
    ends: np.ndarray = _optima()[FORWARDS.index(narrowest), STAGES.index(num_stages), row]
    return ends


@cache
def _optima() -> np.ndarray:
    """[forwards, stages, weights, counts]"""
    optima: np.ndarray = np.load(FILE)
    return optima
