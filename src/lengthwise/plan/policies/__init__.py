"""Policies by name. Each prepares once for a problem, then answers batch after batch.

A policy is a pure function of (problem, batch): equal input, equal answer, on every rank and in every worker.
"""

from importlib import import_module
from typing import Protocol

from lengthwise.core.errors import InputError
from lengthwise.core.specs import nearest
from lengthwise.plan.arrangement import Arrangement, Phase
from lengthwise.plan.problem import PricedBatch, Problem


class Policy(Protocol):
    """A policy that is ready for its problem."""

    @property
    def name(self) -> str:
        """What was chosen for the problem: schemes and counts, as tables show them."""
        ...

    def __call__(self, priced: PricedBatch) -> Arrangement:
        """The step's arrangement, with its bound."""
        ...

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The step's arrangement alone."""
        ...

    def floor_s(self, priced: PricedBatch) -> float:
        """Seconds that the policy's plan takes at least, its update left out; cheap."""
        ...

    def bound_s(self, priced: PricedBatch) -> float:
        """Seconds that no plan of the policy's schemes beats, the update left out."""
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
"""Name -> what it is. Module ``lengthwise.plan.policies.NAME`` has the function ``prepare(problem) -> Policy``."""

_MODULES = {"dcp-inter": "dcp", "dcp-intra": "dcp"}


def prepare(name: str, problem: Problem) -> Policy:
    """The policy called ``name``, ready for ``problem``.

    Raises:
        InputError: there is none; the message suggests the nearest.
        InfeasibleError: no scheme the policy may use fits the longest sequence.
    """
    if name not in POLICIES:
        raise InputError(f"no policy {name!r}; {nearest(name, POLICIES)}")
    if name in problem.prepared:
        known: Policy = problem.prepared[name]
        return known
    module = import_module(f"lengthwise.plan.policies.{_MODULES.get(name, name)}")
    make = getattr(module, "prepare" + ("_" + name.split("-")[1] if "-" in name else ""))
    policy: Policy = make(problem)
    problem.prepared[name] = policy
    return policy
