"""Makes the stream of batches and the planner of a prepared run from lengths and costs."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.lr_scaling import LrScaling, mean_size
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.forward_cost import ForwardOnlyCost
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.data.max_length import CorpusView
from lengthwise.data.order import Order, OrderSettings, Shuffled, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sort_key import difficulty, of_values
from lengthwise.plan.dcp.form_batches import FormedBatches
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.search_space import SAMPLES_SEED, RecomputeMode, SearchSpace, lengths_of, make_problem
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.space.sliced_packs import Slices
from lengthwise.plan.space.split_backwards import ZeroBubble
from lengthwise.session.collate import CollatedItems


def with_metric_of(options: PrepareOptions, view: CorpusView) -> PrepareOptions:
    """The options with a metric of the view's sequences: a piece of a sequence is as hard as the whole.

    Raises:
        InputError: the metric is not one number for each sequence that the corpus has.
    """
    if options.metric is None:
        return options
    sequence_metric = of_values(options.metric, view.ledger.sequences_in)
    return options.model_copy(update={"metric": sequence_metric.values[view.base_ids]})


def make_sampler(options: PrepareOptions, lengths: LengthIndex, objective: str) -> Sampler:
    """The stream of global batches.

    Raises:
        InputError: the metric is not one number per sequence.
    """
    settings = OrderSettings.of(options)
    return _sampler(
        options, lengths, objective, order=make_order(settings, difficulty(options.metric, lengths, settings))
    )


def _sampler(options: PrepareOptions, lengths: LengthIndex, objective: str, *, order: Order) -> Sampler:
    return Sampler(
        lengths,
        seed=options.seed,
        order=order,
        objective=objective,
        tokens_per_step=options.budgets.get("tokens_per_step"),
        sequences_per_step=options.budgets.get("sequences_per_step"),
    )


def stream_of(
    options: PrepareOptions, lengths: LengthIndex, objective: str, corpus: Any = None
) -> tuple[BatchStream, int]:
    """The stream of global batches, and how many there are: as many as were asked for, or those of the epochs.

    A ``corpus`` of :class:`~lengthwise.session.collate.CollatedItems` may make the stream itself.
    """
    if isinstance(corpus, CollatedItems) and corpus.make_stream is not None:
        return corpus.make_stream(lengths, objective)
    sampler = make_sampler(options, lengths, objective)
    return sampler, options.steps or sampler.num_batches(options.epochs)


class Epochs:
    """The batches of a number of epochs."""

    def __init__(self, sampler: Sampler, number: int) -> None:
        self._sampler, self._number = sampler, number

    def __next__(self) -> GlobalBatch:
        if self._sampler.epoch >= self._number:
            raise StopIteration
        return next(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the sampler."""
        self._sampler.load_state_dict(state)


def form(
    options: PrepareOptions, problem: PlanningProblem, lengths: LengthIndex, objective: str
) -> tuple[FormedBatches, int]:
    """The stream of batches that groups of ``problem`` can balance, and how many there are to compute."""

    sampler = make_sampler(options, lengths, objective)
    stream = sampler if options.steps is not None else Epochs(sampler, options.epochs)
    formed = FormedBatches(stream, problem, g_min=options.g_min, g_max=options.g_max, is_finite=options.steps is None)
    return formed, options.steps or formed.num_left() or 0


def make_planner(
    options: PrepareOptions,
    cost: CostModel,
    *,
    cluster: ClusterSpec,
    num_layers: int,
    lengths: LengthIndex,
    objective: str,
    max_stages: int | None = 1,
    head_layers: float = 0.0,
    keeps_attention: bool = False,
) -> Planner:
    """The planner of the policy: up to ``max_stages``, sequences shared by up to ``max_degree`` ranks.

    ``head_layers``: layers that cost as much as the head. ``keeps_attention``: whether the model was compared with
    recomputed layers that keep what attention gave, so that plans may have them.

    Raises:
        InfeasibleError: the model's state or the longest sequence fits under no scheme.
    """
    num_ranks, measured = cluster.num_devices, _measured(cost)
    if options.max_degree is not None and options.max_degree > num_ranks:
        raise InputError(f"max_degree={options.max_degree}, and there are {num_ranks} ranks")
    search_space = SearchSpace(
        max_degree=options.max_degree or num_ranks,
        max_stages=max_stages,
        head_layers=head_layers,
        methods=options.sharing_methods,
        recompute=RecomputeMode("auto" if options.recompute == "selective" else options.recompute),
        offload=OffloadMode(options.offload),
        shard_gradients=GradientSharding(options.shard_gradients),
        zero_bubble=ZeroBubble(options.zero_bubble),
        slices=Slices(options.slices),
        planned_tile=getattr(measured, "tile_tokens", 0),
        has_selective=keeps_attention,
        has_head_groups=not options.compile and isinstance(measured, DualLayerCost),
    )
    other = options.model_copy(update={"seed": (options.seed + SAMPLES_SEED) % (1 << 64)})
    is_steady = OrderSettings.of(options).is_steady
    typical = (make_sampler if is_steady else partial(_sampler, order=Shuffled()))(other, lengths, objective)
    problem = make_problem(
        cost,
        cluster=cluster,
        num_layers=num_layers,
        max_length=max(lengths.max_length, options.step_max_length or 0),
        search_space=search_space,
        samples=lengths_of(typical),
        token_limit=options.max_tokens,
    )
    problem.check_fits(lengths.lengths, lengths.numbers)
    problem = replace(problem, is_waited_for=True)
    return Planner(policy=options.policy, problem=problem, lr_scaling=_lr_scaling(options, lengths, objective))


def _measured(cost: CostModel) -> CostModel:
    """The cost of forward and backward as it was measured: of forwards alone that of training, without corrections."""
    measured: Any = cost.training if isinstance(cost, ForwardOnlyCost) else cost
    while hasattr(measured, "base"):
        measured = measured.base
    return cast(CostModel, measured)


def _lr_scaling(options: PrepareOptions, lengths: LengthIndex, objective: str) -> LrScaling | None:
    if options.lr_scaling == "none":
        return None
    budgets = {"tokens_per_step": None, "sequences_per_step": None, **options.budgets}
    reference = options.lr_reference or mean_size(lengths, by=options.lr_scaling_by, objective=objective, **budgets)
    return LrScaling(rule=options.lr_scaling, by=options.lr_scaling_by, reference=reference, clamp=options.lr_clamp)
