"""Between the eighths of layers that schemes recompute: the fewest under which the longest sequence of a run fits.

DCP-inter recomputes one number of layers for all sequences, that which the longest needs, and pays for every layer
more. Numbers between two eighths matter there and hardly elsewhere, so the search space has few more levels: what some
method needs within some degree; with all levels it would be four times as large.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import Method, WeightPlacement, spread
from lengthwise.plan.space.candidate import Candidate, make_candidates


def with_fewest_recomputed(
    candidates: tuple[Candidate, ...], cost: CostModel, *, num_devices: int, max_length: int, token_limit: int | None
) -> tuple[Candidate, ...]:
    """The candidates, and those of one stage with the fewest recomputed layers that hold ``max_length`` tokens.

    That is asked for each method and limit of the degree, so that a larger search space has what a smaller has.
    """
    added: list[Candidate] = []
    for weights in WeightPlacement:
        single = [c for c in candidates if c.num_stages == 1 and c.scheme.weights is weights]
        levels = {candidate.scheme.num_recomputed for candidate in single}
        most_degree: dict[int, int] = {}
        for degree, fewest in _fewest(single, max_length):
            if fewest not in levels:
                most_degree[fewest] = max(degree, most_degree.get(fewest, 0))
        bases = {(c.scheme.degree, c.scheme.methods, c.scheme.shard_gradients): c.scheme for c in single}
        schemes = [
            replace(scheme, recompute=spread(fewest, scheme.num_layers))
            for fewest, degree in most_degree.items()
            for scheme in bases.values()
            if scheme.degree <= degree
        ]
        added += make_candidates(schemes, cost, num_devices=num_devices, token_limit=token_limit)
    return (*candidates, *added)


def _fewest(single: Sequence[Candidate], max_length: int) -> Iterator[tuple[int, int]]:
    """Degrees, and the fewest layers recomputed with which one method holds ``max_length`` on so many devices or fewer.

    None where it does not.
    """
    by_scheme: dict[tuple[int, tuple[tuple[Method, ...], bool]], list[Candidate]] = {}
    for candidate in single:
        scheme = candidate.scheme
        by_scheme.setdefault((scheme.degree, (scheme.methods, scheme.shard_gradients)), []).append(candidate)
    degrees = sorted({degree for degree, _ in by_scheme})
    for how in dict.fromkeys(how for _, how in by_scheme):
        fewest: int | None = None
        for degree in degrees:
            least = _fewest_of(by_scheme.get((degree, how), ()), max_length, below=fewest)
            fewest = least if fewest is None else fewest
            if least is not None and fewest is not None:
                fewest = min(fewest, least)
            if fewest is not None:
                yield degree, fewest


def _fewest_of(by_level: Sequence[Candidate], max_length: int, *, below: int | None) -> int | None:
    """The fewest layers with which one scheme holds ``max_length``; None: no number does, or none ``below`` that.

    Between two of the levels of ``by_level``, of which one holds it, by bisection.
    """
    enough = [candidate for candidate in by_level if candidate.max_tokens >= max_length]
    if not enough:
        return None
    leanest = min(enough, key=lambda candidate: candidate.scheme.num_recomputed)
    fewest = leanest.scheme.num_recomputed
    less = [candidate.scheme.num_recomputed for candidate in by_level if candidate.scheme.num_recomputed < fewest]
    too_few = max(less, default=fewest - 1)  # other numbers are not asked for, or not known
    if below is not None and too_few + 1 >= below:
        return None
    while fewest - too_few > 1:
        middle = (too_few + fewest) // 2
        recompute = spread(middle, leanest.scheme.num_layers)
        fits = replace(leanest, scheme=replace(leanest.scheme, recompute=recompute)).max_tokens >= max_length
        too_few, fewest = (too_few, middle) if fits else (middle, fewest)
    return fewest
