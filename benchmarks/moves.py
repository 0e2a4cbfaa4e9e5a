"""What `auto` gains by each move, and the bytes that sharded gradients save on real ranks.

    python benchmarks/moves.py --ablation  # simulated: no torch, half an hour of one core with --gpus 64
    python benchmarks/moves.py --plan      # simulated: no torch, ten minutes of one core with --gpus 64
    python benchmarks/moves.py --memory    # two and four ranks, processes of one thread joined by Gloo: a minute

Ablation: the same global batches by all moves, without each and without all, and by tuned `static`. Planned: with
`shard_gradients` none and auto. Counted: what a rank of this library's own Llama keeps of gradients in float32 between
micro-batches, and whole within a backward, beside what plans reckon with.
"""

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import numpy as np

import lengthwise
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ModelSpec, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.gradient_reduction import whole_units
from lengthwise.cost.memory_model import state_parts
from lengthwise.cost.weight_shards import held_params
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.heterogeneous.draft_refinement import DraftRefinement
from lengthwise.session.plan_lengths import TOKENS_PER_DEVICE

MODELS = ("llama-7b", "llama-13b", "llama-32b", "llama-66b")
GIANT = 131_072
CORPORA = ("commoncrawl", "githubcode", "one giant")
MOVES = {
    "hidden updates": {"overlap": 0.0},
    "sharded gradients": {"shard_gradients": "none"},
    "slices": {"slices": "none"},
    "split backwards": {"zero_bubble": "none"},
}
"""Each move and the options without it; ramps are no option."""
ABLATED = ("llama-7b", "llama-13b", "llama-32b")
SPEC = replace(model_preset("llama-mini"), tied_embeddings=False)


def lengths_of(corpus: str, tokens_per_step: int) -> str | np.ndarray:
    """A distribution; or web text with one sequence of ``GIANT`` tokens a step, on average."""
    if corpus != "one giant":
        return corpus
    texts = synthetic_lengths("commoncrawl", 20_000)
    per_step = max(1, round((tokens_per_step - GIANT) / float(texts.mean())))
    return np.insert(texts, np.arange(0, len(texts), per_step), GIANT)


def print_plans(models: list[str], gpus: list[int], corpora: list[str], steps: int) -> None:
    """Seconds of the same steps with and without the move, and CPU seconds of planning them."""
    print(
        "| model | H100s | lengths | whole | sharded | faster by | plans that shard | planning |\n" + "| --- " * 8 + "|"
    )
    for count in gpus:
        tokens = max(int(count * TOKENS_PER_DEVICE), 2 * GIANT)
        for model in models:
            for corpus in corpora:
                row = {}
                for mode in ("none", "auto"):
                    start_s = time.process_time()
                    plans = lengthwise.plan(
                        lengths_of(corpus, tokens), model=model, cluster=f"{count // 8}x8xH100-80GB", steps=steps,
                        tokens_per_step=None if corpus == "githubcode" else tokens, shard_gradients=mode,
                    )  # fmt: skip
                    row[mode] = sum(plan.time_s for plan in plans) / steps, time.process_time() - start_s
                num_sharded = sum(any(p.scheme.shard_gradients for p in plan.pipelines) for plan in plans)
                (whole_s, before_s), (sharded_s, after_s) = row["none"], row["auto"]
                print(
                    f"| {model} | {count} | {corpus} | {whole_s:.3f} s | {sharded_s:.3f} s | "
                    f"**{whole_s / sharded_s:.3f}x** | {num_sharded} of {steps} | {after_s / before_s:.2f}x |",
                    flush=True,
                )


def without_ramps() -> AbstractContextManager[object]:
    """A context in which `auto` tries no ramps."""
    return patch.object(sys.modules[DraftRefinement.__module__], "MOST_RAMPED", 0)


def print_ablation(models: list[str], gpus: list[int], corpora: list[str], steps: int) -> None:
    """How many times as long steps take without each move, without all, and under tuned `static` without all."""
    names = [*(f"without {name}" for name in MOVES), "without ramps", "without all", "static without all"]
    print(f"| model | H100s | lengths | all moves | {' | '.join(names)} |\n" + "| --- " * (4 + len(names)) + "|")
    every = {name: value for options in MOVES.values() for name, value in options.items()}
    ways = [({}, True), *((options, True) for options in MOVES.values()), ({}, False), (every, False)]
    ways += [(every | {"policy": "static"}, False)]
    ratios: list[list[float]] = []
    for count in gpus:
        tokens = max(int(count * TOKENS_PER_DEVICE), 2 * GIANT)
        for model in models:
            for corpus in corpora:
                seconds = []
                for options, has_ramps in ways:
                    with nullcontext() if has_ramps else without_ramps():
                        plans = lengthwise.plan(
                            lengths_of(corpus, tokens), model=model, cluster=f"{count // 8}x8xH100-80GB", steps=steps,
                            tokens_per_step=None if corpus == "githubcode" else tokens,
                            **options,
                        )  # fmt: skip
                    seconds.append(sum(plan.time_s for plan in plans) / steps)
                ratios.append([other_s / seconds[0] for other_s in seconds[1:]])
                cells = " | ".join(f"{ratio:.3f}x" for ratio in ratios[-1])
                print(f"| {model} | {count} | {corpus} | {seconds[0]:.3f} s | {cells} |", flush=True)
    means = [geometric_mean(of_way) for of_way in zip(*ratios)]
    print("| geometric mean | | | | " + " | ".join(f"**{mean:.3f}x**" for mean in means) + " |")


