"""Policies of other packages: loaded by name, asked for draft plans, and refused where those are wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from lengthwise.config.choices import PolicyName
from lengthwise.core.errors import InfeasibleError, InputError, first_line
from lengthwise.core.plugins import POLICIES, load_plugin
from lengthwise.plan.space.draft_plan import DraftPlan, Phase
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch


class OutsidePolicy:
    """A policy ``f(problem)`` that returns a function from a priced batch to the phases of a step, or a draft plan."""

    def __init__(self, label: str, problem: PlanningProblem) -> None:
        plugin = load_plugin(label, what="policy", usage="f(problem)", group=POLICIES)
        with refused(label, "cannot be prepared"):
            self._draft = plugin.function(problem)
            if not callable(self._draft):
                raise TypeError(f"f(problem) returns {self._draft!r}, and not a function of a priced batch")
        self.name = str(getattr(self._draft, "name", label))

    def __call__(self, priced: PricedBatch) -> DraftPlan:
        """The step's draft plan; what makes it a plan checks that it computes each sequence once, and fits."""
        draft = self._draft(priced)
        draft = draft if isinstance(draft, DraftPlan) else DraftPlan(phases=tuple(map(tuple, draft)))
        devices = sorted(rank for pipeline in draft.phases[0] for rank in pipeline.ranks)
        if devices != list(range(priced.problem.num_devices)):
            raise ValueError(f"its pipelines have ranks {devices}, and there are {priced.problem.num_devices}")
        return draft

    def phases(self, priced: PricedBatch) -> tuple[Phase, ...]:
        """The draft plan without its bound."""
        return self(priced).phases

    def floor_s(self, priced: PricedBatch) -> float:
        """Zero: nothing is known of what it takes at least."""
        return 0.0

    def bound_s(self, priced: PricedBatch) -> float:
        """Zero: nothing is proven of its schemes."""
        return 0.0


@contextmanager
def refused(label: str, failure: str) -> Iterator[None]:
    """Make whatever a policy of another package does wrong one ``InputError``, so that it is mended and not trained.

    Raises:
        InputError: with the ``failure`` and its reason.
    """
    try:
        yield
    except (InfeasibleError, InputError) as error:
        raise type(error)(f"policy {label} {failure}: {error}") from error
    except Exception as error:
        raise InputError(f"policy {label} {failure}: {type(error).__name__}: {first_line(error)}") from error


def policy_digest(name: str) -> str:
    """A digest of the source of a policy of another package, which must be the same on all ranks; empty for ours."""
    if name in get_args(PolicyName):
        return ""
    return load_plugin(name, what="policy", usage="f(problem)", group=POLICIES).source_digest
