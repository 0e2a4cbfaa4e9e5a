"""The parts of a configured run of one of this library's own models."""

import sys
from dataclasses import replace
from functools import cache, partial

from lengthwise.config.run_config import Config
from lengthwise.core.cost import CostModel
from lengthwise.core.processes import num_cores
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus
from lengthwise.plan.planner import Planner
from lengthwise.plan.prefetch import PlanAhead
from lengthwise.runtime.comm.devices import local_size
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.train.training_engine import TransformerEngine
from lengthwise.session.compile_sizes import compiled_layers, sizes_of, tell_sizes
from lengthwise.session.online_calibration import OnlineCalibration
from lengthwise.session.planning import batch_stream, make_cost, make_planner, make_sampler, open_plans, with_draws
from lengthwise.session.run_parts import RunInputs, RunParts
from lengthwise.session.state_placement import is_on_host, with_planned_state

WORKERS_PER_CORE = 2
FEW_WORKERS = 4
"""Planning processes that a machine runs."""


def own_parts(inputs: RunInputs, spec: ModelSpec, model: Transformer) -> RunParts:
    """The parts of a run of one of this library's own models.

    Raises:
        InputError: plans or costs cannot be used as configured.
        InfeasibleError: the model or a sequence fits under no scheme.
    """
    config, corpus, cluster, world = inputs.config, inputs.corpus, inputs.cluster, inputs.world

    def planner_of(config: Config, corpus: Corpus, cost: CostModel | None = None) -> Planner:
        cost = cost or make_cost(config, spec, cluster)
        return make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus)

    @cache
    def calibration() -> OnlineCalibration:
        return OnlineCalibration(world, make_cost(config, spec, cluster), partial(planner_of, config, corpus))

    def replan(plan: StepPlan, failures: tuple[MicroBatchFailure, ...]) -> None:
        """Plan with costs under which what ran out of memory does not fit; every rank does."""
        assert ahead is not None, "plans that were planned can be planned again"
        calibration().refuse(plan, failures)
        planner = calibration().planner
        ahead.plan_with(with_draws(config, planner), fallback=with_draws(config, replace(planner, policy="static")))

    ahead: PlanAhead | None = None
    if config.plan.file:
        plans = open_plans(config)
        sizes = sizes_of(config, plans)
    else:
        planner = planner_of(config, corpus)
        config, sizes = with_planned_state(config, planner.problem), sizes_of(config, planner)
        if world.is_first and not inputs.quiet:
            tell_sizes(planner)
        ahead = _plan_ahead(config, planner, corpus, world)
    try:
        compiled = compiled_layers(sizes, world, inputs.folder, inputs.on_size)
        return RunParts(
            engine=TransformerEngine(
                model,
                world,
                config=config,
                spec=spec,
                source=corpus,
                compiled=compiled,
                on_oom=None if ahead is None else replan,
                state_on_host=is_on_host(config.train.offload_state),
            ),
            stream=make_sampler(config, corpus) if ahead is None else ahead,
            planner=plans if ahead is None else ahead,
            num_params=spec.num_params,
            spec=spec,
            is_measured=bool(config.plan.profile or config.plan.file),
            validation=inputs.validate_with(planner_of),
            peek=None if ahead is None else ahead.peek,
            close=ahead.close if ahead is not None else lambda: None,
        )
    except BaseException:
        if ahead is not None:
            ahead.close()
        raise


def _plan_ahead(config: Config, planner: Planner, corpus: Corpus, world: DistContext) -> PlanAhead:
    """The batches of a run with their plans, made ahead of training where there are workers for it."""
    return PlanAhead(
        batch_stream(config, corpus, planner.problem),
        with_draws(config, planner),
        fallback=with_draws(config, replace(planner, policy="static")),
        workers=_workers(config, world),
        depth=config.plan.look_ahead,
        patience_s=world.timeout_s / 2,  # so that this rank can still plan before others give it up
        warn=world.is_first,
    )


def _workers(config: Config, world: DistContext) -> int:
    """``plan.workers``, but no more than ``WORKERS_PER_CORE`` for each core over all ranks of this machine; by itself
    on GPUs ``FEW_WORKERS``, as planning a step of a large cluster may take longer than the step, and a core is left.
    """
    if config.plan.workers is None:
        spare = num_cores() // local_size() - 1
        return min(FEW_WORKERS, max(1, spare)) if world.device.type == "cuda" else 0
    asked = config.plan.workers
    max_workers = max(1, WORKERS_PER_CORE * num_cores() // local_size())
    if asked > max_workers and world.is_first:
        sys.stderr.write(
            f"warning: plan.workers={asked} for each of {local_size()} ranks is more than the {num_cores()} cores of "
            f"this machine can run; {max_workers} for each are used, and make the same plans\n"
        )
    return min(asked, max_workers)
