"""Random batches and random plans for them; no torch."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch, Pack
from lengthwise.core.pipeline_config import (
    HEAD_GROUP_METHODS,
    SLICE_METHODS,
    SPLIT_BACKWARD_METHODS,
    WEIGHTS_OF,
    Method,
    PipelineConfig,
    WeightPlacement,
)
from lengthwise.core.planned_micro_batch import PlannedMicroBatch, PlannedSlice
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.token_placement import Piece, Placement

SPEC = ModelSpec(
    name="test", num_layers=4, hidden_size=12, ffn_size=20, num_heads=4, num_kv_heads=2, head_size=6, vocab_size=37
)


def random_batch(rng: random.Random, step: int) -> GlobalBatch:
    count = rng.randint(1, 12)
    lengths = [1 if rng.random() < 0.1 else rng.randint(1, 30) for _ in range(count)]
    return GlobalBatch(step=step, ids=tuple(range(100 * step, 100 * step + count)), lengths=tuple(lengths))


def random_plan(rng: random.Random, batch: GlobalBatch, num_ranks: int) -> StepPlan:
    """Any distribution of the sequences over any strategy.

    Uneven degrees, stages and packs, ranks in any order, idle pipelines and ranks, two phases, padding, recompute,
    methods, slices, sequences on some ranks of a stage.
    """
    leaves_idle = random.Random(batch.step)
    schemes = [
        (phase, ranks, scheme)
        for phase in range(rng.randint(1, 2))
        for ranks, scheme in random_strategy(rng, num_ranks - (leaves_idle.random() < 0.3 and num_ranks > 1))
    ]
    held: list[list[list[int]]] = [[] for _ in schemes]
    busy = rng.sample(range(len(schemes)), rng.randint(1, len(schemes)))
    for position in range(len(batch.ids)):
        packs = held[rng.choice(busy)]
        if packs and rng.random() < 0.6:
            rng.choice(packs).append(position)
        else:
            packs.append([position])
    pipelines = [
        Pipeline(
            ranks=ranks, scheme=scheme, phase=phase,
            micro_batches=tuple(
                cut_or_placed(batch, random_micro_batch(rng, batch, positions, scheme), scheme) for positions in packs
            ),
        )
        for (phase, ranks, scheme), packs in zip(schemes, held)
    ]  # fmt: skip
    plan = StepPlan(
        step=batch.step, policy="random", pipelines=tuple(pipelines), loss_normaliser=max(1, batch.num_targets),
        update_s=0.0, time_s=1.0, lower_bound_s=1.0, num_devices=num_ranks,
    )  # fmt: skip
    plan.check_covers(batch)
    return plan


def random_strategy(rng: random.Random, num_ranks: int) -> list[tuple[tuple[int, ...], PipelineConfig]]:
    """Pipelines of any degree up to 4 and any number of stages, on ranks in any order."""
    free = list(range(num_ranks))
    if rng.random() < 0.5:
        rng.shuffle(free)
    found = []
    while free:
        degree = rng.randint(1, min(4, len(free)))
        stages = rng.randint(1, min(SPEC.num_layers, len(free) // degree))
        cuts = sorted(rng.sample(range(1, SPEC.num_layers), stages - 1))
        able = methods_of(degree, is_sharded=rng.random() < 0.5)
        scheme = PipelineConfig(
            degree=degree,
            stage_layers=tuple(b - a for a, b in zip([0, *cuts], [*cuts, SPEC.num_layers])),
            recompute=(False,) * SPEC.num_layers,
            methods=tuple(rng.choices(able, k=SPEC.num_layers)),
            weights=WEIGHTS_OF.get(able[0], WeightPlacement.WHOLE),
            shard_gradients=can_share_gradients(degree, able) and random.Random(str(free)).random() < 0.5,
        )
        if can_split_backwards(scheme) and random.Random(f"{free} {stages}").random() < 0.5:
            scheme = replace(scheme, zero_bubble=True)
        found.append((tuple(free[: scheme.num_devices]), scheme))
        free = free[scheme.num_devices :]
    return found


def can_share_gradients(degree: int, methods: list[Method]) -> bool:
    return degree > 1 and WEIGHTS_OF[methods[0]] is WeightPlacement.WHOLE


def can_split_backwards(scheme: PipelineConfig) -> bool:
    is_able = SPLIT_BACKWARD_METHODS.issuperset(scheme.methods)
    return scheme.num_stages > 1 and is_able and not scheme.shard_gradients


def methods_of(degree: int, *, is_sharded: bool) -> list[Method]:
    """Those that can share the test's model among ``degree`` ranks."""
    if degree == 1:
        return [Method.DENSE]
    wanted = WeightPlacement.SHARDED if is_sharded else WeightPlacement.WHOLE
    too_few_heads = {Method.MEGATRON_TS} if degree > SPEC.num_kv_heads else set()
    return [method for method, weights in WEIGHTS_OF.items() if weights is wanted and method not in too_few_heads]


