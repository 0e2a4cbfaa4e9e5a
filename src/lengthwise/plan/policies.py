"""Policies by name. Each prepares once for a problem, then answers batch after batch.

A policy is a pure function of (problem, batch): equal input, equal answer, on every rank and in every worker.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from lengthwise.core.errors import InputError
from lengthwise.core.garbage import collection_paused
from lengthwise.core.plugins import POLICIES as PLUGIN_POLICIES
from lengthwise.core.plugins import is_label, registered
from lengthwise.core.read_file import brief
from lengthwise.core.wording import nearest
from lengthwise.plan.outside_policy import OutsidePolicy
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.problem import PRICED_STEPS, PlanningProblem, PricedBatch


class Policy(Protocol):
    """A policy that is ready for its problem."""

    @property
    def name(self) -> str:
        """What was chosen for the problem: schemes and counts, as tables show them."""
        ...

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan, with its bound."""
        ...

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The step's draft plan alone."""
        ...

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the policy's step takes at least; cheap."""
        ...

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that the policy's step takes at least."""
        ...


POLICIES = {
    "padded": "one length per micro-batch, padding, a fixed number of sequences",
    "static": "packs filled to the context length, one homogeneous scheme, dealt in turn",
    "bucket": "buckets by length at a fixed degree, a batch size per bucket (Esser et al. 2024)",
    "packed": "packs filled to what memory holds, one homogeneous scheme, fewest tokens first",
    "hotspa": "a homogeneous strategy per length range, switched within the step (Ge et al. 2024)",
    "dcp-inter": "batch size and degree per bucket by throughput, accumulation balanced (DCP)",
    "dcp-intra": "the same with the fewest recomputed layers that fit (DCP)",
    "paradyse": "a method per layer by cost models, all devices on every pack (ParaDySe)",
    "hydraulis": "heterogeneous strategies, the best candidate per step, two-stage assignment (Hydraulis)",
    "auto": "all of the above as moves of one search; never slower than any of them",
}
"""Name -> what the policy does."""

_PREPARE = {
    "padded": "uniform.padded:prepare",
    "static": "uniform.static:prepare",
    "bucket": "uniform.bucket:prepare",
    "packed": "uniform.packed:prepare",
    "hotspa": "uniform.hotspa:prepare",
    "dcp-inter": "heterogeneous.small_steps:prepare_dcp_inter",
    "dcp-intra": "heterogeneous.small_steps:prepare_dcp_intra",
    "paradyse": "layerwise.paradyse:prepare",
    "hydraulis": "heterogeneous.small_steps:prepare_hydraulis",
    "auto": "auto:prepare",
}
"""Name -> module below ``lengthwise.plan`` and its function ``(problem) -> Policy``; imported when it is first used."""


@collection_paused()
def prepare(name: str, problem: PlanningProblem) -> Policy:
    """The policy called ``name``, ready for ``problem``.

    Raises:
        InputError: there is none, or a policy of another package cannot be used.
        InfeasibleError: no scheme the policy may use fits the longest sequence.
    """

    def make() -> Policy:
        if name not in POLICIES:
            check_policies([name], "policy")
            return OutsidePolicy(name, problem)
        module_name, function_name = _PREPARE[name].split(":")
        policy: Policy = getattr(import_module(f"lengthwise.plan.{module_name}"), function_name)(problem)
        problem.forget(PRICED_STEPS)  # they hold every schedule that was compared
        return policy

    return problem.once(f"policy {name}", make)


def check_policies(names: Sequence[str], setting: str) -> list[str]:
    """The names of policies, each once, among them those of other packages.

    Raises:
        InputError: there is no such policy; the message says of which ``setting``, and suggests the nearest.
    """
    outside = registered(PLUGIN_POLICIES)
    for name in names:
        if name not in POLICIES and name not in outside and not is_label(name):
            raise InputError(f"{setting} {brief(','.join(names))[1:-1]}: no {brief(name)}; {nearest(name, POLICIES)}")
    return list(dict.fromkeys(names))
