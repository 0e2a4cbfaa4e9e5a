"""Makes the parts of a run that need no torch from a configuration: sampler, model spec, costs, planner."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from lengthwise.config.limits import DEFAULT_TOKENS_PER_STEP
from lengthwise.config.run_config import Config
from lengthwise.core.batch import NEXT_TOKEN, BatchStream, GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.lr_scaling import LrScaling, mean_size
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ClusterSpec, ModelSpec, cluster_preset
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.overlapped import with_overlap
from lengthwise.cost.separable import SeparableCost
from lengthwise.data.batch_budget import Budget
from lengthwise.data.corpus import Corpus
from lengthwise.data.order import Order, OrderSettings, Selection, Shuffled, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sort_key import of_corpus
from lengthwise.plan.dcp.form_batches import FormedBatches
from lengthwise.plan.layerwise.random_methods import RandomMethods, random_strategies
from lengthwise.plan.plan_file import PlanFile
from lengthwise.plan.planner import Planner
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.search_space import (
    SAMPLES_SEED,
    RecomputeMode,
    SearchSpace,
    lengths_of,
    make_problem,
)
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.space.sliced_packs import Slices
from lengthwise.plan.space.split_backwards import ZeroBubble
from lengthwise.plan.static_shapes import with_shapes
from lengthwise.session.console import progress
from lengthwise.session.measured_profile import MeasuredProfile
from lengthwise.session.method_choice import RANDOM, check_methods, compiled_methods, methods_of
from lengthwise.session.state_placement import is_on_host, spare_cost
from lengthwise.session.trained_model import objective_of


def make_sampler(config: Config, corpus: Corpus) -> Sampler:
    """The stream of global batches; a token budget of 64K where neither budget is set.

    Raises:
        InputError: budgets are contradictory, or there is no metric that the order follows.
    """
    settings = OrderSettings.of(config.data)
    difficulty = of_corpus(corpus, config.data.metric) if settings.needs_metric else None
    return sampler_of(config, corpus.lengths, make_order(settings, difficulty), corpus.selection(config.seed))


def batch_stream(config: Config, corpus: Corpus, problem: PlanningProblem) -> BatchStream:
    """The global batches of the run: the sampler's, or those that DCP forms of them (``plan.form_batches``)."""
    sampler, plan = make_sampler(config, corpus), config.plan
    if not plan.form_batches:
        return sampler
    return FormedBatches(sampler, problem, g_min=plan.g_min, g_max=plan.g_max)


def with_steps(config: Config, sampler: Sampler) -> Config:
    """The configuration with ``train.epochs`` counted in steps of ``sampler``."""
    train = config.train
    if train.epochs is None:
        return config
    steps = sampler.num_batches(train.epochs)
    return config.model_copy(update={"train": train.model_copy(update={"steps": steps, "epochs": None})})


def sampler_of(config: Config, lengths: LengthIndex, order: Order, selection: Selection | None = None) -> Sampler:
    """The sampler of sequences of ``lengths`` in a given order."""
    data = config.data
    tokens = data.tokens_per_step
    if tokens is None and data.sequences_per_step is None:
        tokens = DEFAULT_TOKENS_PER_STEP
    padded = Budget(tokens=tokens, padded=True) if data.count_padding else None
    return Sampler(
        lengths,
        seed=config.seed,
        tokens_per_step=tokens if padded is None else None,
        sequences_per_step=data.sequences_per_step,
        budget=padded,
        order=order,
        selection=selection,
        objective=objective_of(config),
    )


def resolve_cluster(config: Config) -> ClusterSpec:
    """The cluster that the configuration names, with the memory that plans may fill.

    Raises:
        InputError: it names none.
    """
    if not config.cluster.name:
        raise InputError("cluster.name is not set; name the devices to plan for, such as 1x8xH100-80GB or 2xcpu")
    cluster = cluster_preset(
        config.cluster.name,
        memory_gib=config.cluster.memory_gib,
        host_memory_gib=config.cluster.host_memory_gib,
    )
    if config.cluster.memory_gib is not None:
        return cluster
    return replace(cluster, device=cluster.device.with_margin(config.plan.memory_margin))


