"""``lengthwise.prepare``: from a model and a corpus to a run that a user's own loop steps through."""

import atexit
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Unpack

from torch import nn

from lengthwise.config.prepare_keywords import PrepareKeywords, with_keywords
from lengthwise.config.prepare_options import PrepareOptions, read_options
from lengthwise.config.setting_names import as_option
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import LengthwiseError, errors_spelt
from lengthwise.core.processes import check_processes
from lengthwise.core.specs import ClusterSpec
from lengthwise.plan.planner import Planner
from lengthwise.runtime.comm.consensus import require_equal
from lengthwise.runtime.comm.devices import find_device
from lengthwise.runtime.comm.farewell import FAREWELL
from lengthwise.runtime.comm.world import DistContext, shutdown_at_exit, start_world
from lengthwise.runtime.loop.brought_items import ItemExchange
from lengthwise.runtime.loop.call_order import all_succeed
from lengthwise.runtime.loop.changed_settings import ChangedSettings
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.synthetic_batches import traced_lengths
from lengthwise.runtime.state.optimizer_trial import lr_function
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.verify.trace import trace_model
from lengthwise.runtime.wrap.model_accessors import base_model, is_hugging_face
from lengthwise.runtime.wrap.preserved_state import preserve_state
from lengthwise.runtime.wrap.recompute_layers import selective_contexts
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from lengthwise.session.calibration import find_cost, say
from lengthwise.session.collate import CollatedItems
from lengthwise.session.counted_targets import must_count_targets, share_ignored_labels
from lengthwise.session.coupled_units import (
    check_can_couple,
    coupling_of,
    cuts_of,
    planned_by,
    planned_stream,
    planner_that_cuts,
    with_members_planned,
)
from lengthwise.session.dataset_items import DatasetItems, warn_of_columns
from lengthwise.session.datasets import RunSequences, read_sequences
from lengthwise.session.fallbacks import ComparedCalls, learn_exactly, warn_of_other_mean
from lengthwise.session.id_ranges import IdRanges
from lengthwise.session.item_reader import ItemReader
from lengthwise.session.longer_sequences import with_longest_fitting
from lengthwise.session.make_collator import check_can_share, make_collator
from lengthwise.session.meant_labels import check_labels_are_meant, check_labels_of_next
from lengthwise.session.method_choice import plan_limits
from lengthwise.session.model_checks import (
    check_by_sequence,
    check_model,
    check_options,
    check_padding,
    check_takes,
    forward_errors_named,
)
from lengthwise.session.new_kinds import NewKinds
from lengthwise.session.new_sizes import NewSizes
from lengthwise.session.objectives import expected_columns, labels_sequences
from lengthwise.session.online_calibration import OnlineCalibration, calibrated
from lengthwise.session.pack_limit import with_pack_limit
from lengthwise.session.prepare_planning import form, stream_of, with_metric_of
from lengthwise.session.rank_agreement import to_compare
from lengthwise.session.run_planner import ForwardPlanner, RunPlanner
from lengthwise.session.sequence_units import units_named
from lengthwise.session.slice_costs import with_passes_priced
from lengthwise.session.stage_limit import head_layers, most_stages, telling_why_one_stage
from lengthwise.session.state_placement import is_on_host
from lengthwise.session.stock_comparison import compare_again, compare_with_stock
from lengthwise.session.tried_optimizer import tried_optimizer, warn_of_empty_groups
from lengthwise.session.weight_placement import KeepLayers, place_weights, shared_gradients, with_weight_placement

_log = logging.getLogger("lengthwise")
MOST_READERS = 256
"""Processes of one rank that read items."""


