"""Few sizes of micro-batches instead of any: what is compiled for fixed sizes then runs every plan.

The sizes are chosen once, for the packs that the policy makes of typical batches, so that filling packs up to them adds
the least padding. From then on every pack is filled up to the smallest of them that holds it, and none is made larger
than the largest. Sizes divide by every degree, so that all ranks of a stage hold equally many tokens.
"""

from dataclasses import replace
from math import lcm

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.data.size_buckets import MULTIPLE, SizeBuckets, packed_lattice
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.problem import PlanningProblem


def with_shapes(planner: Planner, max_shapes: int) -> Planner:
    """The planner with micro-batches of at most ``max_shapes`` sizes.

    Raises:
        InfeasibleError: no size that divides as it must holds the longest sequence and fits a device.
    """
    problem = planner.problem
    multiple = MULTIPLE * lcm(*{candidate.scheme.degree for candidate in problem.candidates})
    tops: dict[int, int] = {}
    for candidate in problem.candidates:
        degree = candidate.scheme.degree
        tops[degree] = max(tops.get(degree, 0), candidate.max_tokens // multiple * multiple)
    needed = -(-problem.max_length // multiple) * multiple
    if needed > (top := max(tops.values())):
        raise InfeasibleError(
            f"{Setting.SHAPES}={max_shapes}: sizes are multiples of {multiple:,} tokens; the longest sequence, "
            f"{problem.max_length:,} tokens, takes {needed:,}, and a micro-batch holds {top:,} at most. Raise "
            f"{Setting.MAX_TOKENS}, lower {Setting.MAX_LENGTH}, or leave {Setting.SHAPES} out",
            what="the longest sequence", value=needed, limit=top, unit="tokens",
        )  # fmt: skip
    packs = _typical_packs(planner, tops)
    lattice = packed_lattice(packs, most=max_shapes, multiple_of=multiple, largest=problem.max_length)
    return replace(planner, problem=filled_up(problem, lattice))


def filled_up(problem: PlanningProblem, lattice: SizeBuckets) -> PlanningProblem:
    """The problem with every micro-batch filled up to a size of ``lattice``.

    Raises:
        InfeasibleError: no candidate holds the smallest size.
    """
    candidates = (replace(candidate, sizes=lattice.sizes, longest_local=0) for candidate in problem.candidates)
    return replace(
        problem,
        candidates=tuple(candidate for candidate in candidates if candidate.max_tokens),
        lattice=lattice,
    )


def share_sizes(problem: PlanningProblem) -> tuple[int, ...]:
    """Tokens that one rank can hold of a micro-batch, the largest first: what is compiled for."""
    shares = {
        size // candidate.scheme.degree
        for candidate in problem.candidates
        for size in candidate.sizes
        if size <= candidate.max_tokens
    }
    return tuple(sorted(shares, reverse=True))


def _typical_packs(planner: Planner, tops: dict[int, int]) -> np.ndarray:
    """Tokens of the packs of the samples' plans, none above what its degree may be filled up to."""
    pack_sizes = []
    for step, lengths in enumerate(planner.problem.samples):
        batch = GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist()))
        for pipeline in planner(batch).pipelines:
            top = tops[pipeline.scheme.degree]
            pack_sizes += [min(micro_batch.pack.num_tokens, top) for micro_batch in pipeline.micro_batches]
    return np.array(pack_sizes or [planner.problem.max_length], dtype=np.int64)
