"""Packs in slices, changed one at a time: their order, number of slices, sequences, and the pipeline that has them.

Packs are dealt for equal work and run the longest first. Stages wait less where short packs come first and last, and
slices cost less overhead where they are few and packs are large; what is best of this depends on all packs of the
pipeline. So moves are drawn, and those are kept that end the pipeline sooner.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from random import Random

import numpy as np

from lengthwise.core.one_f_one_b import UpdateParts
from lengthwise.core.sliced_passes import RULES, Rule, SlicedEnd
from lengthwise.cost.overlapped import hides_updates
from lengthwise.plan.heterogeneous.fewer_slices import has_slices
from lengthwise.plan.heterogeneous.sliced_ramps import CutPack, ramps_around
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft, runs_of, strategy_of
from lengthwise.plan.space.draft_times import draft_pipeline_s, issue_order, moved_times_s, pack_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import COUNTS_BETWEEN, sliced_pipeline_end

MOST_TRIED = 1500
"""Moves that are drawn for a draft plan."""
TRY_S = 1.7e-6
"""About the seconds of pricing a move, for each slice and stage."""
EVENED_OUT = 0.25
"""Moves from one pipeline to another, for each within one."""
GAIN = 1e-9
"""Relative gain that is worth a move: beyond rounding."""


Move = Callable[[list[CutPack], int, Random], list[CutPack]]


def rearranged(priced: PricedBatch, draft: DraftPlan, *, most_s: float) -> DraftPlan:
    """The draft plan with packs in slices moved where pipelines end sooner, in about ``most_s`` seconds.

    What passes do not hide of pulls before the first pass and of pushes after the last one counts.
    """
    cost, last = priced.problem.cost, len(draft.phases) - 1
    strategies = [strategy_of(phase, priced.problem.num_devices) for phase in draft.phases]
    parts = cost.update_parts(strategies) if hides_updates(cost) else None
    phases = []
    for number, phase in enumerate(draft.phases):
        ends = {"is_first": number == 0, "is_last": number == last}
        pipelines = [_Moves(priced, pipeline, parts, **ends) for pipeline in phase]
        _move(pipelines, most_s / len(draft.phases))
        phases.append(tuple([moves.pipeline for moves in pipelines]))
    return replace(draft, phases=tuple(phases))


def _move(pipelines: Sequence["_Moves"], most_s: float) -> None:
    """Make the slowest pipeline of a phase faster, then the one that is slowest now, while that helps."""
    random = Random(0)  # every rank plans the same
    most_tried = MOST_TRIED
    for _ in pipelines:
        slowest = max(pipelines, key=lambda moves: moves.time_s)
        before_s, num_tried = slowest.time_s, min(most_tried, int(most_s / slowest.try_s))
        slowest.improve(random, num_tried)
        _even_out(pipelines, random, int(num_tried * EVENED_OUT))
        if slowest.time_s == before_s:
            break
        most_tried, most_s = most_tried // 2, most_s / 2


def _even_out(pipelines: Sequence["_Moves"], random: Random, num_tried: int) -> None:
    """Move sequences from the pipeline that ends last to the one that ends first, where both end sooner than that."""
    sliced = [moves for moves in pipelines if moves.is_sliced]
    for _ in range(num_tried if len(sliced) > 1 else 0):
        slowest, other = (which(sliced, key=lambda moves: moves.time_s) for which in (max, min))
        if slowest is other or any(moves.time_s > slowest.time_s for moves in pipelines):
            return
        limit_s = slowest.time_s * (1 - GAIN)
        fewer_packs, more_packs = _shifted(slowest.packs, other.packs, random)
        fewer = slowest.sooner(fewer_packs, limit_s)
        more = other.sooner(more_packs, limit_s) if fewer is not None else None
        if fewer is not None and more is not None:
            slowest.take(fewer, fewer_packs)
            other.take(more, more_packs)


class _Moves:
    """Moves of the packs of one pipeline."""

    def __init__(self, priced: PricedBatch, pipeline: PipelineDraft, parts: UpdateParts | None, **ends: bool) -> None:
        """``parts``: of the update that passes hide; ``ends``: whether they are of the first phase and of the last."""
        self._priced, self._parts, self._ends = priced, parts, ends
        self.pipeline, self.is_sliced = pipeline, has_slices(pipeline)
        self._base, self._lengths = pipeline.candidate, priced.batch.lengths
        times_s, runs = pack_times_s(priced, pipeline), runs_of(pipeline)
        self.time_s = draft_pipeline_s(priced, pipeline, times_s)[0] + self._moved_s(pipeline, times_s)
        order = issue_order(priced, pipeline, times_s)
        self.packs = [CutPack(self._sorted(pipeline.packs[k]), runs[k].scheme.slices) for k in order]
        counts = next((k for k in COUNTS_BETWEEN if pipeline.candidate.scheme.slices in (k, *COUNTS_BETWEEN[k])), 0)
        self._counts = {pipeline.candidate.scheme.slices, *(COUNTS_BETWEEN.get(counts, ()))}
        """Slices that the longest sequence may have, no pack having more: those of schemes that a bound knows."""
        self._rule: Rule | None = None
        """The fastest for the packs as they are; None: not found yet."""

    @property
    def try_s(self) -> float:
        """About the seconds of pricing a move."""
        return TRY_S * sum(pack.slices for pack in self.packs) * self._base.num_stages or inf

    def improve(self, random: Random, num_tried: int) -> None:
        """Try ramps and moves, and make those that end the pipeline sooner."""
        if not self.is_sliced:
            return
        for packs in islice(self._ramps(), num_tried // len(RULES)):
            option = self._drafted(packs)
            if option is not None and self._end(option, RULES, self.time_s * (1 - GAIN)).end_s < self.time_s:
                self.take(option, packs)
        for _ in range(num_tried):
            move = random.choices(MOVES, WEIGHTS)[0]
            packs = move(self.packs, random.randrange(len(self.packs)), random)
            option = self.sooner(packs, self.time_s * (1 - GAIN))
            if option is not None:
                self.take(option, packs)

    def _ramps(self) -> Iterator[list[CutPack]]:
        uncut = self._base.in_slices(1)
        works_s = uncut.times_s(np.array(self._lengths))
        yield from ramps_around(
            self.packs, works_s, overhead_s=uncut.overhead_s, num_stages=uncut.num_stages, forwards=uncut.forwards
        )

    def sooner(self, packs: list[CutPack], limit_s: float) -> PipelineDraft | None:
        """The pipeline with these packs if it ends before ``limit_s`` under the rule that is the fastest so far."""
        option = self._drafted([CutPack(self._sorted(positions), slices) for positions, slices in packs])
        if option is None:
            return None
        if self._rule is None:
            self._rule = self._end(self._drafted(self.packs) or option, RULES).rule
        return option if self._end(option, (self._rule,), limit_s).end_s < limit_s else None

    def take(self, pipeline: PipelineDraft, packs: list[CutPack]) -> None:
        """Go on from what :meth:`sooner` found."""
        self.pipeline, self.packs = pipeline, packs
        self.time_s, self._rule = self._end(pipeline, RULES)

    def _end(self, pipeline: PipelineDraft, rules: Sequence[Rule], limit_s: float = inf) -> SlicedEnd:
        lengths = [[self._lengths[position] for position in pack] for pack in pipeline.packs]
        times_s = pack_times_s(self._priced, pipeline)
        end_s, rule = sliced_pipeline_end(runs_of(pipeline), lengths, times_s, limit_s=limit_s, rules=rules)
        return SlicedEnd(end_s if end_s >= limit_s else end_s + self._moved_s(pipeline, times_s), rule)

    def _moved_s(self, pipeline: PipelineDraft, times_s: list[float]) -> float:
        """Seconds of pulls and pushes that the pipeline's passes do not hide."""
        if self._parts is None:
            return 0.0
        return moved_times_s(self._priced, (pipeline,), [times_s], self._parts, **self._ends)[0]

    def _sorted(self, positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(positions, key=lambda position: (-self._lengths[position], position)))

    def _drafted(self, packs: list[CutPack]) -> PipelineDraft | None:
        """The pipeline with these packs in this order; None where one has more tokens than fit, or slices of a number
        that no scheme has, and where there is none.
        """
        if not packs:
            return None
        base, most_slices = self._base, max(slices for _, slices in packs)
        runs = tuple([base.in_slices(slices) for _, slices in packs])
        _, of_longest = max((self._lengths[positions[0]], slices) for positions, slices in packs)
        if most_slices not in self._counts or of_longest != most_slices:
            return None
        tokens = [sum(self._lengths[position] for position in positions) for positions, _ in packs]
        if any(num_tokens > run.max_tokens for num_tokens, run in zip(tokens, runs)):
            return None
        positions = tuple([positions for positions, _ in packs])
        return replace(
            self.pipeline, candidate=base.in_slices(most_slices), packs=positions, runs=runs, is_in_order=True
        )


