"""Where the search starts, and what it has to beat: homogeneous strategies and Eq. (4) of Hydraulis."""

from dataclasses import dataclass

import numpy as np

from lengthwise.plan.heterogeneous.propose.closed_form import relax
from lengthwise.plan.heterogeneous.propose.parametric import integer_strategies
from lengthwise.plan.heterogeneous.propose.tiling import Counts, Tiler
from lengthwise.plan.heterogeneous.propose.workload import Workload

LENGTH_LIMITS = 6
"""Longest lengths of steps, at even distances in their order, for which Eq. (4) is solved."""


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Strategies that tile the cluster."""

    homogeneous: tuple[Counts, ...]
    """Equal pipelines that hold the longest sequence asked for."""
    published: tuple[Counts, ...]
    """Eq. (4) with whole pipelines for the longest sequence of the steps: as printed, and with the bubble."""
    others: tuple[Counts, ...]
    """Eq. (4) for steps with shorter sequences, and its fractional solution rounded."""


def make_starts(workload: Workload, tiler: Tiler, *, holding: int) -> Starts:
    """Starts for the average of the steps of ``workload``; homogeneous ones hold ``holding`` tokens."""
    num_candidates = len(workload.candidates)
    homogeneous = [
        tuple(workload.num_devices // size * (index == candidate) for index in range(num_candidates))
        for candidate, size in enumerate(tiler.sizes)
        if workload.num_devices % size == 0 and workload.limits[candidate] >= holding
    ]
    longest = workload.longest[(workload.counts > 0).argmax(axis=1)]
    limits = np.quantile(longest, np.linspace(0, 1, LENGTH_LIMITS), method="nearest")
    printed = integer_strategies(workload, bubble=False, longest=longest.max(keepdims=True))
    bubbled = integer_strategies(workload, longest=limits)
    published = [tiler.fill(strategy.counts.tolist()) for strategy in (*printed, *bubbled[:1])]
    others = [tiler.fill(strategy.counts.tolist()) for strategy in bubbled[1:]]
    holds = int(np.lexsort((workload.devices, workload.limits < holding))[0])
    others += tiler.round(relax(workload).counts)
    others += tiler.round(relax(workload).counts, least=holds)
    return Starts(
        homogeneous=tuple(homogeneous),
        published=tuple(counts for counts in published if counts is not None),
        others=tuple(counts for counts in others if counts is not None),
    )
