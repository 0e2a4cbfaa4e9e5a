"""Packs in slices, changed one at a time: their order, their number of slices, and the sequences that they hold.

Packs are dealt for equal work and run the longest first. Stages wait less where short packs come first and last, and
slices cost less overhead where they are few and packs are large; what is best of this depends on all packs of the
pipeline. So moves are drawn, and those are kept that end the pipeline sooner.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import NamedTuple

from lengthwise.core.sliced_passes import RULES, Rule, SlicedEnd
from lengthwise.plan.heterogeneous.fewer_slices import has_slices
from lengthwise.plan.space.draft_plan import DraftPlan, Phase, PipelineDraft, runs_of
from lengthwise.plan.space.draft_times import draft_pipeline_s, issue_order, pack_times_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.sliced_packs import COUNTS_BETWEEN, sliced_pipeline_end

MOST_TRIED = 1500
"""Moves that are drawn for a draft plan."""
TRY_S = 1.7e-6
"""About the seconds of pricing a move, for each slice and stage."""
GAIN = 1e-9
"""Relative gain that is worth a move: beyond rounding."""


class CutPack(NamedTuple):
    """A pack of a pipeline, and how many slices it has."""

    positions: tuple[int, ...]
    """Of its sequences in the batch, the longest first."""
    slices: int


Move = Callable[[list[CutPack], int, Random], list[CutPack]]


def rearranged(priced: PricedBatch, draft: DraftPlan, *, most_s: float) -> DraftPlan:
    """The draft plan with packs in slices moved where pipelines end sooner, in about ``most_s`` seconds."""
    return replace(draft, phases=tuple([_phase(priced, phase, most_s / len(draft.phases)) for phase in draft.phases]))


def _phase(priced: PricedBatch, phase: Phase, most_s: float) -> Phase:
    """The phase with its slowest pipeline faster, then the one that is slowest now, while that helps."""
    times_s = [draft_pipeline_s(priced, pipeline, pack_times_s(priced, pipeline))[0] for pipeline in phase]
    improved, most_tried = list(phase), MOST_TRIED
    for _ in phase:
        slowest = max(range(len(phase)), key=lambda number: times_s[number])
        pipeline = improved[slowest]
        if not has_slices(pipeline):
            break
        num_slices = sum(run.scheme.slices for run in runs_of(pipeline))
        num_tried = min(most_tried, int(most_s / (TRY_S * num_slices * pipeline.candidate.num_stages)))
        improved[slowest], faster_s = _Moves(priced, pipeline, times_s[slowest]).fastest(num_tried)
        if faster_s == times_s[slowest]:
            break
        times_s[slowest], most_tried, most_s = faster_s, most_tried // 2, most_s / 2
    return tuple(improved)


class _Moves:
    """Moves of the packs of one pipeline."""

    def __init__(self, priced: PricedBatch, pipeline: PipelineDraft, time_s: float) -> None:
        self._priced, self._pipeline, self._time_s = priced, pipeline, time_s
        self._base, self._lengths = pipeline.candidate, priced.batch.lengths
        order, runs = issue_order(priced, pipeline, pack_times_s(priced, pipeline)), runs_of(pipeline)
        self._packs = [CutPack(self._sorted(pipeline.packs[k]), runs[k].scheme.slices) for k in order]
        self._longest = max((position for pack in pipeline.packs for position in pack), key=self._lengths.__getitem__)
        counts = next((k for k in COUNTS_BETWEEN if pipeline.candidate.scheme.slices in (k, *COUNTS_BETWEEN[k])), 0)
        self._counts = {pipeline.candidate.scheme.slices, *(COUNTS_BETWEEN.get(counts, ()))}
        """Slices that the longest sequence may have, no pack having more: those of schemes that a bound knows."""

    def fastest(self, num_tried: int) -> tuple[PipelineDraft, float]:
        """The pipeline after the moves that helped, and its seconds.

        Moves are looked at under the rule that is the fastest one for the pipeline before them.
        """
        random = Random(0)  # every rank plans the same
        rule = self._end(self._drafted(self._packs) or self._pipeline, RULES).rule
        for _ in range(num_tried):
            move = random.choices(MOVES, WEIGHTS)[0]
            packs = move(self._packs, random.randrange(len(self._packs)), random)
            option = self._drafted([CutPack(self._sorted(positions), slices) for positions, slices in packs])
            limit_s = self._time_s * (1 - GAIN)
            if option is not None and self._end(option, (rule,), limit_s).end_s < limit_s:
                self._pipeline, self._packs = option, packs
                self._time_s, rule = self._end(option, RULES)
        return self._pipeline, self._time_s

    def _end(self, pipeline: PipelineDraft, rules: Sequence[Rule], limit_s: float = inf) -> SlicedEnd:
        lengths = [[self._lengths[position] for position in pack] for pack in pipeline.packs]
        times_s = pack_times_s(self._priced, pipeline)
        return sliced_pipeline_end(runs_of(pipeline), lengths, times_s, limit_s=limit_s, rules=rules)

    def _sorted(self, positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(positions, key=lambda position: (-self._lengths[position], position)))

    def _drafted(self, packs: list[CutPack]) -> PipelineDraft | None:
        """The pipeline with these packs in this order; None where one has more tokens than fit, or it has slices of a
        number that no scheme has.
        """
        base, most_slices = self._base, max(slices for _, slices in packs)
        runs = tuple([base.in_slices(slices) for _, slices in packs])
        of_longest = next(slices for positions, slices in packs if self._longest in positions)
        if most_slices not in self._counts or of_longest != most_slices:
            return None
        tokens = [sum(self._lengths[position] for position in positions) for positions, _ in packs]
        if any(num_tokens > run.max_tokens for num_tokens, run in zip(tokens, runs)):
            return None
        positions = tuple([positions for positions, _ in packs])
        return replace(
            self._pipeline, candidate=base.in_slices(most_slices), packs=positions, runs=runs, is_in_order=True
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


MOVES: tuple[Move, ...] = (_of_other_slices, _in_another_place, _joined, _parted, _of_other_sequences)
WEIGHTS = (0.3, 0.3, 0.2, 0.1, 0.1)