def _of_other_slices(packs: list[CutPack], number: int, random: Random) -> list[CutPack]:
    slices = packs[number].slices
    others = (2 * slices, slices // 2, slices + 1, slices - 1, round(1.5 * slices), round(0.75 * slices))
    changed = packs[number]._replace(slices=max(1, random.choice(others)))
    return [*packs[:number], changed, *packs[number + 1 :]]


def _in_another_place(packs: list[CutPack], number: int, random: Random) -> list[CutPack]:
    others = [*packs[:number], *packs[number + 1 :]]
    place = random.choice((0, len(others), random.randint(0, len(others))))
    return [*others[:place], packs[number], *others[place:]]


def _joined(packs: list[CutPack], number: int, random: Random) -> list[CutPack]:
    """Two packs in one, of as many slices or one less."""
    first, second = packs[number], packs[other := random.randrange(len(packs))]
    if other == number:
        return packs
    slices = first.slices + second.slices - random.randint(0, 1)
    both = CutPack((*first.positions, *second.positions), max(slices, first.slices))
    return [both if k == number else pack for k, pack in enumerate(packs) if k != other]


def _parted(packs: list[CutPack], number: int, random: Random) -> list[CutPack]:
    """A pack in two, with every second sequence each."""
    positions, slices = packs[number]
    if len(positions) < 2:
        return packs
    halves = CutPack(positions[::2], (slices + 1) // 2), CutPack(positions[1::2], max(1, slices // 2))
    others = [*packs[:number], halves[0], *packs[number + 1 :]]
    place = random.choice((0, number + 1, len(others)))
    return [*others[:place], halves[1], *others[place:]]


def _of_other_sequences(packs: list[CutPack], number: int, random: Random) -> list[CutPack]:
    """One sequence in another pack."""
    positions, other = packs[number].positions, random.randrange(len(packs))
    if len(positions) < 2 or other == number:
        return packs
    moved, changed = random.choice(positions), list(packs)
    changed[number] = packs[number]._replace(positions=tuple([position for position in positions if position != moved]))
    changed[other] = packs[other]._replace(positions=(*packs[other].positions, moved))
    return changed


def _shifted(packs: list[CutPack], others: list[CutPack], random: Random) -> tuple[list[CutPack], list[CutPack]]:
    """Packs of two pipelines, with a pack of the first or one sequence of it in the second."""
    number, place = random.randrange(len(packs)), random.randint(0, len(others))
    positions, slices = packs[number]
    if len(positions) == 1 or (len(packs) > 1 and random.random() < 0.5):
        return [*packs[:number], *packs[number + 1 :]], [*others[:place], packs[number], *others[place:]]
    moved = random.choice(positions)
    left = CutPack(tuple([position for position in positions if position != moved]), slices)
    fewer = [*packs[:number], left, *packs[number + 1 :]]
    if place == len(others) or random.random() < 0.5:
        return fewer, [*others[:place], CutPack((moved,), 1), *others[place:]]
    joined = others[place]._replace(positions=(*others[place].positions, moved))
    return fewer, [*others[:place], joined, *others[place + 1 :]]


MOVES: tuple[Move, ...] = (_of_other_slices, _in_another_place, _joined, _parted, _of_other_sequences)
WEIGHTS = (0.3, 0.3, 0.2, 0.1, 0.1)