def prepare(model: nn.Module, corpus: Any, **options: Unpack[PrepareKeywords]) -> Run:
    """Prepare ``model`` to train on ``corpus``: every rank calls this, under torchrun or alone.

    The model's code is not changed and its weights stay its own; its layers, its attention and its forward go through
    the run until :meth:`~lengthwise.runtime.loop.run.Run.close`. Moves the model to the rank's device, or only the
    rank's share of it where weights are gathered by layer.

    Args:
        model: of transformers, or any ``nn.Module`` whose attention is a call of torch or softmax by hand.
        corpus: a folder made by ``lengthwise index``, or anything with a length and items: rows of token ids,
            dictionaries with ``input_ids`` (and ``labels``), arrays whose first axis is slots; or units, tuples of
            such dictionaries, whose sequences share a micro-batch.
        options: see :class:`~lengthwise.config.prepare_options.PrepareOptions`.

    Raises:
        InputError: options, model or corpus cannot be used as they are.
        InfeasibleError: the longest sequence fits on no group of devices.
        CheckError: packs change what the model learns.
    """
    chosen = read_options(dict(options))
    with errors_spelt(as_option), preserve_state(model):
        run = _prepare(model, corpus, chosen)
    run.settings = ChangedSettings(model, run.wrapped_model.own_state)
    return run


prepare.__signature__ = with_keywords(signature(prepare))  # type: ignore[attr-defined]  # for help() and editors


def _prepare(model: nn.Module, corpus: Any, chosen: PrepareOptions) -> Run:
    world = start_world(chosen.device, timeout_s=chosen.timeout_s)
    check_processes(chosen.workers, setting="workers", limit=MOST_READERS)
    chosen, objective, sequences = read_corpus(model, corpus, chosen, world)
    atexit.register(shutdown_at_exit(world))  # threads of Gloo may abort a process that ends without
    FAREWELL.begin()  # last, so that it is said first
    stream, num_steps = stream_of(chosen, sequences.lengths, objective, corpus)
    memory_bytes = _cluster(chosen, world).device.memory_bytes
    prepared, chosen = learn_model(model, chosen, world, sequences, objective, memory_bytes=memory_bytes)
    try:
        check_can_couple(prepared, chosen)
        share_ignored_labels(prepared)
        with units_named(prepared.collator.units):
            planner, plan_forwards, keep_layers = _planner(prepared, chosen, sequences)
            if chosen.form_batches:
                stream, num_steps = form(chosen, planner.problem, sequences.lengths, objective)
        for frozen in chosen.frozen:
            prepared.frozen(frozen, check=chosen.check)
        stream, longest = planned_stream(stream, prepared, sequences.lengths)
        calibration = planner if isinstance(planner, OnlineCalibration) else None
        run = Run(
            prepared,
            stream=stream,
            planner=planner,
            lr=lr_function(chosen.lr, prepared.state.settings),
            clip_norm=chosen.clip_norm,
            num_steps=num_steps,
            counts_targets=chosen.count_targets or must_count_targets(prepared),
            workers=chosen.workers,
            on_oom=calibration.on_oom if calibration else None,
            on_finish=calibration.on_finish if calibration else None,
            keep_layers=keep_layers,
            check_stages=partial(check_stages, prepared),
            items=ItemExchange(
                world,
                prepared.collator,
                read_items=ItemReader(sequences, expected_columns(model, chosen), prepared.check_ids),
                objective=objective,
                max_length=chosen.step_max_length or longest,
                cuts_units=cuts_of(chosen) is not None,
                plan_forwards=planned_by(plan_forwards, cuts_of(chosen)),
            ),
            coupling=coupling_of(chosen, memory_bytes),
            plan_with_cuts=cuts_of(chosen),
        )
    except BaseException:
        prepared.close()
        raise
    run.limits_own_batches, run.plan_limits = chosen.steps is not None, plan_limits(chosen)
    kinds, sizes = NewKinds(prepared), NewSizes(prepared, chosen, sequences.computed_lengths)
    run.check_again = partial(compare_again, prepared, chosen, kinds, sizes)
    run.compares_changes = chosen.check
    run.changes_of_items = lambda items: sizes.changes(items) | kinds.changes(items)
    return run


WITHOUT_LABELS = (
    "say objective='next-token' to learn the token that follows", "give items labels, which are used as they are"
)  # fmt: skip
"""What users of ``prepare`` can do whose model needs labels that the corpus has not; the last helps ever."""


def read_corpus(
    model: nn.Module, corpus: Any, chosen: PrepareOptions, world: DistContext
) -> tuple[PrepareOptions, str, RunSequences]:
    """Read the corpus, and compare it, model and options over ranks: the options and objective to go on with."""
    shown = say if chosen.verbose and world.is_first else _log.debug
    chosen, objective, sequences, compared = all_succeed(world, partial(_read, model, corpus, chosen, world, say=shown))
    require_equal(world, compared)
    return chosen, objective, sequences


