"""The naive default: a fixed number of sequences per micro-batch, padded to the longest of them.

Sequences are taken in the sampler's order, micro-batches are dealt to equal pipelines in turn. With one shape, all
micro-batches of a step are of as many sequences of as many tokens, the longest's, for pipelines that are compiled for
static shapes (the rule of DeepSpeed's variable batches for pipelines).
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from lengthwise.core.errors import InfeasibleError, Setting
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_times import pipeline_time_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.equal_pipelines import ROUNDING, EqualPipelines, Pack, batch_floor_s, in_turn
from lengthwise.plan.uniform.tune import tiling_candidates, tuning_batches


def prepare(problem: PlanningProblem) -> EqualPipelines:
    """The scheme and batch size that are fastest on the problem's samples; ``problem.batch_size`` is kept if set.

    Raises:
        InfeasibleError: no homogeneous scheme holds the longest sequence, or ``batch_size`` times that.
    """
    candidates = tiling_candidates(problem, policy="padded")
    if problem.batch_size:
        candidates = _holding(problem, candidates, problem.batch_size)
    batches = tuning_batches(problem)
    max_sequences = max(len(batch.lengths) for batch in batches)
    best, best_s = (candidates[0], 1), np.inf
    for candidate in candidates:
        outside_s = candidate.update_s
        unpadded_s = float(np.mean([batch_floor_s(priced, candidate) for priced in batches])) * (1 - ROUNDING)
        if outside_s + unpadded_s >= best_s:
            continue
        for size in [problem.batch_size] if problem.batch_size else _sizes(problem, candidate, max_sequences):
            dealt_s = [_dealt_s(priced, candidate, size=size) for priced in batches]
            if outside_s + np.mean([_floor_s(times_s, candidate) for times_s in dealt_s]) >= best_s:
                continue
            slowest_s = [_slowest_s(times_s, candidate, problem.objective) for times_s in dealt_s]
            mean_s = outside_s + float(np.mean(slowest_s))
            best, best_s = ((candidate, size), mean_s) if mean_s < best_s else (best, best_s)
    return padded(problem, best[0], size=best[1])


def padded(problem: PlanningProblem, candidate: Candidate, *, size: int) -> EqualPipelines:
    """The policy with a given scheme and ``size`` sequences per micro-batch."""
    deal = partial(_deal, size=size)
    rows = size if problem.one_shape else 0
    return EqualPipelines(
        problem=problem, candidate=candidate, deal=deal, is_padded=True, rows=rows, setting=f"{size} sequences each"
    )


def step_s(priced: PricedBatch, candidate: Candidate, *, size: int) -> float:
    """Seconds of the micro-batches of a step, without arranging them."""
    return _slowest_s(_dealt_s(priced, candidate, size=size), candidate, priced.problem.objective)


def _dealt_s(priced: PricedBatch, candidate: Candidate, *, size: int) -> np.ndarray:
    """[rounds, pipelines] Seconds per stage of each pipeline's micro-batches, the longest first; 0: none."""
    starts = np.arange(0, len(priced.lengths), size)
    counts, lengths = np.diff(starts, append=len(priced.lengths)), np.maximum.reduceat(priced.lengths, starts)
    if priced.problem.one_shape:
        counts, lengths = np.full_like(counts, size), np.full_like(lengths, priced.lengths.max())
    overheads = counts if priced.problem.overhead_per_sequence else 1
    times_s = candidate.times_s(lengths) * counts + candidate.overhead_s * overheads
    if candidate.reduction is not None:
        sent_s = candidate.cost.comm_times_s(lengths, candidate.scheme) * counts
        backwards_s = (times_s - candidate.overhead_s * overheads - sent_s) * (1 - 1 / candidate.forwards)
        times_s += candidate.reduction.each_late_s(backwards_s)
    num_pipelines = priced.problem.num_devices // candidate.num_devices
    rounds = -(-len(starts) // num_pipelines)
    dealt_s = np.zeros(rounds * num_pipelines)
    dealt_s[: len(starts)] = times_s
    return -np.sort(-dealt_s.reshape(rounds, num_pipelines), axis=0)


def _floor_s(times_s: np.ndarray, candidate: Candidate) -> float:
    """Seconds that the slowest pipeline takes at least."""
    return float((times_s.sum(axis=0) + (candidate.least_stages - 1) * times_s[0]).max())


def _slowest_s(times_s: np.ndarray, candidate: Candidate, objective: Objective) -> float:
    """Seconds of the slowest pipeline; those that the flow shop proves to be faster are not looked at."""
    flow_s = times_s.sum(axis=0) + (candidate.num_stages - 1) * times_s[0]
    if candidate.num_stages == 1 and objective is Objective.FLOW_SHOP:
        return float(flow_s.max())
    slowest_s = 0.0
    for number in np.argsort(-flow_s, kind="stable").tolist():
        if flow_s[number] <= slowest_s and objective is Objective.FLOW_SHOP:
            break
        pipeline = times_s[times_s[:, number] > 0, number].tolist()
        forwards = [candidate.forwards] * len(pipeline)
        slowest_s = max(slowest_s, pipeline_time_s(pipeline, candidate.num_stages, objective, forwards=forwards))
    return slowest_s


def _sizes(problem: PlanningProblem, candidate: Candidate, max_sequences: int) -> list[int]:
    """Powers of two that memory holds at the longest length, up to the first of at least ``max_sequences``."""
    limit = min(candidate.max_tokens // problem.max_length, 2 * max_sequences - 1)
    return [2**power for power in range(limit.bit_length())]


def _holding(problem: PlanningProblem, candidates: list[Candidate], size: int) -> list[Candidate]:
    """Kinds that hold ``size`` sequences of the longest length."""
    needed = size * problem.max_length
    holding = [candidate for candidate in candidates if candidate.max_tokens >= needed]
    if not holding:
        leanest = max(candidates, key=lambda candidate: candidate.max_tokens)
        raise InfeasibleError(
            f"policy padded: a micro-batch of {size} sequences padded to {problem.max_length:,} tokens ({needed:,} in "
            f"all) {problem.needs(leanest, needed)} Lower {Setting.BATCH_SIZE} or {Setting.MAX_LENGTH}.",
            what=f"a micro-batch of {size} padded sequences", value=needed, limit=leanest.max_tokens, unit="tokens",
        )  # fmt: skip
    return holding


def _deal(priced: PricedBatch, candidate: Candidate, num_pipelines: int, *, size: int) -> Sequence[Sequence[Pack]]:
    count = len(priced.lengths)
    packs = [tuple(range(start, min(start + size, count))) for start in range(0, count, size)]
    return in_turn(packs, num_pipelines)
