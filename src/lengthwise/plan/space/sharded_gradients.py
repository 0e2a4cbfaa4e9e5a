"""Further schemes whose stages shard the gradients of whole weights, where that pays.

They hold longer packs and recompute less, and send the gradients of every micro-batch. They join the search space where
one of them is faster, at some length, than all of the same degree, stages and method that keep whole gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

from lengthwise.core.pipeline_config import PipelineConfig, WeightPlacement
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.memory_ladder import FastestOfFamily, family_of


class GradientSharding(StrEnum):
    """Which schemes of whole weights, shared by several devices, shard the gradients of every micro-batch."""

    NONE = "none"
    AUTO = "auto"
    ALL = "all"


def can_shard(scheme: PipelineConfig) -> bool:
    """Whether several devices of a stage hold whole weights, whose gradients they may shard."""
    return scheme.degree > 1 and scheme.weights is WeightPlacement.WHOLE


def sharded(scheme: PipelineConfig) -> PipelineConfig:
    """Return the scheme with sharded gradients, where it can have them."""
    return replace(scheme, shard_gradients=True) if can_shard(scheme) else scheme


def paying_schemes(
    schemes: Sequence[PipelineConfig],
    candidates: Sequence[Candidate],
    make: Callable[[Sequence[PipelineConfig]], tuple[Candidate, ...]],
    *,
    max_length: int,
) -> tuple[list[PipelineConfig], tuple[Candidate, ...]]:
    """The schemes with sharded gradients of those families where they pay, and their candidates.

    ``schemes`` keep whole gradients, ``candidates`` are those of them that hold something, ``make`` makes more.
    """
    families: dict[object, tuple[list[PipelineConfig], list[Candidate]]] = {}
    for scheme in schemes:
        if can_shard(scheme):
            families.setdefault(family_of(scheme), ([], []))[0].append(sharded(scheme))
    for candidate in candidates:
        if can_shard(candidate.scheme):
            families[family_of(candidate.scheme)][1].append(candidate)
    joined: list[PipelineConfig] = []
    made: list[Candidate] = []
    for of_family, members in families.values():
        fastest = FastestOfFamily(members, max_length, needs_longer=False)
        if fastest.needs_no_recompute:
            continue
        others = make(of_family)
        if any(map(fastest.add, others)):
            joined += of_family
            made += others
    return joined, tuple(made)
