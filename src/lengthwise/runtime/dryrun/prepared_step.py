"""A step of a model of transformers, prepared and without its weights, as one rank of a fake world runs it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import LayerVariant
from lengthwise.core.pipeline_config import Method
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.dryrun.engine_step import LabelledState, PlannedTokens, RecordedClock, document_of, fake_rank
from lengthwise.runtime.dryrun.recorder import Recorder
from lengthwise.runtime.loop import update_reports
from lengthwise.runtime.loop.prepared_engine import PreparedEngine
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.slice_limits import attention_sizes, slice_problem
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.profile.fingerprint import other_bytes
from lengthwise.runtime.profile.layer_kinds import measured_layers
from lengthwise.runtime.profile.layer_memory import measure_bytes
from lengthwise.runtime.profile.trial import Trial, group_of_degree, measure_memory
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.verify.trace import trace_model, trace_tiles
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.label_convention import LabelConvention
from lengthwise.runtime.wrap.position_masks import SymbolicMask
from lengthwise.runtime.wrap.wrapped_model import WrappedModel


@dataclass(frozen=True, kw_only=True)
class StockSettings:
    """The folder of a model of transformers, of which config.json is read alone, and how a run trains it."""

    folder: str
    architecture: str
    objective: str
    vocab_size: int
    mask_token_id: int | None
    dtype: str


def import_model(settings: StockSettings) -> Any:
    """Import and return the class of a model.

    Raises:
        InputError: what it computes are no tokens, but images or sounds.
    """
    import_module("transformers.initialization")
    model_class = getattr(import_module("transformers"), settings.architecture)
    if (name := getattr(model_class, "main_input_name", "input_ids")) != "input_ids":
        raise InputError(
            f"{settings.architecture} takes {name}, which a corpus of tokens does not have; dry runs are of models "
            "that take input_ids, and lengthwise.prepare(inputs=...) trains others"
        )
    return model_class


def dry_prepared_step(
    plan: StepPlan,
    settings: StockSettings,
    rank: int,
    *,
    num_kept: int | None,
    optimizer: OptimizerSettings,
    ranks_per_node: int,
    state_on_host: bool = False,
) -> dict[str, Any]:
    """Run the step of ``plan`` as ``rank``; what it asked of its device, as plain values.

    ``num_kept``: how many of the last layers stay whole where weights are gathered by layer; None: all weights are.
    """
    with fake_rank(rank, plan.num_devices, ranks_per_node=ranks_per_node) as (world, recorder):
        source = PlannedTokens(plan, settings.vocab_size)
        prepared, _ = _prepare(settings, world, recorder, optimizer, source=source, state_on_host=state_on_host)
        if any(p.scheme_of(m).tile_tokens for p in plan.pipelines for m in p.micro_batches):
            _find_tiles(prepared)
        absent = cast(Any, None)  # batches and plans of a training loop
        run = _RunOfOneRank(
            prepared, stream=absent, planner=absent, lr=absent, num_steps=1, keep_layers=lambda plan: num_kept or 0,
            check_stages=lambda stage_layers, splits, slices: None,  # which needs numbers
        )  # fmt: skip
        if num_kept is not None:
            run.gather_by_layer()
        run.state.step(lr=0.0, clip=1.0)  # the optimizer's state of the steps before
        run.begin_plan(plan)
        run.update_weights()
        _learn_masks(run, plan)
        prepared.state.label()  # type: ignore[union-attr]
        recorder.restart()
        engine = PreparedEngine(run)
        engine.compute_step(plan, RecordedClock(world, recorder), lr=1e-4)
        return document_of(recorder, rank)


def dry_profile(
    packs: Sequence[tuple[int, Method, tuple[int, ...], LayerVariant]],
    settings: StockSettings,
    rank: int,
    *,
    num_ranks: int,
    optimizer: OptimizerSettings,
    ranks_per_node: int,
) -> dict[str, Any]:
    """Count on ``rank`` of ``num_ranks`` what layers keep in ``packs``, as a profile of two layers measures it.

    ``packs``: the number of ranks that share each, by which method, the lengths of its sequences, and how layers
    compute.
    """
    with fake_rank(rank, num_ranks, ranks_per_node=ranks_per_node) as (world, recorder):
        source = PlannedTokens(None, settings.vocab_size)
        run, by_sequence = _prepare(settings, world, recorder, optimizer, source=source)
        measured, rows = measured_layers(run.wrapped_model.structure.layers), []
        run.wrapped_model.layers.computed = frozenset(measured.numbers)
        gc.disable()  # garbage that is freed within a layer would count as less than it keeps
        for degree, method, lengths, variant in packs:
            if by_sequence and degree > 1:
                continue
            group = group_of_degree(world, degree)
            assert group is not None, "numbers of ranks that share a pack divide those of the run"
            gc.collect()
            if variant.tile_tokens and not run.wrapped_model.tiles:
                _find_tiles(run)
            trial = Trial(lengths=lengths, group=group, method=method, **vars(variant))
            counted, _ = measure_bytes(run, trial, measured)
            run.discard()
            rows.append([degree, method, lengths, vars(variant), counted.fields])
        structure, used = run.wrapped_model.structure, run.wrapped_model.used_units
        return {
            "rows": rows,
            "unit_params": structure.table().unit_sizes,
            "other_bytes": other_bytes(run),
            "gather_problem": run.gather_problem,
            "stage_problem": run.stage_problem,
            "by_sequence": by_sequence,
            "attention": None if slice_problem(run) else attention_sizes(run.wrapped_model.script),
            "head_units": sorted(used[-1]) if used else [],
            "has_early_output": any(structure.num_layers + 1 in units for units in used[:-1]),
        }


def _find_tiles(run: PreparedModel) -> None:
    """Find the feed-forward modules that compute tiles.

    Raises:
        InputError: there are none.
    """
    if problem := trace_tiles(run):
        raise InputError(f"plans have no tiles of {type(run.model).__name__}: {problem}")


def _learn_masks(run: Run, plan: StepPlan) -> None:
    """Let a model learn its masks from a sequence as long as any of ``plan``, as in the steps before."""
    if run.wrapped_model.masks:
        longest = max(max(m.pack.lengths) for pipeline in plan.pipelines for m in pipeline.micro_batches)
        measure_memory(run, Trial(lengths=(longest,), group=run.alone, method=Method.DENSE))
        run.discard()


class _RunOfOneRank(Run):
    """A run whose other ranks say nothing."""

    def begin_step(self, plan: StepPlan, clock: StepClock, *, attempt: int = 0) -> Step:
        """Start the step of ``plan`` with one target counted: those of other stages are not heard of."""
        step = super().begin_step(plan, clock, attempt=attempt)
        step._weighing.num_targets = 1
        cast(Any, update_reports).not_computed = lambda reports, plan: ""  # others' reports are copies of this rank's
        return step


def _prepare(
    settings: StockSettings,
    world: DistContext,
    recorder: Recorder,
    optimizer: OptimizerSettings,
    *,
    source: PlannedTokens,
    state_on_host: bool = False,
) -> tuple[PreparedModel, str]:
    """Prepare the model as ``lengthwise.prepare`` does it, but for what needs numbers: comparing it with itself.

    Also returns why it is computed sequence by sequence; an empty string: in packs.
    """
    cast(Any, SymbolicMask).of = staticmethod(_mask_of_host)
    prepare = partial(
        _prepare_once, settings, world, recorder, optimizer, source=source, state_on_host=state_on_host
    )  # fmt: skip
    try:
        return prepare(by_sequence=False), ""
    except InputError as error:
        refusal = error.marked
    gc.collect()  # cycles hold the model that was refused, with its state
    return prepare(by_sequence=True), refusal


def _prepare_once(
    settings: StockSettings,
    world: DistContext,
    recorder: Recorder,
    optimizer: OptimizerSettings,
    *,
    source: PlannedTokens,
    state_on_host: bool,
    by_sequence: bool,
) -> PreparedModel:
    model = _build(settings, world.device)
    wrapped_model = WrappedModel(model, objective=settings.objective, by_sequence=by_sequence)
    masking = None
    if settings.mask_token_id is not None:
        masking = TokenMasking(seed=0, vocab_size=settings.vocab_size, mask_token_id=settings.mask_token_id)
    collator = PackCollator(source=source, objective=settings.objective, masking=masking)
    state = LabelledState(model, world, optimizer, table=wrapped_model.structure.table(), on_host=state_on_host)
    state.recorder = recorder
    state.materialize_all()
    prepared = PreparedModel(wrapped_model, world, collator=collator, state=state)
    try:
        trace_model(prepared, labels=LabelConvention())
    except InputError:
        wrapped_model.release()
        state.release_params()
        raise
    return prepared


def _build(settings: StockSettings, device: torch.device) -> nn.Module:
    transformers, initialization = import_module("transformers"), import_module("transformers.initialization")
    try:
        config = transformers.AutoConfig.from_pretrained(settings.folder, local_files_only=True)
        with device, initialization.no_init_weights():
            model = import_model(settings)._from_config(config, dtype=getattr(torch, settings.dtype))
            model.tie_weights()  # which building without numbers leaves out
    except Exception as error:  # whatever a model says of a configuration
        text = " ".join(str(error).split())
        raise InputError(
            f"{settings.architecture} of transformers {transformers.__version__} cannot be built of "
            f"{settings.folder}/config.json ({text}); give a folder as save_pretrained writes it"
        ) from None
    trained: nn.Module = model.train()
    return trained


_make_mask = SymbolicMask.of


def _mask_of_host(causal: bool, window: Any, device: torch.device, function: Any = None) -> SymbolicMask:
    """A mask, which is a subclass of tensors without numbers: fake tensors have no subclasses."""
    with unset_fake_temporarily():
        return _make_mask(causal, window, torch.device("cpu"), function)
