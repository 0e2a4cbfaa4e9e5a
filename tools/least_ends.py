"""Solve the linear programs that bound pipelines of several stages again: `python tools/least_ends.py`.

Some minutes of one core. Writes src/lengthwise/plan/bounds/least_ends.npy.
"""

import numpy as np
from rich.progress import track

from lengthwise.plan.bounds.least_ends import COUNTS, FILE, FORWARDS, STAGES, WEIGHTS
from lengthwise.plan.bounds.least_ends_program import solved


def main() -> None:
    """Solve all programs and write their optima."""
    ends = np.ones((len(FORWARDS), len(STAGES), len(WEIGHTS), len(COUNTS)))
    for place in track(list(np.ndindex(ends.shape)), description="programs"):
        pair, stages, weights, count = place
        ends[place] = solved(STAGES[stages], FORWARDS[pair], WEIGHTS[weights], COUNTS[count])
    np.save(FILE, ends)


if __name__ == "__main__":
    main()
