"""Packs around one in slices, small ones before it and behind, among which moves of single packs go on.

The last stage waits for S - 1 forwards of what comes first, and the first one for S - 1 backwards of what comes last.
A forward is in time on the last stage while that has F - 1 times as long backwards of those before it to compute, and a
backward on the first stage while that has as much as F - 1 forwards of it, shared by all stages: from slice to slice
packs may grow by (F - 1) / (S - 1), and shrink by 1 / ((F - 1) (S - 1)) (``plan.bounds.filling_and_draining``).

S stages; a micro-batch takes F times as long as its forward.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import ceil
from typing import NamedTuple

import numpy as np

from lengthwise.plan.space.ramped_packs import deal

FIRST, LAST = (1.0, 0.6, 0.3, 0.15), (1.0, 0.7, 0.45, 0.25)
"""Seconds of the first and of the last pack beside those of a slice."""
USUAL = (1.0, 1.25)
"""The same of those between."""
FEWEST = 4
"""Packs that are not cut."""


class CutPack(NamedTuple):
    """A pack of a pipeline, and how many slices it has."""

    positions: tuple[int, ...]
    """Of its sequences in the batch, the longest first."""
    slices: int


def ramps_around(
    packs: Sequence[CutPack], works_s: np.ndarray, *, overhead_s: float, num_stages: int, forwards: float
) -> Iterator[list[CutPack]]:
    """The sequences of packs that are not cut in packs that grow before those in slices, and shrink behind them.

    Args:
        packs: of a pipeline, in order.
        works_s: seconds of each sequence of the batch on one stage.
        overhead_s: seconds of a slice beyond its work.
        num_stages: S.
        forwards: F.
    """
    cut = [pack for pack in packs if pack.slices > 1]
    short = sorted(chain.from_iterable(p.positions for p in packs if p.slices == 1), key=lambda k: (-works_s[k], k))
    if not cut or len(packs) - len(cut) < FEWEST:
        return
    slice_s = max(float(works_s[list(pack.positions)].sum()) / pack.slices for pack in cut)
    total_s = float(works_s[short].sum())
    for first, last, usual in product(FIRST, LAST, USUAL):
        before = _sizes(first, 1 + (forwards - 1) / (num_stages - 1), slice_s, overhead_s)
        behind = _sizes(last, 1 + 1 / ((forwards - 1) * (num_stages - 1)), slice_s, overhead_s)
        left_s = total_s - sum(before) - sum(behind)
        if left_s >= 0:
            count = ceil(left_s / (usual * slice_s))
            middle = [left_s / max(1, count)] * count
            dealt = deal(short, works_s, [*before, *middle, *reversed(behind)])
            num_before = sum(map(bool, dealt[: len(before)]))
            uncut = [CutPack(tuple(positions), 1) for positions in dealt if positions]
            yield [*uncut[:num_before], *cut, *uncut[num_before:]]


def _sizes(smallest: float, growth: float, slice_s: float, overhead_s: float) -> list[float]:
    """Work of packs that grow from a share of a slice up to one."""
    size_s, sizes = smallest * (slice_s + overhead_s), []
    while size_s < (slice_s + overhead_s) * (1 - 1e-9):
        sizes.append(max(size_s - overhead_s, overhead_s))
        size_s *= growth
    return sizes
