"""Random batches and random plans for them, and what one device computes: the two sides of the exactness tests."""

import random
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.plan import MicroBatch, Pipeline, StepPlan
from lengthwise.core.scheme import WEIGHTS_OF, Method, Scheme, Weights
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.world import World
from lengthwise.runtime.model.base import Transformer
from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.parallel.shards import row_bounds
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.feed import feed
from lengthwise.runtime.train.step import run_step

SPEC = ModelSpec(
    name="test", num_layers=2, hidden_size=12, ffn_size=20, num_heads=4, num_kv_heads=2, head_size=6, vocab_size=37
)
BETAS, EPS, DECAY, LR, CLIP = (0.9, 0.95), 1e-8, 0.1, 1e-2, 0.5


class RandomTokens:
    """Tokens that depend on the sequence alone."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def tokens(self, sequence: int) -> np.ndarray:
        return np.random.default_rng(sequence).integers(0, SPEC.vocab_size, self.lengths[sequence]).astype(np.uint16)


def random_batch(rng: random.Random, step: int) -> GlobalBatch:
    count = rng.randint(1, 12)
    lengths = [1 if rng.random() < 0.1 else rng.randint(1, 30) for _ in range(count)]
    return GlobalBatch(step=step, ids=tuple(range(100 * step, 100 * step + count)), lengths=tuple(lengths))


def random_plan(rng: random.Random, batch: GlobalBatch, num_ranks: int, *, shard_degree: int = 1) -> StepPlan:
    """Any distribution of the sequences: uneven degrees and packs, idle ranks, two phases, padding, recompute, methods.

    With ``shard_degree`` > 1 all pipelines have that degree, on sharded weights.
    """
    groups = random_groups(rng, num_ranks, shard_degree)
    held: list[list[list[int]]] = [[] for _ in groups]
    busy = rng.sample(range(len(groups)), rng.randint(1, len(groups)))
    for position in range(len(batch.ids)):
        packs = held[rng.choice(busy)]
        if packs and rng.random() < 0.6:
            rng.choice(packs).append(position)
        else:
            packs.append([position])
    num_phases = rng.randint(1, 2)
    pipelines = []
    for ranks, packs in zip(groups, held):
        able = methods_of(len(ranks), is_sharded=shard_degree > 1)
        scheme = Scheme(
            degree=len(ranks), stage_layers=(SPEC.num_layers,), recompute=(False,) * SPEC.num_layers,
            methods=tuple(rng.choices(able, k=SPEC.num_layers)), weights=WEIGHTS_OF.get(able[0], Weights.WHOLE),
        )  # fmt: skip
        micro_batches = [random_micro_batch(rng, batch, positions, able) for positions in packs]
        cut = rng.randrange(len(micro_batches) + 1) if num_phases > 1 else len(micro_batches)
        for phase, part in enumerate((micro_batches[:cut], micro_batches[cut:])[:num_phases]):
            pipelines.append(Pipeline(ranks=ranks, scheme=scheme, micro_batches=tuple(part), phase=phase))
    plan = StepPlan(
        step=batch.step, policy="random", pipelines=tuple(pipelines), loss_normaliser=max(1, batch.num_targets),
        update_s=0.0, time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip
    plan.check_covers(batch)
    return plan


def random_groups(rng: random.Random, num_ranks: int, shard_degree: int) -> list[tuple[int, ...]]:
    """Neighbouring ranks, of any number where weights are whole."""
    groups: list[tuple[int, ...]] = []
    while (first := sum(map(len, groups))) < num_ranks:
        size = shard_degree if shard_degree > 1 else rng.randint(1, num_ranks - first)
        groups.append(tuple(range(first, first + size)))
    return groups


def methods_of(degree: int, *, is_sharded: bool) -> list[Method]:
    """Those that can share the test's model among ``degree`` ranks."""
    if degree == 1:
        return [Method.DENSE]
    wanted = Weights.SHARDED if is_sharded else Weights.WHOLE
    too_few_heads = {Method.MEGATRON_TS} if degree > SPEC.num_kv_heads else set()
    return [method for method, weights in WEIGHTS_OF.items() if weights is wanted and method not in too_few_heads]


def random_micro_batch(rng: random.Random, batch: GlobalBatch, positions: list[int], able: list[Method]) -> MicroBatch:
    lengths = tuple(batch.lengths[i] for i in positions)
    padded_to = max(lengths) + rng.randint(0, 3) if rng.random() < 0.3 else 0
    return MicroBatch(
        pack=Pack(ids=tuple(batch.ids[i] for i in positions), lengths=lengths, padded_to=padded_to),
        time_s=1.0,
        peak_bytes=1,
        methods=tuple(rng.choices(able, k=SPEC.num_layers)) if rng.random() < 0.5 else None,
        recompute=tuple(rng.random() < 0.5 for _ in range(SPEC.num_layers)) if rng.random() < 0.5 else None,
    )


def local_world() -> World:
    """The world of the rank pool this runs in."""
    size = dist.get_world_size()
    return World(rank=dist.get_rank(), size=size, device=torch.device("cpu"), mesh=init_device_mesh("cpu", (size,)))


def new_state(world: World, dtype: torch.dtype, shard_degree: int = 1) -> tuple[Transformer, ShardedState]:
    model = build_model(SPEC, dtype=dtype, seed=1)
    rows = partial(row_bounds, spec=SPEC, degree=shard_degree) if shard_degree > 1 else None
    state = ShardedState(model, world, betas=BETAS, eps=EPS, weight_decay=DECAY, degree=shard_degree, row_bounds=rows)
    return model, state


def master_weights(state: ShardedState) -> torch.Tensor:
    """All of them, on every rank."""
    shards = [None] * state.world.size
    dist.all_gather_object(shards, state.owned()["master"])
    return torch.cat(shards)


def train_on_ranks(
    seed: int, num_steps: int, dtype: torch.dtype, shard_degree: int = 1
) -> tuple[list[float], torch.Tensor]:
    """Losses and final whole weights after random plans on the pool's ranks."""
    rng = random.Random(seed)
    world = local_world()
    model, state = new_state(world, dtype, shard_degree)
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        plan = random_plan(rng, batch, world.size, shard_degree=shard_degree)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        result = run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(world))
        losses.append(result.loss)
    return losses, master_weights(state)


def train_on_one_device(
    seed: int, num_steps: int, num_ranks: int, shard_degree: int = 1
) -> tuple[list[float], torch.Tensor]:
    """The same batches by plain PyTorch: one whole batch at a time, autograd, clip_grad_norm_, AdamW."""
    rng = random.Random(seed)
    model = build_model(SPEC, dtype=torch.float64, seed=1)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        random_plan(rng, batch, num_ranks, shard_degree=shard_degree)  # draws what the ranks draw
        loss = whole_batch_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_batch_loss(model: torch.nn.Module, batch: GlobalBatch) -> torch.Tensor:
    """Mean loss over all targets, sequences laid end to end in one forward."""
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    fed = feed(source, Pack(ids=batch.ids, lengths=batch.lengths), torch.device("cpu"))
    return model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / max(1, batch.num_targets)
