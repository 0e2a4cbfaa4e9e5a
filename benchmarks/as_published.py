"""Baselines as their rivals' papers ran them, beside those that are tuned: DCP's bucket, Megatron-LM's padded packs.

Both are priced by the same costs as everything else. What the papers do not say is said in the docstrings here.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.draft_times import pack_times_s, pipeline_time_s, step_times_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.uniform.bucket import batch_sizes
from lengthwise.plan.uniform.hotspa import HotSpaPolicy
from lengthwise.plan.uniform.static import static

FIXED_DEGREES = (4, 8, 16, 32)
"""Of DCP's own bucket baseline: its configurations set ``sp_size``, once for all lengths."""
SWITCHES_S = 2.0
"""Of a step in which HotSPa changes its strategy (Hydraulis, section 8.2: nearly 2 s of 6.7 s)."""
STREAM_ROUNDS = 64
"""Times that the bucket baseline reads the same sequences: a full micro-batch of short ones needs thousands."""


@dataclass(frozen=True, kw_only=True)
class BucketRun:
    """What bucket parallel comes to at one degree."""

    tokens_per_s: float
    idle: float
    """Mean share of a step that a group waits for the slowest."""


def recomputing_groups(problem: PlanningProblem, degree: int, num_layers: int) -> Candidate | None:
    """Ulysses groups of ``degree`` devices that recompute every layer and hold the longest sequence, if any do."""
    for candidate in problem.candidates:
        scheme = candidate.scheme
        shape = (scheme.degree, candidate.num_stages, scheme.num_recomputed)
        if shape == (degree, 1, num_layers) and set(scheme.methods) <= {Method.ULYSSES}:
            return candidate if candidate.max_tokens >= problem.max_length else None
    return None


def bucket_run(
    problem: PlanningProblem, candidate: Candidate, batches: Sequence[GlobalBatch], *, rounds: int = STREAM_ROUNDS
) -> BucketRun:
    """Bucket parallel as DCP describes it (section 4.1): one degree, one micro-batch of one bucket a group and step.

    A bucket is a length. Its batch size is chosen so that a micro-batch takes as long as the longest sequence alone, or
    memory ends it. A bucket is computed as soon as it has filled a micro-batch; what has not filled one is not counted.
    """
    stream = [length for _ in range(rounds) for batch in batches for length in batch.lengths]
    edges = tuple(sorted(set(stream), reverse=True))
    sizes = dict(zip(edges, batch_sizes(candidate, edges, budget=1.0)))
    each_s = dict(zip(edges, candidate.times_s(np.array(edges)).tolist()))
    ready_s, tokens, waiting = deque[tuple[float, int]](), 0, Counter[int]()
    num_groups = problem.num_devices // candidate.num_devices
    steps_s, idles = [], []
    for length in stream:
        waiting[length] += 1
        if waiting[length] < sizes[length]:
            continue
        waiting[length] = 0
        ready_s.append((sizes[length] * each_s[length] + candidate.overhead_s, sizes[length] * length))
        if len(ready_s) == num_groups:
            times_s = [time_s for time_s, _ in ready_s]
            tokens += sum(num_tokens for _, num_tokens in ready_s)
            ready_s.clear()
            steps_s.append(max(times_s) + candidate.update_s)
            idles.append(1 - fmean(times_s) / max(times_s))
    return BucketRun(tokens_per_s=tokens / sum(steps_s), idle=fmean(idles))


def padded_packs_s(problem: PlanningProblem, candidate: Candidate, batches: Iterable[GlobalBatch]) -> float:
    """Seconds of a step of Megatron-LM with packs filled up to the context, whose padding is one more sequence."""
    policy = static(problem, candidate)
    steps_s = []
    for batch in batches:
        priced = PricedBatch(problem, batch)
        steps_s.append(padded_phase_s(priced, policy.phases(priced)[0]) + candidate.update_s)
    return fmean(steps_s)


def padded_phase_s(priced: PricedBatch, pipelines: Phase) -> float:
    """Seconds of the slowest of some pipelines, each pack filled up to the context with one more sequence."""
    problem, slowest_s = priced.problem, 0.0
    for pipeline in pipelines:
        candidate = pipeline.candidate
        capacity = min(problem.max_length, candidate.max_tokens)
        missing = np.array([capacity - sum(priced.batch.lengths[i] for i in pack) for pack in pipeline.packs])
        padding_s = np.where(missing > 0, candidate.times_s(np.maximum(missing, 1)), 0.0)
        times_s = sorted((padding_s + pack_times_s(priced, pipeline)).tolist(), reverse=True)
        forwards = [candidate.forwards] * len(times_s)
        slowest_s = max(slowest_s, pipeline_time_s(times_s, candidate.num_stages, problem.objective, forwards=forwards))
    return slowest_s


def slow_switching_s(policy: HotSpaPolicy, priced: PricedBatch) -> float:
    """Seconds of a step of HotSPa whose switches, where it has any, take what was measured of them."""
    draft = DraftPlan(phases=policy.phases(priced))
    phases_s, switches_s, update_s = step_times_s(priced, draft)
    return phases_s + (max(switches_s, SWITCHES_S) if len(draft.phases) > 1 else 0.0) + update_s
