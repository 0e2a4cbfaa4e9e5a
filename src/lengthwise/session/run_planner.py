"""The planners of a run, of steps and of forwards alone, which are made again when what they plan by has changed."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.forward_cost import ForwardOnlyCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.problem import PlanningProblem


class PresentPlanner(ABC):
    """Plans by the planner of the moment."""

    @property
    @abstractmethod
    def planner(self) -> Planner:
        """The planner under the costs as they are known now."""

    @property
    def problem(self) -> PlanningProblem:
        """The planning problem under the costs as they are known now."""
        return self.planner.problem

    @property
    def lr_scaling(self) -> LrScaling | None:
        """How the learning-rate of a step follows its batch; None: not at all."""
        return self.planner.lr_scaling

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan of a batch under the costs as they are known now."""
        return self.planner(batch)


class RunPlanner(PresentPlanner):
    """Plans the steps of a run under costs that stay as they are."""

    def __init__(self, cost: CostModel, plan_with: Callable[[CostModel], Planner]) -> None:
        """``plan_with``: the planner under a cost model."""
        self._plan_with = plan_with
        self.plan_under(cost)

    @property
    def planner(self) -> Planner:
        """The planner under the costs as they are known now."""
        return self._planner

    def plan_under(self, cost: CostModel) -> None:
        """Make the planner again under other costs."""
        self._planned_under = cost
        self.replan()

    def replan(self) -> None:
        """Make the planner again under the same costs, as when the model cannot be cut into stages any more."""
        self._planner = self._plan_with(self._planned_under)


class ForwardPlanner(PresentPlanner):
    """Plans forwards without a backward, under costs as they are known at the time."""

    def __init__(self, plan_with: Callable[[CostModel], Planner], training: Callable[[], Planner]) -> None:
        """``plan_with``: the planner under a cost model; ``training``: gives the present planner of steps."""
        self._plan_with, self._training = plan_with, training
        self._made: tuple[Planner, Planner] | None = None
        """The planner of steps, and that of forwards under the same costs."""

    @property
    def planner(self) -> Planner:
        """The planner under the present costs."""
        training = self._training()
        if self._made is None or self._made[0] is not training:
            self._made = training, self._plan_with(ForwardOnlyCost(training=training.problem.cost))
        return self._made[1]
