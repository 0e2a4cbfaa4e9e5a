"""The parts of a configured run whose model transformers computes: prepared as `lengthwise.prepare` does it."""

from collections.abc import Callable
from functools import partial

from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config
from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus
from lengthwise.models.stock_model import StockModel
from lengthwise.plan.planner import Planner
from lengthwise.runtime.loop.planned_pipelines import check_executable, check_pack_sizes
from lengthwise.runtime.loop.prepared_engine import PreparedEngine
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.slice_limits import slice_problem
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.wrap.preserved_state import preserve_state
from lengthwise.session.calibration import find_cost
from lengthwise.session.compile_sizes import use_cache
from lengthwise.session.datasets import RunSequences, read_sequences
from lengthwise.session.method_choice import plan_limits
from lengthwise.session.model_checks import check_takes
from lengthwise.session.objectives import expected_columns
from lengthwise.session.online_calibration import OnlineCalibration, calibrated
from lengthwise.session.planning import batch_stream, make_sampler, open_plans
from lengthwise.session.prepare import learn_model, make_collator, read_corpus
from lengthwise.session.run_parts import RunInputs, RunParts
from lengthwise.session.run_planner import RunPlanner
from lengthwise.session.slice_costs import with_passes_priced
from lengthwise.session.stage_limit import head_layers, most_stages, telling_why_one_stage
from lengthwise.session.stock_planning import StockLayers, stock_options, stock_planner
from lengthwise.session.weight_placement import place_weights, shared_gradients

WITHOUT_LABELS = (
    "a configuration trains models of next tokens or of hidden tokens, whose labels are the tokens of its index: train "
    "this one with lengthwise.prepare, whose items have labels of their own",
)


def stock_parts(inputs: RunInputs, stock: StockModel, model: nn.Module) -> RunParts:
    """The parts of a run of a model that transformers computes, traced, checked and measured on its ranks.

    Raises:
        InputError: ``lengthwise.prepare`` refuses the model, or plans cannot be used as configured.
        InfeasibleError: the model or a sequence fits under no scheme.
        CheckError: packs change what the model learns.
    """
    config, corpus, world = inputs.config, inputs.corpus, inputs.world
    chosen = stock_options(config, stock, quiet=inputs.quiet)
    if chosen.compile:
        use_cache(inputs.folder, world)
    with preserve_state(model):
        chosen, objective, sequences = read_corpus(model, corpus, chosen, world)
        validated = None if inputs.validation is None else _read_more(model, inputs.validation, chosen)
        memory_bytes = inputs.cluster.device.memory_bytes
        prepared, chosen = learn_model(
            model, chosen, world, sequences, objective, memory_bytes=memory_bytes, without_labels=WITHOUT_LABELS
        )
        if prepared.wrapped_model.by_sequence is not None and (config.plan.degree or 1) > 1:
            raise InputError(
                f"plan.degree={config.plan.degree}: {stock.architecture} is computed sequence by sequence, each on one "
                "rank; leave it out"
            )
        planning = _Planning(inputs, prepared, chosen, sequences)
        planned = None if config.plan.file else planning.calibrated()
        planner = planning.of_file() if planned is None else planned
        calibration = planned if isinstance(planned, OnlineCalibration) else None
        stream: BatchStream = make_sampler(config, corpus)
        if planned is not None:
            stream = batch_stream(config, corpus, planned.problem)
        run = Run(
            prepared,
            stream=stream,
            planner=planner,
            lr=lambda step: config.optim.lr,  # the training loop sets that of each step
            clip_norm=config.optim.clip_norm,
            num_steps=config.train.num_steps,
            on_oom=calibration.on_oom if calibration else None,
            on_finish=calibration.on_finish if calibration else None,
            keep_layers=planning.keep_layers,
            check_stages=partial(check_stages, prepared),
        )
        run.plan_limits = plan_limits(chosen)

        shown = None if validated is None else make_collator(prepared.wrapped_model, chosen, validated)
        return RunParts(
            engine=PreparedEngine(run, validation=shown),
            stream=stream,
            planner=planner,
            num_params=prepared.num_params,
            spec=stock.spec,
            is_measured=True,
            validation=inputs.validate_with(planning.planner_of),
        )


class _Planning:
    """Makes planners for a prepared model by the settings of a configuration."""

    def __init__(
        self, inputs: RunInputs, prepared: PreparedModel, chosen: PrepareOptions, sequences: RunSequences
    ) -> None:
        self._inputs, self._prepared = inputs, prepared
        lengths = sequences.computed_lengths
        measured = find_cost(prepared, chosen, cluster=inputs.cluster, lengths=lengths)
        self._cost, self.keep_layers = place_weights(prepared, chosen, measured, lengths.max_length)
        """Costs as they were measured, and what a step keeps whole where weights are gathered by layer."""
        self._options = chosen.model_copy(update={"shard_gradients": shared_gradients(prepared, chosen, measured)})
        self._max_stages = most_stages(prepared, chosen)
        self._options, self._cost = with_passes_priced(prepared, self._options, self._cost, self._max_stages)

    def planner_of(self, config: Config, corpus: Corpus) -> Planner:
        """The planner of a corpus under costs as they were measured."""
        return self._planner(config, corpus, self._cost)

    def calibrated(self) -> RunPlanner:
        """The planner of the run, whose costs follow what its steps take."""
        plan_with = partial(self._planner, self._inputs.config, self._inputs.corpus)
        return calibrated(self._prepared, self._cost, plan_with)

    def of_file(self) -> Callable[[GlobalBatch], StepPlan]:
        """The plans of ``plan.file``, which suit the model and the ranks."""
        plans = open_plans(self._inputs.config)
        for plan in plans.representatives():
            check_executable(
                plan, self._prepared.wrapped_model.structure.num_layers, self._inputs.world.size,
                stage_problem=self._prepared.stage_problem, split_problem=self._prepared.split_problem,
                slice_problem=slice_problem(self._prepared),
            )  # fmt: skip
            check_pack_sizes(plan, self._prepared.wrapped_model.max_tokens(self._prepared.collator))
            plan_limits(self._options).check(plan, self._prepared.wrapped_model)
        return plans

    def _planner(self, config: Config, corpus: Corpus, cost: CostModel) -> Planner:
        structure, objective = self._prepared.wrapped_model.structure, self._prepared.wrapped_model.objective
        layers = StockLayers(num_layers=structure.num_layers, objective=objective, head_layers=head_layers(self._cost))
        with telling_why_one_stage(self._prepared):
            return stock_planner(
                config, cost, layers, options=self._options, cluster=self._inputs.cluster, corpus=corpus,
                max_stages=self._max_stages,
            )  # fmt: skip


def _read_more(model: nn.Module, corpus: Corpus, chosen: PrepareOptions) -> RunSequences:
    """The sequences of a validation set, which the model can compute."""
    sequences = read_sequences(corpus, expected=expected_columns(model, chosen))
    check_takes(model, sequences)
    return sequences
