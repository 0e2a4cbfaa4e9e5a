"""Cut units whose sequences share what they begin with, where they do not fit or a cut makes the step faster.

A unit is planned as one sequence of its distinct tokens. One that no group of devices holds is cut in parts, which
repeat as few tokens as can be; so is one of more than a device's fair share of the step, if the step is predicted to
take less time for it.
"""

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from lengthwise.core.batch import GlobalBatch, attention_length
from lengthwise.core.cut_plan import CutPlan, TreeOf
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.core.step_plan import StepPlan
from lengthwise.plan.solve.tree_parts import cut_tree
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch

SHARES = (1.0, 0.75, 0.5, 0.35)
"""Sizes of parts that are tried, as shares of the tokens that each of the smallest groups of devices gets."""
ENOUGH = 0.01
"""Up to this share above its perfectly balanced time a step's units are not cut for balance."""
CUT_S, WAITED_SHARE = 0.05, 0.1
"""About the seconds to cut units and to plan once more, and the share of what a step may gain that these may take where
training waits."""

Parts = Mapping[int, tuple[tuple[int, ...], ...]]
"""The parts of each unit that is cut: which of its sequences each has."""


class StepPlanner(Protocol):
    """A planner of steps, as far as units are cut for it."""

    @property
    def problem(self) -> PlanningProblem:
        """The planning problem under costs as they are known."""
        ...

    @property
    def lr_scaling(self) -> LrScaling | None:
        """How the learning-rate of a step follows its batch."""
        ...

    def __call__(self, batch: GlobalBatch, /) -> StepPlan:
        """The plan of a batch."""
        ...


def plan_with_cuts(planner: StepPlanner, batch: GlobalBatch, tree_of: TreeOf) -> CutPlan:
    """Plan a batch of units, some of them in parts where they do not fit whole or the step is faster for it.

    A planner of one's own, that is any function from a batch to its plan, gets it whole.

    Raises:
        InfeasibleError: a single sequence of a unit fits on no group of devices.
    """
    if (problem := getattr(planner, "problem", None)) is None:
        return CutPlan(plan=planner(batch), batch=batch)
    reach = problem.leanest.max_tokens
    too_long = {unit: reach for unit, length in zip(batch.ids, batch.lengths) if length > reach}
    needed = _planned(planner, batch, _cut(too_long, tree_of), tree_of)
    smallest = min(candidate.num_devices for candidate in problem.candidates)
    num_groups = problem.num_devices // smallest
    share = batch.num_tokens / num_groups
    large = [unit for unit, length in zip(batch.ids, batch.lengths) if length > share]
    if num_groups == 1 or not large:
        return needed
    priced = PricedBatch(problem, batch)
    candidate = min(
        (candidate for candidate in problem.candidates if candidate.num_devices == smallest),
        key=lambda candidate: float(priced.times_s(candidate).sum()),
    )
    even_s = float(priced.times_s(candidate).sum()) / num_groups + needed.plan.update_s
    gain_s = needed.plan.time_s - even_s
    if gain_s <= ENOUGH * even_s or (problem.is_waited_for and WAITED_SHARE * gain_s < CUT_S):
        return needed
    ways = [
        _cut({unit: min(reach, int(share * part)) for unit in large} | too_long, tree_of, at_least_paths=True)
        for part in SHARES
    ]
    batches = [(_cut_batch(batch, parts, tree_of)[0], parts) for parts in ways if parts]
    if not batches:
        return needed
    spans = [_least_span_s(problem, candidate, cut, num_groups) for cut, _ in batches]
    balanced = _planned(planner, batch, batches[int(np.argmin(spans))][1], tree_of)
    return min(needed, balanced, key=lambda way: way.plan.time_s)


def _cut(
    limits: Mapping[int, int], tree_of: TreeOf, *, at_least_paths: bool = False
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The parts of units under a limit on the tokens of each, of those that are then more than one.

    ``at_least_paths``: where a sequence is longer than its limit, parts are as long as that; else such a unit stays
    whole, and is refused when it is planned.
    """
    parts = dict[int, tuple[tuple[int, ...], ...]]()
    for unit, limit in limits.items():
        tree = tree_of(unit)
        sizes = np.diff(tree.bounds).tolist()
        paths = [tree.paths[leaf] for leaf in tree.leaves]
        if at_least_paths:
            limit = max(limit, int(tree.lengths.max()))
        of_unit = cut_tree(sizes, paths, limit)
        if of_unit is not None and len(of_unit.parts) > 1:
            parts[unit] = of_unit.parts
    return parts


def _planned(planner: StepPlanner, batch: GlobalBatch, parts: Parts, tree_of: TreeOf) -> CutPlan:
    """The plan of a batch whose units are cut in these parts; its learning-rate is that of the whole units."""
    cut, of_parts = _cut_batch(batch, parts, tree_of)
    plan = planner(cut)
    if parts and planner.lr_scaling is not None:
        plan = replace(plan, lr_factor=planner.lr_scaling.of(batch))
    return CutPlan(plan=plan, batch=cut, parts=of_parts, repeated_tokens=cut.num_tokens - batch.num_tokens)


def _cut_batch(
    batch: GlobalBatch, parts: Parts, tree_of: TreeOf
) -> tuple[GlobalBatch, dict[int, tuple[int, tuple[int, ...]]]]:
    """The batch with parts in place of the units that are cut, under the numbers after those of the units."""
    if not parts:
        return batch, {}
    attends = batch.attention_lengths or batch.lengths
    planned = [row for row in zip(batch.ids, batch.lengths, attends) if row[0] not in parts]
    of_parts, number = dict[int, tuple[int, tuple[int, ...]]](), 1 + max(batch.ids)
    for unit in (unit for unit in batch.ids if unit in parts):
        for members in parts[unit]:
            num_tokens, num_pairs = tree_of(unit).part_sizes(members)
            planned.append((number, num_tokens, attention_length(num_tokens, num_pairs)))
            of_parts[number], number = (unit, members), number + 1
    ids, lengths, attends = zip(*planned)
    return replace(batch, ids=ids, lengths=lengths, attention_lengths=attends), of_parts


def _least_span_s(problem: PlanningProblem, candidate: Candidate, batch: GlobalBatch, num_groups: int) -> float:
    """About the seconds until the last of ``num_groups`` groups is done: the longest sequences first, to whoever is."""
    ends_s = [0.0] * num_groups
    for time_s in sorted(PricedBatch(problem, batch).times_s(candidate).tolist(), reverse=True):
        heapq.heapreplace(ends_s, ends_s[0] + time_s)
    return max(ends_s)