def check_num_ranks(config: Config, num_ranks: int) -> None:
    """Raise ``InputError`` if the cluster that the configuration names has another number of devices."""
    if config.cluster.name and (num_devices := resolve_cluster(config).num_devices) != num_ranks:
        raise InputError(
            f"cluster.name={config.cluster.name} has {num_devices:,} devices, not as many as the run has ranks, "
            f"{num_ranks:,}; run with --nproc {num_devices}, or leave cluster.name out"
        )


def make_cost(config: Config, spec: ModelSpec, cluster: ClusterSpec) -> SeparableCost:
    """Fitted to or learned from ``plan.profile`` where there is one, else analytic.

    Raises:
        InputError: the profile is of another model, device, dtype or recompute setting; or costs are to be learned
            and there is none.
    """
    plan, is_narrow = config.plan, config.optim.optimizer_settings.narrow_gradients
    if not plan.profile and plan.cost != "fitted":
        raise InputError(
            f"plan.cost={plan.cost}: such costs are learned from a profile, and there is none; set plan.profile to a "
            "file that lengthwise profile has made, or leave plan.cost out"
        )
    if not plan.profile:
        return AnalyticCost(
            model=spec,
            cluster=cluster,
            dtype=config.train.dtype,
            state_on_host=is_on_host(config.train.offload_state),
            narrow_gradients=is_narrow,
        )
    profile = MeasuredProfile.open(plan.profile, dtype=config.train.dtype, recompute=plan.recompute)
    return profile.cost(spec, cluster, is_learned=plan.cost == "hybrid", narrow_gradients=is_narrow)


class LayerStack(Protocol):
    """A model, as far as its planner knows it; :class:`ModelSpec` is one."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    @property
    def head_layers(self) -> float:
        """Layers whose products cost as much as the head's."""
        ...

    @property
    def objective(self) -> str:
        """What the model is trained to predict."""
        ...


def make_planner(
    config: Config,
    cost: CostModel,
    *,
    spec: LayerStack,
    cluster: ClusterSpec,
    corpus: Corpus,
    methods: tuple[Method, ...] | None = None,
) -> Planner:
    """The planner of the configured policy for a corpus; ``methods``: those to choose from instead of configured ones.

    Raises:
        InputError: plan.method needs a plan.degree, or that does not divide the devices.
        InfeasibleError: not even the model's state fits a device, or some sequence fits under no scheme.
    """
    plan, lengths = config.plan, corpus.lengths
    if plan.method == RANDOM:
        methods = (Method.ULYSSES_Z,)  # its layout of weights is that of all that are drawn
    elif methods is None:
        methods = methods_of(plan)
    if config.train.compile:
        methods = compiled_methods(config, methods)
    check_methods(config, cost, cluster)
    spare = spare_cost(config, cost)
    cost, spare = with_overlap(cost, plan.overlap), spare and with_overlap(spare, plan.overlap)
    search_space = SearchSpace(
        max_degree=plan.degree or plan.max_degree,
        max_stages=plan.max_stages,
        methods=methods,
        recompute=RecomputeMode(plan.recompute),
        degree=plan.degree,
        head_layers=spec.head_layers,
        offload=OffloadMode(plan.offload),
        shard_gradients=GradientSharding(plan.shard_gradients),
        zero_bubble=_zero_bubble(config),
        slices=Slices(plan.slices) if _has_passes_of_its_own(config, spec) else Slices.NONE,
        local_sequences=plan.local_sequences and _has_passes_of_its_own(config, spec),
        tile_tokens=0 if config.train.compile and plan.tile_tokens is None else plan.tile_tokens,
        has_head_groups=not config.train.compile,
    )
    problem = make_problem(
        cost,
        cluster=cluster,
        num_layers=spec.num_layers,
        max_length=lengths.max_length,
        search_space=search_space,
        samples=_samples(config, corpus),
        token_limit=plan.max_tokens,
        spare=spare,
    )
    problem.check_fits(lengths.lengths, lengths.numbers)
    problem = replace(
        problem,
        batch_size=plan.batch_size,
        one_shape=plan.one_shape,
        smoothing=plan.smoothing,
        objective=Objective(plan.objective),
    )
    planner = Planner(policy=plan.policy, problem=problem, lr_scaling=lr_scaling(config, corpus, spec.objective))
    return with_shapes(planner, plan.shapes) if plan.shapes else planner


