"""The plan of a step in which units of sequences with shared prefixes may be cut in parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.core.step_plan import StepPlan

PlanWithCuts = Callable[[Any, GlobalBatch, "TreeOf"], "CutPlan"]
"""Plans a batch of units with a planner, some of them cut."""
TreeOf = Callable[[int], PrefixTree]
"""Gives the prefix tree of a unit by its number."""


@dataclass(frozen=True, kw_only=True)
class CutPlan:
    """A plan, and the parts of units that it computes in place of whole ones."""

    plan: StepPlan
    batch: GlobalBatch
    """What is planned: units, and parts of those that are cut, under numbers of their own."""
    parts: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By number, the unit that a part is of, and which of its sequences the part has, from 0."""
    repeated_tokens: int = 0
    """Tokens that are computed more than once, because several parts of a unit begin with them."""
