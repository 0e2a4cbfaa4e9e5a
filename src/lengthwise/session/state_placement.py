"""Whether the ranks of a run keep master weights, summed gradients and optimizer state in host memory."""

from lengthwise.config.choices import StatePlace
from lengthwise.config.run_config import Config
from lengthwise.core.cost import CostModel
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.problem import PlanningProblem


def is_on_host(place: StatePlace) -> bool:
    """Whether the state lies in host memory under the setting ``offload_state``."""
    return place == "host"


def spare_cost(config: Config, cost: CostModel) -> CostModel | None:
    """The cost with the state in host memory, for longer sequences than fit otherwise; None: the state stays.

    The seconds of an update that a profile measured are those of a state on the device.
    """
    if config.train.offload_state != "auto" or not isinstance(cost, AnalyticCost) or cost.state_on_host:
        return None
    if not cost.cluster.device.host_bytes_per_s:
        return None
    return AnalyticCost(
        model=cost.model,
        cluster=cost.cluster,
        dtype=cost.dtype,
        state_on_host=True,
        narrow_gradients=cost.narrow_gradients,
    )


def with_planned_state(config: Config, problem: PlanningProblem) -> Config:
    """The configuration with the state in host memory, if that is how the longest sequence of ``problem`` fits."""
    cost = getattr(problem.cost, "base", problem.cost)  # beneath an overlap
    if not getattr(cost, "state_on_host", False):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"offload_state": "host"})})