def _zero_bubble(config: Config) -> ZeroBubble:
    """Which pipelines may split backwards: none by themselves where layers are compiled, or forwards all come first."""
    is_whole = config.train.compile or config.train.schedule != PipelineSchedule.ONE_F_ONE_B
    mode = ZeroBubble(config.plan.zero_bubble)
    return ZeroBubble.NONE if mode is ZeroBubble.AUTO and is_whole else mode


def _has_passes_of_its_own(config: Config, spec: LayerStack) -> bool:
    """Whether micro-batches may be in slices, or some of their sequences on one rank: not where layers are compiled, or
    tokens see later ones.
    """
    return spec.objective == NEXT_TOKEN and not config.train.compile and not config.plan.shapes


def lr_scaling(config: Config, corpus: Corpus, objective: str) -> LrScaling | None:
    """How the learning-rate follows the batches of the run; None: not at all.

    Raises:
        InputError: the reference is left out, and cannot be told from the budget.
    """
    optim, data = config.optim, config.data
    if optim.lr_scaling == "none":
        return None
    if data.count_padding and optim.lr_reference is None:
        raise InputError("with data.count_padding a step's size depends on its padding; set optim.lr_reference")
    reference = optim.lr_reference or mean_size(
        corpus.epoch_lengths(config.seed),
        by=optim.lr_scaling_by,
        objective=objective,
        tokens_per_step=data.tokens_per_step or DEFAULT_TOKENS_PER_STEP,
        sequences_per_step=data.sequences_per_step,
    )
    return LrScaling(rule=optim.lr_scaling, by=optim.lr_scaling_by, reference=reference, clamp=optim.lr_clamp)


def open_plans(config: Config, *, show_progress: bool = False) -> PlanFile:
    """The plans of ``plan.file``, which say all that the other settings of ``plan`` would decide.

    Raises:
        InputError: there are none, or settings contradict them.
    """
    plan, names = config.plan, ("method", "methods", "degree", "form_batches")
    if asked := [f"plan.{name}={value}" for name in names if (value := getattr(plan, name))]:
        raise InputError(
            f"plan.file={plan.file} holds plans that are executed as they are; {' and '.join(asked)} would not apply. "
            "Leave it out, or plan again with it"
        )
    if not show_progress:
        return PlanFile(Path(plan.file))
    with progress() as bar:
        task = bar.add_task("check plans", total=None)
        return PlanFile(
            Path(plan.file), on_read=lambda done, total: bar.update(task, completed=done >> 10, total=total >> 10)
        )


def with_draws(config: Config, planner: Planner) -> Callable[[GlobalBatch], StepPlan]:
    """The planner as it is, or with what ``plan.method=random`` draws."""
    if config.plan.method != RANDOM:
        return planner
    if config.plan.degree:
        return RandomMethods(planner=planner, seed=config.seed)
    return random_strategies(planner, seed=config.seed)


def _samples(config: Config, corpus: Corpus) -> list[np.ndarray]:
    """Lengths of typical batches, drawn with another seed than those of the run."""
    other = config.model_copy(update={"seed": config.seed ^ SAMPLES_SEED})
    is_steady = OrderSettings.of(config.data).is_steady
    if is_steady:
        stream = make_sampler(other, corpus)
    else:
        stream = sampler_of(other, corpus.lengths, Shuffled(), corpus.selection(other.seed))
    return list(lengths_of(stream))
