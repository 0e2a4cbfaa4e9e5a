"""Between the eighths of layers that schemes recompute: the fewest under which the longest sequence of a run fits.

DCP-inter recomputes one number of layers for all sequences, that which the longest needs, and pays for every layer
more. Numbers between two eighths matter there and hardly elsewhere, so the search space has one more level, or two
where sharded weights need another; with all levels it would be four times as large.
"""

from collections.abc import Sequence
from dataclasses import replace

from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import WeightPlacement, spread
from lengthwise.plan.space.candidate import Candidate, make_candidates


def with_fewest_recomputed(
    candidates: tuple[Candidate, ...], cost: CostModel, *, num_devices: int, max_length: int, token_limit: int | None
) -> tuple[Candidate, ...]:
    """The candidates, and those of one stage with the fewest recomputed layers that hold ``max_length`` tokens."""
    added: list[Candidate] = []
    for weights in WeightPlacement:
        single = [c for c in candidates if c.num_stages == 1 and c.scheme.weights is weights]
        levels = {candidate.scheme.num_recomputed for candidate in single}
        fewest = _fewest(single, max_length)
        if fewest is None or fewest in levels:
            continue
        bases = {(c.scheme.degree, c.scheme.methods): c.scheme for c in single}
        schemes = [replace(scheme, recompute=spread(fewest, scheme.num_layers)) for scheme in bases.values()]
        added += make_candidates(schemes, cost, num_devices=num_devices, token_limit=token_limit)
    return (*candidates, *added)


def _fewest(single: Sequence[Candidate], max_length: int) -> int | None:
    """The fewest recomputed layers with which some candidate holds ``max_length``; None: no number does.

    Between two levels, of which one holds it, by bisection.
    """
    fewest: int | None = None
    for candidate in single:
        if candidate.max_tokens < max_length:
            continue
        enough = candidate.scheme.num_recomputed
        below = [
            other.scheme.num_recomputed
            for other in single
            if _alike(other, candidate) and other.scheme.num_recomputed < enough
        ]
        too_few = max(below, default=enough - 1)  # other numbers are not asked for, or not known
        if fewest is not None and too_few + 1 >= fewest:
            continue
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            recompute = spread(middle, candidate.scheme.num_layers)
            fits = replace(candidate, scheme=replace(candidate.scheme, recompute=recompute)).max_tokens >= max_length
            too_few, enough = (too_few, middle) if fits else (middle, enough)
        fewest = enough if fewest is None else min(fewest, enough)
    return fewest


def _alike(first: Candidate, second: Candidate) -> bool:
    """Whether two candidates differ in their recomputed layers at most."""
    return (first.scheme.degree, first.scheme.methods) == (second.scheme.degree, second.scheme.methods)