def random_micro_batch(
    rng: random.Random, batch: GlobalBatch, positions: list[int], scheme: PipelineConfig
) -> PlannedMicroBatch:
    able = methods_of(scheme.degree, is_sharded=scheme.weights is WeightPlacement.SHARDED)
    lengths = tuple(batch.lengths[i] for i in positions)
    padded_to = max(lengths) + rng.randint(0, 3) if rng.random() < 0.3 else 0
    rows = len(lengths) + rng.randint(0, 2) if padded_to and rng.random() < 0.5 else 0
    filler = rng.randint(1, 40) if rng.random() < 0.3 else 0
    ids = tuple(batch.ids[i] for i in positions)
    ladder = random.Random(sum(ids))
    methods = tuple(rng.choices(able, k=SPEC.num_layers)) if rng.random() < 0.5 else None
    groups = ladder.choice((None, 1, 2)) if HEAD_GROUP_METHODS & set(methods or scheme.methods) else None
    micro_batch = PlannedMicroBatch(
        pack=Pack(ids=ids, lengths=lengths, padded_to=padded_to, rows=rows, filler=filler),
        time_s=1.0,
        peak_bytes=1,
        methods=methods,
        recompute=tuple(rng.random() < 0.5 for _ in range(SPEC.num_layers)) if rng.random() < 0.5 else None,
        offload=tuple(ladder.random() < 0.4 for _ in range(SPEC.num_layers)) if ladder.random() < 0.5 else None,
        tile_tokens=ladder.choice((None, 0, 3)),
        head_groups=groups if groups is None or groups <= -(-SPEC.num_heads // scheme.degree) else None,
    )
    if not scheme.zero_bubble:
        return micro_batch
    time_s = 1.0 + ladder.random() * micro_batch.pack.num_tokens
    weights_s = time_s * ladder.choice((0.0, 0.1, 1 / 3))
    return replace(micro_batch, time_s=time_s, weights_s=weights_s, offload=None, tile_tokens=None, head_groups=None)


def cut_or_placed(batch: GlobalBatch, micro_batch: PlannedMicroBatch, scheme: PipelineConfig) -> PlannedMicroBatch:
    return maybe_placed(batch, maybe_sliced(batch, micro_batch, scheme), scheme)


def maybe_sliced(batch: GlobalBatch, micro_batch: PlannedMicroBatch, scheme: PipelineConfig) -> PlannedMicroBatch:
    """The micro-batch cut anywhere into any number of slices, half of the time that model and methods can."""
    rng, num_tokens = random.Random(f"{micro_batch.pack.ids} {batch.step}"), micro_batch.pack.num_tokens
    is_able = batch.objective == NEXT_TOKEN and SLICE_METHODS.issuperset(micro_batch.methods or scheme.methods)
    if not is_able or scheme.zero_bubble or scheme.shard_gradients or num_tokens == 1 or rng.random() < 0.5:
        return micro_batch
    cuts = [0, *sorted(rng.sample(range(1, num_tokens), rng.randint(1, min(5, num_tokens - 1)))), num_tokens]
    slices = tuple(PlannedSlice(end - start, rng.random()) for start, end in pairwise(cuts))
    return replace(micro_batch, slices=slices, head_groups=None)


def maybe_placed(batch: GlobalBatch, micro_batch: PlannedMicroBatch, scheme: PipelineConfig) -> PlannedMicroBatch:
    """The micro-batch with some of its sequences on one rank or in pieces on any, half of the time that ranks share."""
    rng = random.Random(f"placed {micro_batch.pack.ids} {batch.step}")
    if scheme.degree == 1 or micro_batch.slices or micro_batch.pack.padded_to or rng.random() < 0.5:
        return micro_batch
    lengths = micro_batch.pack.computed_lengths
    return replace(micro_batch, placement=random_placement(rng, lengths, scheme.degree))


def random_placement(rng: random.Random, lengths: Sequence[int], degree: int) -> Placement:
    """Of each sequence all on one rank, in pieces on any, or in equal parts on all."""
    placement = list[tuple[Piece, ...]]()
    for length in lengths:
        cuts = [0, *sorted(rng.sample(range(1, length), min(length - 1, rng.choice((0, 0, 1, 3))))), length]
        pieces = tuple(Piece(rng.randrange(degree), end - start) for start, end in pairwise(cuts))
        placement.append(() if rng.random() < 0.3 else pieces)
    return tuple(placement)
