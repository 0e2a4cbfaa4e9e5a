"""The memory ladder under a limit of the process' memory: how long a sequence an 8-layer Llama trains, measured.

    python benchmarks/memory_limit.py [--ranks 1,2]

Sides: everything kept, every layer recomputed, and recomputed in tiles of tokens and groups of heads. After a short
step, so that optimizer and buffers are there, the address space of every process is limited (RLIMIT_AS) to what it has
then and a budget. Each length is tried in processes of its own: a step that is refused memory fails. Losses are in
chunks on all sides. Offload is not among them: where the device is a CPU its memory is the host's.
"""

import argparse
import os
import resource
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from method_ranks import RankError, Ranks
from pages import Goal, Section, at_least, write

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step

SPEC = ModelSpec(
    name="llama of 8 layers", num_layers=8, hidden_size=128, ffn_size=512, num_heads=8, num_kv_heads=8, head_size=16,
    vocab_size=512,
)  # fmt: skip
SIDES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": True},
    "recompute, tiles, groups of heads": {"recompute": True, "tile_tokens": 64, "head_groups": 8},
}
KEEP, *_, LADDER = SIDES
SHORT = 64
BUDGETS_MIB = {1: 64, 2: 112}
"""Of each process beyond what it has after a short step, by number of ranks."""


class Tokens:
    """Random tokens of sequences whose ids are their lengths."""

    def tokens(self, sequence: int) -> np.ndarray:
        """Token ids of one sequence."""
        return np.random.default_rng(sequence).integers(0, SPEC.vocab_size, sequence)


def plan_of(length: int, num_ranks: int, *, recompute: bool = False, **rungs: Any) -> StepPlan:
    """All ranks share one sequence, which is called by its length."""
    method = Method.ULYSSES if num_ranks > 1 else Method.DENSE
    if "head_groups" in rungs:
        rungs["head_groups"] = SPEC.num_heads // num_ranks  # one head of a rank at a time
    scheme = PipelineConfig(
        degree=num_ranks, stage_layers=(SPEC.num_layers,), methods=(method,) * SPEC.num_layers,
        recompute=(recompute,) * SPEC.num_layers, **rungs,
    )  # fmt: skip
    micro_batch = PlannedMicroBatch(pack=Pack(ids=(length,), lengths=(length,)), time_s=1.0, peak_bytes=1)
    pipeline = Pipeline(ranks=tuple(range(num_ranks)), scheme=scheme, micro_batches=(micro_batch,))
    return StepPlan(
        step=0, policy="ladder", pipelines=(pipeline,), loss_normaliser=length - 1, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0, num_devices=num_ranks,
    )  # fmt: skip


def train(side: str, length: int, budget_bytes: int) -> tuple[float, float]:
    """Loss and seconds of a step of a sequence of ``length`` tokens within ``budget_bytes`` of this process."""
    torch.set_num_threads(1)
    world = DistContext(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    model = build_model(SPEC, dtype=torch.float32, seed=1)
    state = ShardedState(model, world, OptimizerSettings())
    step = partial(run_step, model=model, state=state, source=Tokens(), lr=0.0, clip_norm=1.0)
    step(plan_of(SHORT, world.size, **SIDES[side]), clock=StepClock(world))
    with open("/proc/self/statm") as fields:
        size = int(fields.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + budget_bytes, resource.RLIM_INFINITY))
    start_s = time.perf_counter()
    result = step(plan_of(length, world.size, **SIDES[side]), clock=StepClock(world))
    return result.loss, time.perf_counter() - start_s


def attempt(side: str, length: int, num_ranks: int, budget_bytes: int) -> tuple[float, float] | None:
    """Loss and seconds of a step, or None: there was no memory for it."""
    ranks = Ranks(num_ranks)
    try:
        outcome: tuple[float, float] = ranks.run(train, side, length, budget_bytes)[0]
    except RankError as error:
        if not any(words in str(error) for words in ("memory", "alloc", "Connection", "closed", "reset", "died")):
            raise
        return None
    finally:
        ranks.close()
    return outcome


def longest(side: str, num_ranks: int, budget_bytes: int, *, first: int) -> tuple[int, float, float]:
    """The longest sequence that fits, in steps of an eighth of a power of two, its loss and its seconds.

    Of the whole ladder, only ``first`` is tried: longer ones would take minutes each.
    """
    length, best = first, (0, 0.0, 0.0)
    while (outcome := attempt(side, length, num_ranks, budget_bytes)) is not None:
        best = (length, *outcome)
        print(side, num_ranks, *best, flush=True)
        if side == LADDER:
            break
        length += 1 << max(0, length.bit_length() - 4)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    rows, goals = [], []
    for num_ranks in map(int, options.ranks.split(",")):
        lengths: dict[str, int] = {}
        for side in SIDES:
            first = 576 * num_ranks if side == KEEP else 3 * lengths[KEEP] if side != LADDER else 8 * lengths[KEEP]
            lengths[side], loss, seconds = longest(side, num_ranks, BUDGETS_MIB[num_ranks] << 20, first=first)
            ratio = lengths[side] / lengths[KEEP]
            cells = (f"{lengths[side]:,}", f"{ratio:.1f}x", f"{loss:.4f}", f"{seconds:.1f} s")
            rows.append(
                (
                    f"{num_ranks}, {BUDGETS_MIB[num_ranks]} MiB",
                    side,
                    *(cells if lengths[side] else ("fewer than tried",) + ("-",) * 3),
                )
            )
        goals.append(at_least(f"longer with the ladder, ranks: {num_ranks}", lengths[LADDER] / lengths[KEEP], 8, "x"))
    write_page(rows, goals)


def write_page(rows: list[tuple[str, ...]], goals: list[Goal]) -> None:
    """Write the page of the longest sequences within the budgets."""
    write(
        "memory_limit",
        title="The memory ladder under a limit",
        first=(
            f"Measured: the longest sequence that an 8-layer Llama (hidden size {SPEC.hidden_size}, feed-forward "
            f"{SPEC.ffn_size}) trains in float32 when every process may have 64 MiB (one rank) or 112 MiB (two) of "
            "address space beyond what it has after a short step (RLIMIT_AS), on CPU ranks of one thread. Each length "
            "is tried by itself, in steps of a sixteenth to an eighth. Two ranks share each sequence by ulysses, with "
            "losses in chunks on all sides."
        ),
        sections=[
            Section(
                title="The longest sequence",
                text=(
                    "Seconds are of the step at that length; attention grows with its square. The ladder is recompute "
                    "in tiles of 64 tokens and one head of a rank at a time; beyond 8 times it was not tried."
                ),
                head=("ranks, budget", "side", "tokens", "of keep", "loss", "seconds"),
                rows=rows,
                goals=tuple(goals),
                measured=("tokens", "of keep", "loss", "seconds"),
            )
        ],
    )


if __name__ == "__main__":
    main()
