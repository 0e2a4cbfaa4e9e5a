"""Draft plans that are nearly the fastest, made faster without other pipelines: packs dealt anew, run as other
candidates, in another order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lengthwise.plan.heterogeneous.fastest_runs import FastestRuns
from lengthwise.plan.heterogeneous.fewer_slices import has_slices
from lengthwise.plan.heterogeneous.local_sequences import LocalSequences
from lengthwise.plan.heterogeneous.repack import repacked
from lengthwise.plan.heterogeneous.sliced_moves import rearranged
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.candidate import Family
from lengthwise.plan.space.draft_plan import DraftPlan
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.ramped_packs import may_ramp, ramped
from lengthwise.plan.space.split_backwards import SplitBackwards

TimedDraft = tuple[DraftPlan, float]
"""A draft plan and its seconds."""
FEW_REPACKED, REPACK_S = 32, 0.03
"""Most sequences of a step whose plans are packed anew, and about so many seconds that takes."""
MOST_RAMPED, MOST_REARRANGED = 3, 2
"""Most plans of which ramps are tried, and in which packs in slices are moved."""
MOVED_SHARE, MOST_OF_STEP = 4.0, 0.5
"""Seconds of moving packs or forming ramps for each that a plan is above the bound, as one of planning is one of a
processor, and one of a step is one of every device; and at most for each second of the step, which is planned while
another is computed."""
MANY_DEVICES = 512
"""Devices above which twice as much is worth it."""
NEARLY, NEARLY_SLICED, NEARLY_RAMPED = 1.03, 1.15, 1.06
"""How many times the seconds of the fastest plan one may take that is packed anew, and run as other candidates, before
they compare; one with slices, whose packs may become smaller; one whose packs become ramps."""


class DraftRefinement:
    """Makes draft plans of a search space faster."""

    def __init__(self, runs: FastestRuns, split_backwards: SplitBackwards, local: LocalSequences) -> None:
        self._runs, self._split_backwards, self._local = runs, split_backwards, local

    def of(
        self, priced: PricedBatch, drafts: Sequence[TimedDraft], bound_s: float, *, search_share: float
    ) -> list[TimedDraft]:
        """The draft plans, and faster ones of the same pipelines.

        ``search_share``: seconds to search for each that the plans are above ``bound_s``.
        """
        drafts = [*drafts, *_unpadded(priced, drafts)]
        is_few = len(priced.lengths) <= FEW_REPACKED
        is_repacked = is_few and search_share * (least_s(drafts) - bound_s) > REPACK_S
        if is_repacked:
            drafts += _repacked(priced, drafts)
        drafts = self._improved(priced, drafts)
        drafts += _rearranged(priced, drafts, bound_s, search_share)
        drafts += self._split_backwards.faster(priced, drafts)
        drafts += (in_ramps := _ramped(priced, drafts, bound_s, search_share))
        if is_repacked and in_ramps:
            drafts += _repacked(priced, in_ramps)
        return drafts + self._local.faster(priced, drafts)

    def _improved(self, priced: PricedBatch, drafts: Sequence[TimedDraft]) -> list[TimedDraft]:
        """The draft plans, those that are nearly the fastest with each pack as the candidate that is fastest for it."""
        fastest_s = least_s(drafts)
        return [
            self._runs.improve(priced, draft, draft_s) if draft_s <= fastest_s * _nearly(draft) else (draft, draft_s)
            for draft, draft_s in drafts
        ]


def least_s(drafts: Sequence[TimedDraft]) -> float:
    """The seconds of the fastest draft plan; inf if there is none."""
    return min((draft_s for _, draft_s in drafts), default=float("inf"))


def _nearly(draft: DraftPlan) -> float:
    """How many times the fastest plan's seconds one may take that may still become the fastest."""
    is_sliced = any(pipeline.candidate.scheme.slices > 1 for phase in draft.phases for pipeline in phase)
    return NEARLY_SLICED if is_sliced else NEARLY


def _timed(priced: PricedBatch, drafts: Sequence[DraftPlan]) -> list[TimedDraft]:
    return [(draft, time_s(priced, draft)) for draft in drafts]


def _repacked(priced: PricedBatch, drafts: Sequence[TimedDraft]) -> list[TimedDraft]:
    """The draft plans that are nearly the fastest with their slowest pipelines packed anew."""
    near_s = least_s(drafts) * NEARLY
    near = [draft for draft, draft_s in drafts if draft_s <= near_s]
    return _timed(priced, [DraftPlan(phases=tuple([repacked(priced, p) for p in draft.phases])) for draft in near])


def _rearranged(
    priced: PricedBatch, drafts: Sequence[TimedDraft], bound_s: float, search_share: float
) -> list[TimedDraft]:
    """The draft plans that are nearly the fastest with packs in slices moved."""
    if priced.problem.objective is not Objective.FLOW_SHOP or priced.problem.lattice is not None:
        return []
    sliced = [
        (draft, draft_s)
        for draft, draft_s in _of_each_strategy(drafts, MOST_REARRANGED, NEARLY)
        if any(has_slices(pipeline) for phase in draft.phases for pipeline in phase)
    ]
    budgets_s = [search_share * _worth_s(priced, draft_s, bound_s) for _, draft_s in sliced]
    return _timed(priced, [rearranged(priced, draft, most_s=s) for (draft, _), s in zip(sliced, budgets_s)])


def _ramped(priced: PricedBatch, drafts: Sequence[TimedDraft], bound_s: float, search_share: float) -> list[TimedDraft]:
    """The draft plans that are nearly the fastest with packs that grow and shrink again."""
    return [
        ramped(priced, draft)
        for draft, draft_s in _of_each_strategy(drafts, MOST_RAMPED, NEARLY_RAMPED)
        if may_ramp(priced, draft, most_s=search_share * _worth_s(priced, draft_s, bound_s))
    ]


def _worth_s(priced: PricedBatch, draft_s: float, bound_s: float) -> float:
    """The seconds that it is worth to make a plan faster where as much is searched for as may be gained."""
    worth_s = min(MOVED_SHARE * (draft_s - bound_s), MOST_OF_STEP * draft_s)
    return worth_s * (2.0 if priced.problem.num_devices > MANY_DEVICES else 1.0)


def _of_each_strategy(drafts: Sequence[TimedDraft], most: int, nearly: float) -> list[TimedDraft]:
    """The fastest draft plan of each of the strategies that are nearly the fastest, ``most`` of them."""
    near_s, fastest = least_s(drafts) * nearly, dict[frozenset[tuple[Family, int]], TimedDraft]()
    for draft, draft_s in sorted(drafts, key=lambda draft: draft[1]):
        pipelines = Counter(pipeline.candidate.family for phase in draft.phases for pipeline in phase)
        if draft_s <= near_s:
            fastest.setdefault(frozenset(pipelines.items()), (draft, draft_s))
    return list(fastest.values())[:most]


def _unpadded(priced: PricedBatch, drafts: Sequence[TimedDraft]) -> list[TimedDraft]:
    """The draft plans that pad and are nearly the fastest, with the same packs and no padding."""
    near_s = least_s(drafts) * NEARLY
    near = [draft.phases for draft, draft_s in drafts if draft_s <= near_s]
    anew = [
        DraftPlan(phases=tuple([tuple([replace(pipeline, padded_to=(), rows=0) for pipeline in p]) for p in phases]))
        for phases in near
        if any(pipeline.padded_to for phase in phases for pipeline in phase)
    ]
    return _timed(priced, anew)
