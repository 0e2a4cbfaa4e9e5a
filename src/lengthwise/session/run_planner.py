"""The planner of a run, which can be made again when what it may plan has changed."""

from collections.abc import Callable

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.core.step_plan import StepPlan
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.problem import PlanningProblem


class RunPlanner:
    """Plans the steps of a run under costs that stay as they are."""

    def __init__(self, cost: CostModel, plan_with: Callable[[CostModel], Planner]) -> None:
        """``plan_with``: the planner under a cost model."""
        self._plan_with, self._planned_under = plan_with, cost
        self.planner = plan_with(cost)

    @property
    def problem(self) -> PlanningProblem:
        """The planning problem under the costs as they are known now."""
        return self.planner.problem

    @property
    def lr_scaling(self) -> LrScaling | None:
        """How the learning-rate of a step follows its batch."""
        return self.planner.lr_scaling

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan of a batch under the costs as they are known now."""
        return self.planner(batch)

    def plan_under(self, cost: CostModel) -> None:
        """Make the planner again under other costs."""
        self._planned_under = cost
        self.replan()

    def replan(self) -> None:
        """Make the planner again under the same costs, as when the model cannot be cut into stages any more."""
        self.planner = self._plan_with(self._planned_under)
