"""verl's balancing of rollouts by sequence length with dynamic micro-batches, written from its description.

Sequences are dealt to data-parallel ranks by the largest differencing method (Karmarkar and Karp, 1982) over their
work, 24,576 l + l^2 for l tokens, as many to each rank. Each rank then makes micro-batches: as many as its tokens need
at a limit of tokens, on every rank as many as on the one that needs most, balanced by the same method. Everything else,
the parallel configuration and recomputation, is fixed for a run.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import step_times_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import ranks_of

Part = tuple[int, ...]
LINEAR_WORK = 24_576
"""Of a token beside its attention, in units of which attention is the square of the length: that of a 7B model."""


def work_of(lengths: np.ndarray) -> np.ndarray:
    """The work by which sequences are balanced."""
    return LINEAR_WORK * lengths.astype(np.int64) + lengths.astype(np.int64) ** 2


def differencing(work: Sequence[int], num_parts: int, *, is_equal: bool) -> list[Part]:
    """Partition items by the largest differencing method: those of largest spread are joined, one of them turned round.

    ``is_equal``: as many items in each part; their number is a multiple of that of parts.
    """
    order = sorted(range(len(work)), key=lambda item: (work[item], item))
    if is_equal:
        assert len(work) % num_parts == 0, f"{len(work)} items cannot be dealt evenly to {num_parts}"
        firsts = [order[first : first + num_parts] for first in range(0, len(order), num_parts)]
    else:
        firsts = [[item] for item in order]
    heap = []
    for number, items in enumerate(firsts):
        parts = [(work[item], (item,)) for item in items] + [(0, ())] * (num_parts - len(items))
        heap.append(_entry(parts, number))
    heapq.heapify(heap)
    for number in range(len(firsts), 2 * len(firsts) - 1):
        *_, large = heapq.heappop(heap)
        *_, small = heapq.heappop(heap)
        joined = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(large, reversed(small))]
        heapq.heappush(heap, _entry(joined, number))
    return [tuple(sorted(items)) for _, items in heap[0][-1]]


def _entry(parts: list[tuple[int, Part]], number: int) -> tuple[int, int, int, list[tuple[int, Part]]]:
    """A partition in the order of a heap: the largest spread first, of equals the largest part."""
    parts = sorted(parts, key=lambda part: part[0], reverse=True)
    return parts[-1][0] - parts[0][0], -parts[0][0], number, parts


def micro_batches(lengths: np.ndarray, num_ranks: int, limit: int) -> list[list[Part]]:
    """The micro-batches of each data-parallel rank, of about ``limit`` tokens; as many on every rank."""
    work = work_of(lengths).tolist()
    dealt = differencing(work, num_ranks, is_equal=len(lengths) % num_ranks == 0)
    count = max(min(len(part), -(-int(lengths[list(part)].sum()) // limit)) for part in dealt)
    by_rank = []
    for part in dealt:
        parts = differencing([work[item] for item in part], min(count, len(part)), is_equal=False)
        packs = [tuple(part[place] for place in places) for places in parts if places]
        by_rank.append(sorted(packs, key=lambda pack: -sum(work[item] for item in pack)))
    return by_rank


@lru_cache(maxsize=512)
def _dealt(lengths: tuple[int, ...], num_ranks: int, limit: int) -> list[list[Part]]:
    return micro_batches(np.array(lengths), num_ranks, limit)


@dataclass(frozen=True, kw_only=True)
class DynamicBatches:
    """One fixed parallel configuration with its limit of tokens."""

    problem: PlanningProblem
    candidate: Candidate
    limit: int
    """Tokens of a micro-batch over all devices that share it, about; not below the longest sequence."""

    def draft(self, priced: PricedBatch) -> DraftPlan | None:
        """The pipelines of a step; None where some micro-batch is over what memory holds, however low the limit.

        Balance by work does not see tokens: micro-batches of short sequences have more of them. In a step where that is
        over what memory holds, a lower limit is taken.
        """
        ranks, limit = ranks_of(self.problem, self.candidate), self.limit
        while limit >= self.problem.max_length // 4:
            dealt = _dealt(priced.batch.lengths, len(ranks), limit)
            packs = [pack for packs in dealt for pack in packs]
            if max(int(priced.lengths[list(pack)].sum()) for pack in packs) <= self.candidate.max_tokens:
                return DraftPlan(
                    phases=(
                        tuple(
                            PipelineDraft(candidate=self.candidate, ranks=ranks, packs=tuple(own))
                            for ranks, own in zip(ranks, dealt)
                        ),
                    )
                )
            limit = limit * 9 // 10
        return None

    def step_s(self, priced: PricedBatch) -> float:
        """Seconds of a step, in which no rank waits for others before the update; infinite where it does not fit."""
        draft = self.draft(priced)
        return np.inf if draft is None else sum(step_times_s(priced, draft))


def limits_of(problem: PlanningProblem, candidate: Candidate) -> list[int]:
    """Limits of tokens to choose from: the longest sequence, times powers of the square root of 2 as memory holds."""
    limits = [round(problem.max_length * 2 ** (k / 2)) for k in range(12)]
    return [limit for limit in limits if limit <= candidate.max_tokens]


def tuned(
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    batches: Sequence[PricedBatch],
    *,
    run_by: type[DynamicBatches] = DynamicBatches,
    limits_of: Callable[[PlanningProblem, Candidate], Sequence[int]] = limits_of,
) -> DynamicBatches | None:
    """The fixed configuration and the limit that are fastest on typical batches; None: none holds them."""
    best, best_s = None, np.inf
    for candidate in candidates:
        for limit in limits_of(problem, candidate):
            policy, total_s = run_by(problem=problem, candidate=candidate, limit=limit), 0.0
            for batch in batches:
                total_s += policy.step_s(batch)
                if total_s >= best_s:
                    break
            if total_s < best_s:
                best, best_s = policy, total_s
    return best


def recomputing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that recompute every layer."""
    return [candidate for candidate in candidates if all(candidate.scheme.recompute)]
