"""A planner: one policy for one problem, from a global batch to a step plan."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.garbage import collection_paused
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.core.step_plan import StepPlan
from lengthwise.plan.outside_policy import OutsidePolicy, refused
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.finished_plan import to_plan
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans steps under one policy. Deterministic: equal input, equal plan on every rank."""

    policy: str
    problem: PlanningProblem
    lr_scaling: LrScaling | None = None
    """How the learning-rate of a step follows its batch; None: not at all."""

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan for one global batch.

        Raises:
            InputError: a policy of another package fails, or its plan is wrong.
        InfeasibleError: a sequence, or a micro-batch of the policy's fixed size, exceeds a device's memory.
        """
        return self.plan(PricedBatch(self.problem, batch))

    @collection_paused()
    def plan(self, priced: PricedBatch) -> StepPlan:
        """The plan for a batch that other policies may have priced already; their work is not repeated."""
        self.problem.check_fits(priced.lengths, np.asarray(priced.batch.ids))
        policy = prepare(self.policy, self.problem)
        is_ours = not isinstance(policy, OutsidePolicy)
        with nullcontext() if is_ours else refused(self.policy, f"plans step {priced.batch.step} wrongly"):
            if self.policy not in priced.drafted_by_policy:
                priced.drafted_by_policy[self.policy] = policy(priced)
            plan = to_plan(priced, priced.drafted_by_policy[self.policy], policy=self.policy)
        return plan if self.lr_scaling is None else replace(plan, lr_factor=self.lr_scaling.of(priced.batch))
