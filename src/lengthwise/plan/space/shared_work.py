"""How much of their work two plans do alike: prices that are off alike in both do not say which is faster."""

from collections import defaultdict

from lengthwise.core.pipeline_config import Method
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_plan import DraftPlan, runs_of
from lengthwise.plan.space.draft_times import pack_times_s
from lengthwise.plan.space.problem import PricedBatch

Kind = tuple[int, int, frozenset[Method]]
"""What is measured and fitted by itself: degree, number of stages, methods."""


def work_shares(priced: PricedBatch, draft: DraftPlan) -> dict[Kind, float]:
    """The part of a draft plan's predicted device-seconds that each kind of scheme computes."""
    work: defaultdict[Kind, float] = defaultdict(float)
    for phase in draft.phases:
        for pipeline in phase:
            for run, time_s in zip(runs_of(pipeline), pack_times_s(priced, pipeline)):
                work[_kind_of(run)] += time_s * pipeline.candidate.num_devices
    total = sum(work.values())
    return {kind: device_s / total for kind, device_s in work.items()}


def shared_work(first: dict[Kind, float], second: dict[Kind, float]) -> float:
    """The part of two plans' work that both do by the same kinds of schemes, 0 to 1."""
    return sum(min(share, second.get(kind, 0.0)) for kind, share in first.items())


def _kind_of(candidate: Candidate) -> Kind:
    scheme = candidate.scheme
    return scheme.degree, scheme.num_stages, frozenset(scheme.methods)
