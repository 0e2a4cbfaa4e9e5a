"""Parts of a search space: the smaller search spaces that lower limits, fewer methods or less recompute would make.

A search that is not exhaustive may miss among many candidates what it finds among few. So what is searched of the whole
is searched of its parts too, and a larger search space has what its parts have.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.split_backwards import with_whole_backwards

FEW_DEVICES = 1024
"""Devices up to which strategies are proposed for the corpus of parts of the search space, too."""
Test = Callable[[PipelineConfig], bool]
"""Whether a scheme is in a part."""
FEW_METHODS = 3
"""Up to so many methods every choice of them makes a part; of more, all but one, and each alone."""


def parts_of(candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """The candidates, then the parts of them, each once; all but the first with whole backwards.

    Without slices; without offload and tiles; without sharded gradients; without each of the methods; of each lower
    degree and number of stages at most; without tiles; those that recompute no layer, or all; then of fewer methods.
    """
    first, *main = main_parts(candidates)
    candidates = with_whole_backwards(candidates)
    shared = _shared_methods(candidates)
    degrees = sorted({candidate.scheme.degree for candidate in candidates}, reverse=True)[1:]
    stages = sorted({candidate.num_stages for candidate in candidates}, reverse=True)[1:]
    tests = [
        *(_of_degree(degree) for degree in degrees),
        *(_of_stages(count) for count in stages),
        lambda scheme: not scheme.tile_tokens,
        lambda scheme: not any(scheme.recompute),
        lambda scheme: all(scheme.recompute),
        *map(_without, _fewer(shared)),
    ]
    return list(dict.fromkeys([first, *main, *_passing(candidates, tests)]))


def main_parts(candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """The candidates, and of those with whole backwards all, those without slices, those without offload and tiles,
    those without sharded gradients, and those without each of the methods, each once.
    """
    everything, candidates = tuple(candidates), with_whole_backwards(candidates)
    without_one = (_without((method,)) for method in reversed(_shared_methods(candidates)))
    tests = [
        lambda scheme: True,
        lambda scheme: scheme.slices == 1,
        lambda scheme: scheme.is_plain,
        lambda scheme: not scheme.shard_gradients,
        *without_one,
    ]
    return list(dict.fromkeys([everything, *_passing(candidates, tests)]))


def _passing(candidates: Sequence[Candidate], tests: Sequence[Test]) -> list[tuple[Candidate, ...]]:
    """The candidates that pass each of some tests, where there are any."""
    parts = [tuple([candidate for candidate in candidates if test(candidate.scheme)]) for test in tests]
    return [part for part in parts if part]


def _shared_methods(candidates: Sequence[Candidate]) -> list[Method]:
    """The methods by which several devices share layers."""
    methods = [method for method in Method if any(method in candidate.scheme.methods for candidate in candidates)]
    return [method for method in methods if method is not Method.DENSE]


def holding(parts: Sequence[tuple[Candidate, ...]], length: int) -> list[tuple[Candidate, ...]]:
    """The parts that hold a sequence of ``length``."""
    return [part for part in parts if max(candidate.max_tokens for candidate in part) >= length]


def _fewer(shared: Sequence[Method]) -> list[tuple[Method, ...]]:
    """Methods to leave out, two or more at once."""
    numbers = range(2, len(shared) + 1) if len(shared) <= FEW_METHODS else (len(shared) - 1, len(shared))
    return [without for number in numbers if number >= 2 for without in combinations(shared, number)]


def _without(methods: Sequence[Method]) -> Test:
    return lambda scheme: set(scheme.methods).isdisjoint(methods)


def _of_degree(degree: int) -> Test:
    return lambda scheme: scheme.degree <= degree


def _of_stages(count: int) -> Test:
    return lambda scheme: scheme.num_stages <= count
