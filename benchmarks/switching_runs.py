"""What the benchmark of switching runs on its ranks: steps under a pool of strategies, a checkpoint and a resume."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.runtime.comm.world import DistContext, start_world
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step, sync_step

RANKS = 4
SPEC = ModelSpec(
    name="switching", num_layers=4, hidden_size=256, ffn_size=768, num_heads=8, num_kv_heads=4, head_size=32,
    vocab_size=4096,
)  # fmt: skip
TOKENS, LONGEST = 1024, 256
"""Of a step, and of a sequence: enough sequences for every pipeline to have one."""
LR, CLIP = 1e-4, 1.0


class Tokens:
    """Token values that depend on the sequence alone."""

    def __init__(self, batch: GlobalBatch, vocab_size: int) -> None:
        self._lengths, self._vocab_size = dict(zip(batch.ids, batch.lengths)), vocab_size

    def tokens(self, sequence: int) -> np.ndarray:
        """Of one sequence."""
        return np.random.default_rng(sequence).integers(0, self._vocab_size, self._lengths[sequence])


class PatientState(ShardedState):
    """A state that can be told not to overlap: every weight is there before the first forward, and gradients are pushed
    after the last backward."""

    waits = False

    def pull(self) -> None:
        """Set the weights going, and stay for them if ``waits``."""
        super().pull()
        for unit in range(self.table.num_units if self.waits else 0):
            self.need(unit)

    def push_from(self, unit: int) -> None:
        """Of the first unit alone, which is told at the end, if ``waits``."""
        if unit == 0 or not self.waits:
            super().push_from(unit)


def _several(count: int, scheme: PipelineConfig) -> tuple[PipelineConfig, ...]:
    return (scheme,) * count


def _pool() -> dict[str, tuple[PipelineConfig, ...]]:
    layers = SPEC.num_layers
    one = uniform_scheme(layers)
    two = uniform_scheme(layers, degree=2, method=Method.MEGATRON_TS)
    a_method_per_layer = PipelineConfig(
        degree=4,
        stage_layers=(layers,),
        methods=(Method.MEGATRON_TS, Method.ULYSSES_Z, Method.MEGATRON_CZ, Method.METP),
        recompute=(False,) * layers,
        weights=WeightPlacement.SHARDED,
    )
    return {
        "<4,1> sharded, a method per layer": (a_method_per_layer,),
        "<4,1> whole, ulysses": (uniform_scheme(layers, degree=4, method=Method.ULYSSES),),
        "2 x <2,1> whole, ulysses": _several(2, uniform_scheme(layers, degree=2, method=Method.ULYSSES)),
        "2 x <2,1> sharded, megatron_ts": _several(2, two),
        "4 x <1,1>": _several(4, one),
        "<2,2> sharded, megatron_ts": (uniform_scheme(layers, degree=2, stages=2, method=Method.MEGATRON_TS),),
        "2 x <1,2>": _several(2, uniform_scheme(layers, stages=2)),
        "<2,1> sharded + 2 x <1,1>": (two, one, one),
        "<1,4>": (uniform_scheme(layers, stages=4),),
    }


POOL = _pool()
HOMOGENEOUS, HETEROGENEOUS = "2 x <2,1> whole, ulysses", "<2,1> sharded + 2 x <1,1>"


def batch_of(step: int, *, seed: int) -> GlobalBatch:
    """Lengths like CommonCrawl's, cut at ``LONGEST``, of ``TOKENS`` in all; they depend on ``seed`` alone."""
    lengths: list[int] = []
    for length in np.minimum(synthetic_lengths("commoncrawl", 1 + TOKENS, seed)[1:], LONGEST).tolist():
        lengths.append(min(length, TOKENS - sum(lengths)))
        if sum(lengths) == TOKENS:
            break
    return GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths))


