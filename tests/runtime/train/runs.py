"""Random batches and random plans for them, and what one device computes: the two sides of the exactness tests."""

import random
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, PlannedMicroBatch, StepPlan
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.optimizer import OptimizerSettings
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step
from lengthwise.runtime.train.micro_batch_tensors import feed

SPEC = ModelSpec(
    name="test", num_layers=4, hidden_size=12, ffn_size=20, num_heads=4, num_kv_heads=2, head_size=6, vocab_size=37
)
SETTINGS, LR, CLIP = OptimizerSettings(), 1e-2, 0.5


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


def random_plan(rng: random.Random, batch: GlobalBatch, num_ranks: int) -> StepPlan:
    """Any distribution of the sequences over any strategy.

    Uneven degrees, stages and packs, ranks in any order, idle pipelines, two phases, padding, recompute, methods.
    """
    schemes = [
        (phase, ranks, scheme)
        for phase in range(rng.randint(1, 2))
        for ranks, scheme in random_strategy(rng, num_ranks)
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
            micro_batches=tuple(random_micro_batch(rng, batch, positions, scheme) for positions in packs),
        )
        for (phase, ranks, scheme), packs in zip(schemes, held)
    ]  # fmt: skip
    plan = StepPlan(
        step=batch.step, policy="random", pipelines=tuple(pipelines), loss_normaliser=max(1, batch.num_targets),
        update_s=0.0, time_s=1.0, lower_bound_s=1.0,
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
        )
        found.append((tuple(free[: scheme.num_devices]), scheme))
        free = free[scheme.num_devices :]
    return found


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
    return PlannedMicroBatch(
        pack=Pack(ids=ids, lengths=lengths, padded_to=padded_to, rows=rows, filler=filler),
        time_s=1.0,
        peak_bytes=1,
        methods=tuple(rng.choices(able, k=SPEC.num_layers)) if rng.random() < 0.5 else None,
        recompute=tuple(rng.random() < 0.5 for _ in range(SPEC.num_layers)) if rng.random() < 0.5 else None,
    )


@cache
def local_world() -> DistContext:
    """The world of the rank pool this runs in. Tests share its groups: the threads of each wake up all the time."""
    size = dist.get_world_size()
    return DistContext(rank=dist.get_rank(), size=size, device=torch.device("cpu"))


def new_state(
    world: DistContext, dtype: torch.dtype, *, spec: ModelSpec = SPEC, settings: OptimizerSettings = SETTINGS
) -> tuple[Transformer, ShardedState]:
    model = build_model(spec, dtype=dtype, seed=1)
    return model, ShardedState(model, world, settings)


def master_weights(state: ShardedState) -> dict[str, torch.Tensor]:
    """All master weights, from all ranks, by parameter."""
    whole = torch.zeros(state.table.num_elements, dtype=torch.float64)
    at = 0
    for start, end in state.owned_layout.intervals[state.world.rank]:
        whole[start:end] = state.master[at : at + end - start]
        at += end - start
    dist.all_reduce(whole)
    return {name: whole[slice(*slot.interval)].view(slot.shape) for name, slot in state.table.slots.items()}


def train_on_ranks(
    seed: int, num_steps: int, dtype: torch.dtype, settings: OptimizerSettings = SETTINGS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final master weights of training with a new random plan at every step."""
    rng = random.Random(seed)
    world = local_world()
    model, state = new_state(world, dtype, settings=settings)
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        plan = random_plan(rng, batch, world.size)
        source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
        result = run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=StepClock(world))
        losses.append(result.loss)
    return losses, master_weights(state)


def train_on_one_device(
    seed: int,
    num_steps: int,
    num_ranks: int,
    settings: OptimizerSettings = SETTINGS,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by torch alone: a whole batch a step, torch's optimizer and clipping, masters of 32 bits or more."""
    rng = random.Random(seed)
    model = build_model(SPEC, dtype=dtype, seed=1)
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(w.detach().to(torch.promote_types(dtype, torch.float32))) for w in weights]
    optimizer = settings.make([p for p in masters if p.ndim > 1], [p for p in masters if p.ndim == 1])
    losses = []
    for step in range(num_steps):
        batch = random_batch(rng, step)
        random_plan(rng, batch, num_ranks)  # draws what the ranks draw
        loss = whole_batch_loss(model, batch)
        for gradient, master in zip(torch.autograd.grad(loss, weights), masters):
            master.grad = gradient.to(master.dtype)
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters):
                weight.copy_(master)
        losses.append(loss.item())
    return losses, {name: p.detach().double() for (name, _), p in zip(model.named_parameters(), masters)}


def whole_batch_loss(model: torch.nn.Module, batch: GlobalBatch) -> torch.Tensor:
    """Mean loss over all targets, sequences laid end to end in one forward."""
    source = RandomTokens(dict(zip(batch.ids, batch.lengths)))
    fed = feed(source, Pack(ids=batch.ids, lengths=batch.lengths), torch.device("cpu"))
    return model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / max(1, batch.num_targets)
