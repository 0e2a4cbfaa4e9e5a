"""Proposals that other processes search while this one does something else; they are the same."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy

from lengthwise.core.garbage import collection_paused
from lengthwise.core.processes import LibraryContext, interrupts_later
from lengthwise.plan.heterogeneous.adaptive_pipelines import ProposedCandidate
from lengthwise.plan.heterogeneous.propose import Proposal, propose
from lengthwise.plan.space.problem import PlanningProblem

Space = Callable[[PlanningProblem], Sequence[ProposedCandidate]]
"""What strategies are made of; equal problems, equal candidates in the same order."""

Found = list[tuple[tuple[tuple[int, int], ...], float]]
"""Proposals with candidates by their number, which mean the same in every process."""


@contextmanager
def searching(problems: Sequence[PlanningProblem], spaces: Sequence[Space], *, workers: int) -> Iterator[None]:
    """Have ``workers`` processes search every space of every problem, for ``proposals`` to ask for while this lasts."""
    with ProcessPoolExecutor(workers, LibraryContext()) as pool:
        with interrupts_later():
            for problem in problems:
                sent = deepcopy(problem)  # the executor's thread pickles it while planners go on with the original
                for space in spaces:
                    problem.searches[_key(space)] = pool.submit(_search, sent, space)
        try:
            yield
        finally:
            pool.shutdown(cancel_futures=True)


def proposals(problem: PlanningProblem, space: Space) -> list[Proposal]:
    """What ``propose`` answers for the candidates of a space: waited for if it is being searched, else searched now."""
    candidates = space(problem)
    begun: Future[Found] | None = problem.searches.get(_key(space))
    if begun is None:
        return propose(problem, candidates)
    try:
        proposed = begun.result()
    except BrokenExecutor:  # a process died
        return propose(problem, candidates)
    return [
        Proposal(counts=tuple([(candidates[number], count) for number, count in counts]), mean_s=mean_s)
        for counts, mean_s in proposed
    ]


def _key(space: Space) -> str:
    return f"{space.__module__}.{space.__qualname__}"


@collection_paused()
def _search(problem: PlanningProblem, space: Space) -> Found:
    candidates = space(problem)
    numbers = {candidate: number for number, candidate in enumerate(candidates)}
    return [
        (tuple([(numbers[candidate], count) for candidate, count in proposal.counts]), proposal.mean_s)
        for proposal in propose(problem, candidates)
    ]
