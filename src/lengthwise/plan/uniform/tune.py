"""Tuning: choose the set-up of a policy that is fastest on typical batches. Exact on those it looks at.

Published baselines are hand-tuned; one that is not would make any other policy look good. Set-ups are tried in the
order of a floor below their time, and a trial ends as soon as floors alone show that it cannot win.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.split_backwards import with_whole_backwards

MAX_BATCHES = 8
MAX_SEQUENCES = 6_000
"""Sequences of all batches looked at together; one batch is looked at however many it holds,"""
MOST_SEQUENCES = 1 << 20
"""up to this many: of a larger one, every so many sequences stand for all, the longest among them."""
OCTAVES = 6
"""Lengths of the made-up batch, where there is no sample: each half of the one before."""


class Tunable(Protocol):
    """A policy with one set-up."""

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan of a step."""
        ...

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the step takes at least; cheaper than ``phases``."""
        ...


AnyTunable = TypeVar("AnyTunable", bound=Tunable)


def fastest(policies: Sequence[AnyTunable], batches: Sequence[PricedBatch]) -> AnyTunable:
    """The policy with the least mean time over ``batches``; of equals the one with the lowest floor, then the first."""
    floors_s = np.array([[policy.floor_s(batch) for batch in batches] for policy in policies])
    best, best_s = None, np.inf
    for number in np.argsort(floors_s.sum(axis=1), kind="stable").tolist():
        total_s = float(floors_s[number].sum())
        for batch, floor_s in zip(batches, floors_s[number].tolist()):
            if total_s >= best_s:
                break
            total_s += time_s(batch, DraftPlan(phases=policies[number].phases(batch))) - floor_s
        if total_s < best_s:
            best, best_s = policies[number], total_s
    assert best is not None, "a policy was given and its time is finite"
    return best


def tuning_batches(problem: PlanningProblem) -> list[PricedBatch]:
    """The batches that tuning looks at: samples at even distances, or one made up of the longest length's halves.

    The same ones for all policies, which share the times found.
    """
    return problem.once("tuning", lambda: _tuning_batches(problem))


def _tuning_batches(problem: PlanningProblem) -> list[PricedBatch]:
    samples = problem.samples or (_octaves(problem),)
    mean = sum(map(len, samples)) / len(samples)
    count = int(np.clip(MAX_SEQUENCES // max(1.0, mean), 1, min(MAX_BATCHES, len(samples))))
    chosen = [_thinned(samples[number * len(samples) // count]) for number in range(count)]
    return [
        PricedBatch(problem, GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist())))
        for step, lengths in enumerate(chosen)
    ]


def _thinned(lengths: np.ndarray) -> np.ndarray:
    """The lengths of a batch, or about ``MOST_SEQUENCES`` of them in the same order."""
    stride = -(-len(lengths) // MOST_SEQUENCES)
    return lengths if stride == 1 else lengths[int(lengths.argmax()) % stride :: stride]


def _octaves(problem: PlanningProblem) -> np.ndarray:
    """Lengths with as many tokens in each octave: a few of the longest length, twice as many of half of it, ..."""
    few = max(1, problem.num_devices // 16)
    return np.concatenate(
        [np.full(few * 2**octave, max(1, problem.max_length // 2**octave)) for octave in range(OCTAVES)]
    )


def tiling_candidates(problem: PlanningProblem, *, policy: str) -> list[Candidate]:
    """Candidates that hold the longest sequence of the run; equal pipelines of some may leave devices idle.

    Of these policies' systems none cuts micro-batches into slices or splits backwards: such schemes are for what fits
    under no other, and for where there are no others.

    Raises:
        InfeasibleError: there is none.
    """
    fitting = [candidate for candidate in problem.candidates if candidate.max_tokens >= problem.max_length]
    if fitting:
        plain = [candidate for candidate in with_whole_backwards(fitting) if candidate.scheme.slices == 1]
        return few_recomputes(plain or fitting)
    leanest = problem.leanest
    raise InfeasibleError(
        f"policy {policy} runs equal pipelines of one scheme: a sequence of {problem.max_length:,} tokens "
        f"{problem.needs(leanest, problem.max_length)} Set {Setting.MAX_LENGTH}={leanest.max_tokens} or less with "
        f"{Setting.OVER_LENGTH}=split.",
        what="the longest sequence", value=problem.max_length, limit=leanest.max_tokens, unit="tokens",
    )  # fmt: skip


def few_recomputes(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep the fewest and the most recomputed layers of candidates that differ in nothing else.

    More recompute than needed can only pay by the larger packs it allows, and then most by the largest.
    """
    by_methods: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        scheme = candidate.scheme
        how = scheme.offload, scheme.tile_tokens, scheme.head_groups, scheme.keep_attention
        key = candidate.family, scheme.methods, how
        by_methods.setdefault(key, []).append(candidate)
    levels = [sorted(members, key=lambda candidate: candidate.scheme.num_recomputed) for members in by_methods.values()]
    return [candidate for members in levels for candidate in dict.fromkeys((members[0], members[-1]))]
