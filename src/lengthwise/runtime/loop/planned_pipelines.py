"""Turn the pipelines of a plan into shards of packs, for models that run in one stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import CheckError, InputError, Setting
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement, WeightShard
from lengthwise.core.sliced_passes import Slice, is_sliced, slices_of
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.step_plan import PlannedMicroBatch as Planned
from lengthwise.runtime.loop.call_order import RankOperation, sync_ranks
from lengthwise.runtime.loop.run_state import MicroBatchMaker, UsualScripts
from lengthwise.runtime.loop.shared_gradients import stage_of
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.wrap.collator import PackCollator, pad_to_degree
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.offload_layers import LayerOffload

ANY_MODEL_METHODS = (
    Method.DENSE, *(method for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.WHOLE)
)  # fmt: skip
"""Methods that share the attention of any model: those with whole weights."""


def make_shard(
    run: MicroBatchMaker, step: int, pipeline: Pipeline, planned: Planned, *, is_alone: bool = False
) -> PackShard:
    """The shard of a planned micro-batch on this rank; with ``is_alone``, the whole pack."""
    world, collator = run.world, run.collator
    group = run.alone if is_alone else world.groups.of(pipeline.ranks_of(stage_of(pipeline, world.rank)))
    assert group is not None, "a rank computes in pipelines that it is in"
    ids, scheme = [], pipeline.scheme_of(planned)
    pack = pad_to_degree(planned.pack, group.size, collator)
    for sequence, length, computed in zip(pack.ids, pack.lengths, pack.computed_lengths):
        number = collator.noise_id(sequence)
        ids += [number] if length == computed else [number, -1]
    return PackShard(
        step=step,
        seed=run.seed,
        ids=tuple(ids),
        cu_seqlens=collator.cu_seqlens(pack),
        tree=collator.tree(pack),
        group=group,
        device=world.device,
        recompute=scheme.recompute,
        offload=LayerOffload(scheme.offload, world.offload.micro_batch()) if scheme.num_offloaded else None,
        tile_tokens=scheme.tile_tokens or planned.tile_tokens,
        keep_attention=scheme.keep_attention,
        methods=scheme.methods,
        head_groups=scheme.head_groups,
        is_causal=collator.objective == NEXT_TOKEN,
    )


def scripts_of(run: UsualScripts, shard: PackShard) -> tuple[ExchangeScript, ...]:
    """The exchanges that the forwards of a micro-batch usually have.

    Raises:
        CheckError: other ranks wait for them, and they are not known yet.
    """
    if not run.usual_scripts and shard.group.size > 1 and not shard.is_finished:
        raise CheckError(
            f"step {shard.step}: this rank left it before the order was seen in which its loop calls the trained model "
            "and the frozen ones, so it cannot stand in for itself; start the run again"
        )
    return run.usual_scripts


class LoopMicroBatch(NamedTuple):
    """A micro-batch of a plan on one rank, or one slice of it: what a loop calls the model for at once."""

    pipeline_number: int
    number: int
    """Which of the pipeline's slices it is in issue order; of its micro-batches, where none is cut."""
    pipeline: Pipeline
    planned: Planned
    """With the pack that is computed, of which this may be a slice."""
    part: Slice

    @property
    def place(self) -> tuple[int, int]:
        """The number of the pipeline in the plan, and of the micro-batch in the pipeline."""
        return self.pipeline_number, self.part.micro_batch

    @property
    def is_first_of_pack(self) -> bool:
        """Whether it is all of its micro-batch, or the first slice, which is the first to be read and whose backward
        is the last.
        """
        return not self.part.part


def micro_batches_of(plan: StepPlan, rank: int, collator: PackCollator) -> list[LoopMicroBatch]:
    """The micro-batches on a rank, or their slices, in the order of computing."""
    return [
        LoopMicroBatch(number, part.number, pipeline, replace(planned, pack=collator.computed(planned.pack)), part)
        for phase in range(plan.num_phases)
        for number, pipeline in enumerate(plan.pipelines)
        if pipeline.phase == phase and rank in pipeline.ranks
        for part in slices_of(pipeline)
        for planned in (pipeline.micro_batches[part.micro_batch],)
    ]