def learn_model(
    model: nn.Module,
    chosen: PrepareOptions,
    world: DistContext,
    sequences: RunSequences,
    objective: str,
    *,
    memory_bytes: float,
    without_labels: tuple[str, ...] = WITHOUT_LABELS,
) -> tuple[PreparedModel, PrepareOptions]:
    """Move the model, or this rank's share of it, to its device, trace it and compare it with itself.

    ``memory_bytes``: what a device has; ``without_labels``: what is advised where items have no labels and a model
    needs them. Also returns the options that are left it.
    """
    chosen = with_weight_placement(model, chosen, world, memory_bytes)
    if chosen.weights != "by-layer":
        model.to(world.device)
    prepared, chosen = learn_exactly(model, chosen, partial(_learn, model, world, sequences, objective))
    warn_of_other_mean(prepared)
    warn_of_empty_groups(prepared)
    if prepared.wrapped_model.by_sequence is not None:
        chosen = chosen.model_copy(update={"max_degree": 1})
    try:
        chosen = with_pack_limit(prepared, chosen)
        check_labels_are_meant(prepared, chosen, sequences, without_labels)
    except BaseException:
        prepared.close()
        raise
    return prepared, chosen


def _learn(
    model: nn.Module,
    world: DistContext,
    sequences: RunSequences,
    objective: str,
    chosen: PrepareOptions,
    calls: ComparedCalls,
) -> PreparedModel:
    """The model, traced and compared with the stock model."""
    by_sequence = calls is not ComparedCalls.IN_PACKS
    wrapped_model = WrappedModel(
        model,
        objective=objective,
        layers=chosen.layers,
        loss=chosen.loss,
        inputs=chosen.inputs,
        context=selective_contexts() if chosen.recompute == "selective" else None,
        by_sequence=by_sequence,
        labels_sequences=labels_sequences(model, chosen),
        tile=chosen.feed_forward_tile,
        compile_backend=chosen.compile_backend if chosen.compile else None,
    )
    prepared: PreparedModel | None = None
    try:
        if by_sequence:
            check_by_sequence(model, chosen)
        prepared = PreparedModel.with_optimizer(
            wrapped_model,
            world,
            collator=make_collator(
                wrapped_model, chosen, sequences, has_lengths_of_corpus=calls is ComparedCalls.AT_LENGTHS_OF_CORPUS
            ),
            optimizer=tried_optimizer(chosen.optimizer_settings, wrapped_model, world.size),
            seed=chosen.seed,
            by_layer=chosen.weights == "by-layer",
            state_on_host=is_on_host(chosen.offload_state),
        )
        prepared.can_recompute = chosen.recompute != "none" or not chosen.check
        with IdRanges(prepared) as lookups:
            all_succeed(world, partial(_learn_named, prepared, chosen))
        if wrapped_model.checkpointing.is_used and world.is_first:
            _log.warning("the model's activation checkpointing is left out: plans choose it; see recompute=")
        makes_loss = chosen.loss is not None or chosen.inputs is not None
        is_known = objective == NEXT_TOKEN or (sequences.labels is not None and not makes_loss)
        prepared.check_ids = lambda token, label: lookups.check(token, label if is_known else None)
        prepared.check_ids(sequences.largest_token, sequences.largest_label)
        if chosen.share_prefixes:
            check_can_share(wrapped_model, prepared.collator, chosen)
        if chosen.check:
            compare_with_stock(prepared, chosen, sequences.computed_lengths)
    except BaseException as error:
        wrapped_model.release()
        if prepared is not None and (prepared.gather is None or isinstance(error, LengthwiseError)):
            prepared.restore_weights()  # of shares by all ranks, which all have a known error
        raise
    return prepared


