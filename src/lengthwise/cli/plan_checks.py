"""What is asked of a file of plans before the first step is trained: its batches, its schemes, its memory."""

from typing import TYPE_CHECKING

import numpy as np

from lengthwise.config.run_config import Config
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.wording import needed_and_available
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.session.planning import make_sampler
from lengthwise.session.state_placement import is_on_host

if TYPE_CHECKING:
    from lengthwise.data.corpus import Corpus
    from lengthwise.plan.plan_file import PlanFile


def check_plans_of_run(config: Config, plans: "PlanFile", corpus: "Corpus", *, first_step: int = 0) -> None:
    """Check that every step from ``first_step`` has a plan, and that it computes the step's batch exactly.

    Raises:
        InputError: a step has no plan.
        CheckError: a plan is for other sequences; the message names the step.
    """
    steps = range(first_step, config.train.num_steps)
    plans.check_steps(steps)
    sampler = make_sampler(config, corpus)
    sampler.skip_to(first_step)
    plans.check_batches(sampler, len(steps))


def check_plans_are_for(plans: "PlanFile", spec: ModelSpec, num_ranks: int) -> None:
    """Raise ``InputError`` if a plan is for another number of ranks or layers, or the model cannot share as it says."""
    from lengthwise.runtime.train.executable import check_executable

    for plan in plans.representatives():
        check_executable(plan, spec, num_ranks)


def check_plans_fit(plans: "PlanFile", config: Config, spec: ModelSpec, cluster: ClusterSpec) -> None:
    """Check that the model and the ranks can execute every plan, and that no micro-batch exceeds a device's memory.

    Raises:
        InputError: a plan is for another number of ranks or layers, or uses a method that the model cannot share by.
        InfeasibleError: a micro-batch needs more memory than a device has, under the analytic cost model.
    """
    check_plans_are_for(plans, spec, cluster.num_devices)
    cost = AnalyticCost(
        model=spec, cluster=cluster, dtype=config.train.dtype, state_on_host=is_on_host(config.train.offload_state),
        narrow_gradients=config.optim.optimizer_settings.narrow_gradients,
    )  # fmt: skip
    num_devices, limit = cluster.num_devices, cluster.device.memory_bytes
    for scheme, (num_tokens, step) in plans.largest.items():
        try:
            peak = int(cost.peak_bytes(np.asarray(num_tokens), scheme, num_devices=num_devices))
        except InputError:  # a scheme without analytic costs: the runtime refuses or executes it
            continue
        if peak > limit:
            needed, available = needed_and_available(peak, limit)
            on_host = int(cost.with_state_on_host().peak_bytes(num_tokens, scheme, num_devices=num_devices))
            instead = f"Set {Setting.OFFLOAD_STATE}=host, with which it fits, plan" if on_host <= limit else "Plan"
            raise InfeasibleError(
                f"{plans.path}, step {step}: a micro-batch of {num_tokens:,} tokens under {scheme.name} needs {needed} "
                f"per device; a device has {available}. {instead} again for these devices, or set cluster.memory_gib "
                "if they have more",
                what=f"a micro-batch of {num_tokens:,} tokens", value=peak, limit=limit, unit="bytes",
            )  # fmt: skip
