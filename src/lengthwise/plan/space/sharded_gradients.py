"""Further schemes whose stages shard the gradients of whole weights, where that pays.

They hold longer packs and recompute less, and send the gradients of every micro-batch. They join the search space where
typical steps become faster by them: than under all schemes that keep whole gradients, of whatever degree, stages and
method, or under the fastest equal pipelines of one of these. Where they do not, they would lengthen the search alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from lengthwise.core.pipeline_config import PipelineConfig, WeightPlacement
from lengthwise.plan.space.balanced_steps import pays
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.memory_ladder import ComparedTimes, FastestOfFamily, family_of


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


def with_sharded(schemes: Sequence[PipelineConfig]) -> list[PipelineConfig]:
    """``schemes``, and after each that can shard gradients the same with sharded ones."""
    return [variant for scheme in schemes for variant in dict.fromkeys((scheme, sharded(scheme)))]


def paying_schemes(
    schemes: Sequence[PipelineConfig],
    candidates: Sequence[Candidate],
    make: Callable[[Sequence[PipelineConfig]], tuple[Candidate, ...]],
    *,
    num_devices: int,
    max_length: int,
    samples: Sequence[np.ndarray],
) -> tuple[list[PipelineConfig], tuple[Candidate, ...]]:
    """The schemes with sharded gradients of those families by which typical steps become faster, and their candidates.

    ``schemes`` keep whole gradients, ``candidates`` are all that do, ``make`` makes more. Where nothing holds the
    longest sequence otherwise, those join that do.
    """
    more, others = _sharded_families(schemes, candidates, make, max_length=max_length)
    joins = pays(others, candidates, num_devices=num_devices, max_length=max_length, samples=samples)
    return (more, others) if joins else ([], ())


def _sharded_families(
    schemes: Sequence[PipelineConfig],
    candidates: Sequence[Candidate],
    make: Callable[[Sequence[PipelineConfig]], tuple[Candidate, ...]],
    *,
    max_length: int,
) -> tuple[list[PipelineConfig], tuple[Candidate, ...]]:
    """The schemes with sharded gradients, and their candidates, of families in which one of these is faster at some
    length than all that keep whole gradients.
    """
    families: dict[object, tuple[list[PipelineConfig], list[Candidate]]] = {}
    for scheme in schemes:
        if can_shard(scheme):
            families.setdefault(family_of(scheme), ([], []))[0].append(sharded(scheme))
    for candidate in candidates:
        if (family := family_of(candidate.scheme)) in families:
            families[family][1].append(candidate)
    joined, made, compared = list[PipelineConfig](), list[Candidate](), ComparedTimes(max_length)
    for of_family, members in families.values():
        fastest = FastestOfFamily(members, compared, needs_longer=False)
        if fastest.needs_no_recompute:
            continue
        others = make(of_family)
        if any(map(fastest.add, others)):
            joined += of_family
            made += others
    return joined, tuple(made)