def plan_of(num_ranks: int, *, shards: bool) -> tuple[StepPlan, GlobalBatch]:
    """One pipeline of all ranks with three micro-batches."""
    scheme = uniform_scheme(SPEC.num_layers, degree=num_ranks, method=Method.ULYSSES)
    batch = GlobalBatch(step=0, ids=(0, 1, 2), lengths=(96, 64, 80))
    packs = [Pack(ids=(number,), lengths=(length,)) for number, length in zip(batch.ids, batch.lengths)]
    pipeline = Pipeline(
        ranks=tuple(range(num_ranks)), scheme=replace(scheme, shard_gradients=shards),
        micro_batches=tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs),
    )  # fmt: skip
    return (
        StepPlan(
            step=0, policy="by hand", pipelines=(pipeline,), loss_normaliser=batch.num_targets, update_s=0.0,
            time_s=1.0, lower_bound_s=1.0,
        ),
        batch,
    )  # fmt: skip


class Tokens:
    """Random tokens of the sequences of a batch."""

    def __init__(self, batch: GlobalBatch) -> None:
        self._lengths = dict(zip(batch.ids, batch.lengths))

    def tokens(self, sequence: int) -> np.ndarray:
        """Token ids of one sequence."""
        return np.random.default_rng(sequence).integers(0, SPEC.vocab_size, self._lengths[sequence])


def gradient_bytes_of_rank(num_ranks: int, shards: bool) -> tuple[int, int]:
    """Bytes of gradients that this rank keeps between micro-batches, and most that are whole or on their way."""
    import torch

    from lengthwise.config.optimizer_settings import OptimizerSettings
    from lengthwise.runtime.comm.world import DistContext
    from lengthwise.runtime.models.registry import build_model
    from lengthwise.runtime.state.gradient_shares import GradientShares
    from lengthwise.runtime.state.sharded import ShardedState
    from lengthwise.runtime.train.clock import StepClock
    from lengthwise.runtime.train.execute_step import run_step

    plan, batch = plan_of(num_ranks, shards=shards)
    world = DistContext(
        rank=torch.distributed.get_rank(), size=num_ranks, device=torch.device("cpu"), ranks_per_node=num_ranks
    )
    most, reduce = [0], GradientShares._reduce

    def counted(shares: Any, unit: int, whole: Any) -> None:
        sizes = [whole, *shares._whole.values()]
        under_way = [shares._units[other] for other, _ in shares._under_way]
        present = sum(x.nbytes for x in sizes) + sum(4 * num_ranks * other.share for other in under_way)
        results = whole.nbytes // num_ranks + sum(4 * other.share for other in under_way)
        most.append(present + results)
        reduce(shares, unit, whole)

    state = ShardedState(model := build_model(SPEC, dtype=torch.float32, seed=1), world, OptimizerSettings())
    GradientShares._reduce = counted  # type: ignore[method-assign]
    run_step(plan, model, state, Tokens(batch), lr=1e-3, clip_norm=1.0, clock=StepClock(world))
    GradientShares._reduce = reduce  # type: ignore[method-assign]
    return state.gradients.nbytes, max(most)


def predicted_bytes(spec: ModelSpec, num_ranks: int, *, shards: bool) -> tuple[int, int]:
    """What plans reckon with of the same."""
    scheme = plan_of(num_ranks, shards=shards)[0].pipelines[0].scheme
    parts = state_parts(
        spec, num_devices=num_ranks, dtype="float32", num_held=held_params(spec, scheme, stage=0),
        gradient_shares=num_ranks if shards else 1,
    )  # fmt: skip
    return parts[1], int(4 * max(whole_units(spec, scheme, 0)))


def print_memory() -> None:
    """Counted beside predicted, on the rank that has most."""
    from method_ranks import Ranks

    print("| ranks | gradients | kept: counted, predicted MiB | whole: counted, predicted MiB |\n" + "| --- " * 4 + "|")
    for num_ranks in (2, 4):
        ranks = Ranks(num_ranks)
        for shards in (False, True):
            counted = [max(sizes) for sizes in zip(*ranks.run(gradient_bytes_of_rank, num_ranks, shards))]
            predicted = predicted_bytes(SPEC, num_ranks, shards=shards)
            kept, whole = (f"{a / 2**20:.2f}, {b / 2**20:.2f}" for a, b in zip(counted, predicted))
            print(f"| {num_ranks} | {'sharded' if shards else 'whole'} | {kept} | {whole} |", flush=True)
        ranks.close()


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--models", default=None)
    parser.add_argument("--gpus", default="64,256")
    parser.add_argument("--corpora", default=",".join(CORPORA))
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    gpus, corpora = list(map(int, asked.gpus.split(","))), asked.corpora.split(",")
    if asked.ablation:
        print_ablation(asked.models.split(",") if asked.models else list(ABLATED), gpus, corpora, asked.steps)
    if asked.plan:
        print_plans(asked.models.split(",") if asked.models else list(MODELS), gpus, corpora, asked.steps)
    if asked.memory:
        print_memory()


if __name__ == "__main__":
    main()