def plan_of(name: str, step: int, *, seed: int) -> StepPlan:
    """The longest sequence first to the pipeline with the fewest tokens per rank; two packs per stage, or one pack."""
    batch, schemes = batch_of(step, seed=seed), POOL[name]
    order = sorted(range(len(batch.ids)), key=lambda at: -batch.lengths[at])
    pipelines, first = [], 0
    for scheme, held in zip(schemes, _deal(batch, order, [scheme.num_devices for scheme in schemes])):
        packs = _deal(batch, held, [1] * (2 * scheme.num_stages if scheme.num_stages > 1 else 1))
        pipelines.append(
            Pipeline(
                ranks=tuple(range(first, first + scheme.num_devices)),
                scheme=scheme,
                micro_batches=tuple(_micro_batch(batch, pack) for pack in packs if pack),
            )
        )
        first += scheme.num_devices
    plan = StepPlan(
        step=step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip
    plan.check_covers(batch)
    return plan


def _deal(batch: GlobalBatch, order: Sequence[int], weights: Sequence[int]) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in weights]
    loads = [0.0] * len(weights)
    for position in order:
        least = loads.index(min(loads))
        held[least].append(position)
        loads[least] += batch.lengths[position] / weights[least]
    return held


def _micro_batch(batch: GlobalBatch, positions: Sequence[int]) -> PlannedMicroBatch:
    pack = Pack(ids=tuple(batch.ids[i] for i in positions), lengths=tuple(batch.lengths[i] for i in positions))
    return PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1)


def random_order(rounds: int, *, seed: int) -> list[str]:
    """Every strategy of the pool once per round, in random order, none right after itself."""
    rng, order = random.Random(seed), [""]
    for _ in range(rounds):
        names = rng.sample([*POOL], len(POOL))
        while names[0] == order[-1]:
            rng.shuffle(names)
        order += names
    return order[1:]


@cache
def world() -> DistContext:
    """All ranks."""
    return start_world("cpu")


@cache
def trained() -> tuple[Transformer, PatientState]:
    """The model and its state, made once per process."""
    model = build_model(SPEC, seed=0)
    return model, PatientState(model, world(), OptimizerSettings())


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One step on one rank."""

    time_s: float
    """From the moment all ranks begin to this rank's end."""
    processor_s: float
    """Of all threads of this rank."""
    pulled: int
    """Bytes that this rank sent in pulls."""
    pushed: int
    timeline: Timeline


def one_step(plan: StepPlan, *, seed: int, waits: bool = False) -> Ran:
    """Train one step and note time and bytes."""
    model, state = trained()
    source = Tokens(batch_of(plan.step, seed=seed), SPEC.vocab_size)
    state.waits = waits
    state.sent.clear()
    dist.barrier()
    start_s, processor_s = perf_counter(), process_time()
    clock = StepClock(world())
    sync_step(plan, world(), clock, stop=False)
    run_step(plan, model, state, source, lr=LR, clip_norm=CLIP, clock=clock)
    return Ran(
        time_s=perf_counter() - start_s,
        processor_s=process_time() - processor_s,
        pulled=int(state.sent.num_bytes["pull"]),
        pushed=int(state.sent.num_bytes["push"]),
        timeline=clock.timeline(plan.step),
    )


def visits(order: Sequence[str], *, repeats: int, seed: int) -> list[list[Ran]]:
    """Of each strategy in ``order``, so many steps one after another on the same sequences."""
    return [
        [one_step(plan_of(name, repeat, seed=seed + number), seed=seed + number) for repeat in range(repeats)]
        for number, name in enumerate(order)
    ]


def overlap_round(modes: Sequence[tuple[str, bool]], *, seed: int) -> list[Ran]:
    """One step of each (strategy, whether to wait), right after another one under it."""
    found = []
    for name, waits in modes:
        one_step(plan_of(name, 0, seed=seed), seed=seed, waits=waits)
        found.append(one_step(plan_of(name, 1, seed=seed), seed=seed, waits=waits))
    return found


def save_checkpoint(folder: str) -> float:
    """Seconds to write everything."""
    start_s = perf_counter()
    checkpoint.save(Path(folder), trained()[1], {"step": 1}, keep=1)
    return perf_counter() - start_s


def resume(folder: str, name: str) -> dict[str, Any]:
    """Seconds to build the model and its state, to load the checkpoint, and of the first step under a strategy."""
    start_s = perf_counter()
    _, state = trained()
    built_s = perf_counter()
    checkpoint.load(checkpoint.latest(Path(folder)), state)
    loaded_s = perf_counter()
    step = one_step(plan_of(name, 1, seed=0), seed=0)
    return {"build": built_s - start_s, "load": loaded_s - built_s, "first step": step.time_s}


def ready() -> int:
    """Whether this process answers."""
    return world().rank