def _learn_named(prepared: PreparedModel, chosen: PrepareOptions) -> None:
    first, second = traced_lengths(prepared.collator)
    dtype = str(prepared.wrapped_model.structure.computed_dtype).removeprefix("torch.")
    pack = "one sequence" if prepared.collator.compared_lengths else "a pack of one sequence"
    slots = f"{first}" if first == second else f"{first} or {second}"
    call = f"{pack}, of {slots} slots, in {dtype} on {prepared.world.device.type}"
    with forward_errors_named(prepared.model, chosen, call=call):
        trace_model(prepared, is_compared=chosen.check)


def _read(
    model: nn.Module, corpus: Any, chosen: PrepareOptions, world: DistContext, *, say: Callable[[str], None]
) -> tuple[PrepareOptions, str, RunSequences, dict[str, Any]]:
    """The options and the objective, the corpus, and what of it all must be the same on every rank."""
    check_model(model, makes_inputs=bool(chosen.inputs), may_be_compiled=chosen.compile, packing=chosen.packing)
    check_options(model, chosen, world.device)
    expected = replace(expected_columns(model, chosen), splits_rows=not isinstance(corpus, CollatedItems))
    sequences = read_sequences(
        corpus,
        max_length=chosen.max_length,
        over_length=chosen.over_length,
        slot_tokens=chosen.slot_tokens,
        expected=expected,
        say=say,
    )
    if world.is_first and isinstance(sequences.store, DatasetItems):
        warn_of_columns(sequences.store.columns)
    chosen = with_metric_of(chosen, sequences.view)
    check_takes(model, sequences)
    check_padding(chosen, expected.objective, sequences)
    is_default = expected.objective == NEXT_TOKEN and chosen.objective is None and chosen.inputs is None
    if is_default and isinstance(sequences.store, DatasetItems) and not is_hugging_face(base_model(model)):
        check_labels_of_next(type(model).__name__, sequences.store.label_counts, warns=world.is_first)
    return chosen, expected.objective, sequences, to_compare(model, sequences, chosen)


def _planner(
    prepared: PreparedModel, options: PrepareOptions, sequences: RunSequences
) -> tuple[RunPlanner, ForwardPlanner, KeepLayers | None]:
    """Find out what things cost; return the planners of steps and of forwards alone, and which layers stay whole."""
    cluster, longest = _cluster(options, prepared.world), sequences.computed_lengths.max_length
    cost = options.cost or find_cost(prepared, options, cluster=cluster, lengths=sequences.computed_lengths)
    cost, keep_layers = place_weights(prepared, options, cost, longest)
    options = options.model_copy(update={"shard_gradients": shared_gradients(prepared, options, cost)})
    max_stages = most_stages(prepared, options)
    options, cost = with_passes_priced(prepared, options, cost, max_stages)
    options, lengths = with_members_planned(options, prepared, sequences.lengths)
    units = prepared.collator.units if cuts_of(options) is not None else None
    plan_with = partial(
        planner_that_cuts,
        units,
        cluster=cluster,
        num_layers=prepared.wrapped_model.structure.num_layers,
        lengths=lengths,
        objective=prepared.wrapped_model.objective,
        head_layers=head_layers(cost),
    )

    def plan_as_cut(options: PrepareOptions, cost: CostModel) -> Planner:
        keeps_attention = prepared.wrapped_model.layers.may_keep_attention
        stages = 1 if prepared.stage_problem else max_stages
        with telling_why_one_stage(prepared):
            return plan_with(options, cost, max_stages=stages, keeps_attention=keeps_attention)

    cost = with_longest_fitting(prepared, options, cost, longest, partial(plan_as_cut, options))
    planner = calibrated(prepared, cost, partial(plan_as_cut, options))
    unused = dict.fromkeys(("recompute", "lr_scaling", "shard_gradients", "zero_bubble", "slices"), "none")
    forwards = options.model_copy(update=unused)
    plan_forwards = ForwardPlanner(partial(plan_as_cut, forwards), lambda: planner.planner)
    return planner, plan_forwards, keep_layers


def _cluster(options: PrepareOptions, world: DistContext) -> ClusterSpec:
    device = find_device(world, margin=options.memory_margin)
    if options.memory_gib is not None:
        device = device.with_memory(options.memory_gib)
    if options.host_memory_gib is not None:
        device = device.with_host_memory(options.host_memory_gib)
    return world.cluster_of(device)