def in_one_piece(plan: StepPlan) -> StepPlan:
    """The plan without slices, for forwards alone, which keep nothing for a backward."""
    pipelines = tuple(
        replace(
            pipeline,
            scheme=replace(pipeline.scheme, slices=1),
            micro_batches=tuple(replace(planned, slices=()) for planned in pipeline.micro_batches),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def check_executable(
    plan: StepPlan,
    num_layers: int,
    num_ranks: int,
    *,
    stage_problem: str,
    has_tiles: bool = False,
    can_recompute: bool = True,
    keeps_attention: bool = False,
    split_problem: str = "",
    slice_problem: str = "",
) -> None:
    """Raise ``InputError`` unless the plan's ranks, stages, methods and tiles suit a third-party model.

    ``stage_problem``: why it cannot be cut into stages; an empty string if it can. ``has_tiles``: whether the modules
    are known, and compared, that compute tiles. ``can_recompute``: whether layers may be recomputed.
    ``keeps_attention``: whether those that are were compared where they keep what attention gave.
    ``split_problem``: why backwards cannot be split. ``slice_problem``: why micro-batches cannot be cut into slices.
    """
    where = f"plan for step {plan.step}"
    if plan.num_devices != num_ranks:
        raise InputError(f"{where} is for {plan.num_devices} ranks, the run has {num_ranks}; plan again")
    for number, pipeline in enumerate(plan.pipelines):
        scheme = pipeline.scheme
        if scheme.num_layers != num_layers:
            raise InputError(
                f"{where}: pipelines[{number}] has stages of {scheme.stage_layers} layers, and the model has "
                f"{num_layers}; plan again"
            )
        if scheme.num_stages > 1 and stage_problem:
            raise InputError(
                f"{where}: pipelines[{number}] has {scheme.num_stages} stages, and {stage_problem}; plan with one "
                f"stage ({Setting.MAX_STAGES}=1)"
            )
        if scheme.zero_bubble and split_problem:
            raise InputError(
                f"{where}: pipelines[{number}] splits backwards, and {split_problem}; plan with zero_bubble=false"
            )
        _check_slices(pipeline, f"{where}: pipelines[{number}]", slice_problem)
        if any(m.placement for m in pipeline.micro_batches):
            raise InputError(
                f"{where}: pipelines[{number}] has sequences whole on one of the ranks that share a layer, which this "
                "library's own models alone do; plan with local_sequences=false"
            )
        if not can_recompute and any(pipeline.scheme_of(m).num_recomputed for m in pipeline.micro_batches):
            raise InputError(
                f"{where}: pipelines[{number}] recomputes layers, which {Setting.RECOMPUTE}=none left out of the "
                "comparison with the stock model; leave that option out, or plan without"
            )
        _check_activations(pipeline, f"{where}: pipelines[{number}]", has_tiles, keeps_attention)
        used = {str(method) for m in pipeline.micro_batches for method in pipeline.methods_of(m)}
        if not used <= set(ANY_MODEL_METHODS):
            raise InputError(
                f"{where}: pipelines[{number}] uses {', '.join(sorted(used))}; any model can: "
                f"{', '.join(ANY_MODEL_METHODS)}"
            )


def check_pack_sizes(plan: StepPlan, max_tokens: int | None) -> None:
    """Raise ``InputError`` if a pack has more than ``max_tokens`` tokens; None: any number.

    Larger ones were not compared with the stock model, or were, and are computed otherwise than small ones.
    """
    for number, pipeline in enumerate(plan.pipelines):
        largest = max((planned.pack.num_tokens for planned in pipeline.micro_batches), default=0)
        if max_tokens is not None and largest > max_tokens:
            raise InputError(
                f"plan for step {plan.step}: pipelines[{number}] has a pack of {largest:,} tokens, and packs of this "
                f"run have at most {max_tokens:,}: what {Setting.MAX_TOKENS} says, or as many as the longest sequence "
                "has, where larger ones are computed otherwise than small ones; put fewer sequences into a pack"
            )


def _check_slices(pipeline: Pipeline, where: str, slice_problem: str) -> None:
    """Raise ``InputError`` unless a third-party model can be computed in the slices of a pipeline."""
    sizes = [part.num_tokens for planned in pipeline.micro_batches for part in planned.slices]
    if sizes and slice_problem:
        raise InputError(
            f"{where} cuts micro-batches into slices, and {slice_problem}; plan with {Setting.SLICES}=none"
        )
    if min(sizes, default=pipeline.scheme.degree) < pipeline.scheme.degree:
        raise InputError(
            f"{where} has a slice of {min(sizes):,} tokens for {pipeline.scheme.degree} ranks, of which some would "
            f"have none, and models fail there; plan fewer slices, a lower degree or {Setting.SLICES}=none"
        )


def _check_activations(pipeline: Pipeline, where: str, has_tiles: bool, keeps_attention: bool) -> None:
    """Raise ``InputError`` unless a third-party model can do with its activations what a pipeline says."""
    tile = max((pipeline.scheme_of(m).tile_tokens for m in pipeline.micro_batches), default=0)
    if tile and not has_tiles:
        raise InputError(
            f"{where} computes feed-forwards in tiles of {tile:,} tokens, and no module of "
            "this model was compared in tiles; give feed_forward_tile= to prepare(...), which plans then override, "
            "or plan without tiles"
        )
    if not keeps_attention and any(pipeline.scheme_of(m).keep_attention for m in pipeline.micro_batches):
        raise InputError(
            f"{where} keeps what attention gave in recomputed layers, and this model was not "
            f'compared so; give {Setting.RECOMPUTE}="selective" to prepare(...), or plan with keep_attention=false'
        )


def rounds_of(plan: StepPlan) -> list[tuple[bool, ...]]:
    """The rounds of a step, phase by phase: whether each rank has a micro-batch, or a slice of one, in it."""
    rounds = []
    for phase in range(plan.num_phases):
        counts = [0] * plan.num_devices
        for pipeline in plan.pipelines:
            for rank in pipeline.ranks if pipeline.phase == phase else ():
                counts[rank] += len(slices_of(pipeline))
        rounds += [tuple(count > number for count in counts) for number in range(max(counts))]
    return rounds


def weights_of_stages(plan: StepPlan, used_units: Sequence[frozenset[int]]) -> list[WeightShard | None] | None:
    """The weights that each rank needs during a step with pipelines of several stages; None: the step has none.

    All stages compute what comes before the layers; ``used_units``: the units of parameters that each position uses.

    Raises:
        InputError: slices would need weights that go after each of them.
    """
    busy = [pipeline for pipeline in plan.pipelines if pipeline.micro_batches]
    if all(pipeline.scheme.num_stages == 1 for pipeline in busy):
        if any(map(is_sliced, busy)):
            raise InputError(
                f"plan for step {plan.step} cuts micro-batches into slices in one stage, and weights are gathered "
                f"layer by layer for one forward and its backward; plan with {Setting.SLICES}=none"
            )
        return None
    layers_of: list[list[range]] = [[] for _ in range(plan.num_devices)]
    for pipeline in busy:
        for rank in pipeline.ranks:
            layers_of[rank].append(pipeline.scheme.layers_of_stage(stage_of(pipeline, rank)))
    return [
        weights_of_layers(range(min(part.start for part in layers), max(part.stop for part in layers)), used_units)
        if layers
        else None
        for layers in layers_of
    ]


def weights_of_layers(layers: range, used_units: Sequence[frozenset[int]]) -> WeightShard:
    """The weights that a stage of these layers computes with, what comes before all layers included."""
    num_layers = len(used_units) - 2
    with_output = any(num_layers + 1 in units for units in used_units[: layers.stop + 1])
    return WeightShard(
        first=layers.start, end=layers.stop, num_layers=num_layers, with_input=True, with_output=with_output
    )


def own_rounds(plan: StepPlan, rank: int) -> list[int]:
    """The rounds of a step in which a rank has a micro-batch."""
    return [number for number, is_active in enumerate(rounds_of(plan)) if is_active[rank]]


def sync_step(plan: StepPlan, clock: StepClock, problem: str, *, is_changed: bool = False) -> bool:
    """Check that all ranks hold the same plan, and set the clock's zero; ``problem``: what is wrong with this rank's
    model, if anything is. Returns whether on any rank the model ``is_changed``.

    Raises:
        CheckError: plans differ, ranks are at different operations, or a model is not as it was prepared.
    """
    values = [int(plan.digest, 16) - (1 << 63), int(clock.since_start_s() * 1e9), int(is_changed)]
    reports = sync_ranks(clock.world, RankOperation.BEGIN, plan.step, values=values, note=problem)
    reports.check_same()
    clock.align(max(reports.column(1)) / 1e9)
    if any(reports.notes):
        raise CheckError(f"step {plan.step}: {reports.notes_text()}")
    digests = reports.column(0)
    if len(set(digests)) > 1:
        other = next(rank for rank, value in enumerate(digests) if value != digests[0])
        raise CheckError(
            f"step {plan.step}: rank {other} plans {digests[other] + (1 << 63):016x}, rank 0 plans "
            f"{digests[0] + (1 << 63):016x}; the ranks see different data, profiles or versions"
        )
    return any(reports.column(2))
