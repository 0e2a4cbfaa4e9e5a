"""Training steps of a Llama on one GPU, beside what dry runs, the memory model and costs say of the same steps.

python benchmarks/gpu_steps.py --out FILE            # on a machine with a GPU; a JSON line for every case
python benchmarks/gpu_steps.py --small --out FILE    # a tiny model on any device, to see that the script works
"""

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import Pack
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.pipeline_config import Method, PipelineConfig, spread
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ModelSpec, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.comm.world import start_world, stop_world
from lengthwise.runtime.dryrun.engine_step import PlannedTokens
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_step

NUM_LAYERS, STEPS = 4, 2
MARGIN = 0.06
"""Of a device's memory, what plans leave for fragmentation and workspaces: the default of ``plan.memory_margin``."""
ALLOCATORS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two micro-batches of so many sequences of one length, and what becomes of activations."""

    length: int
    count: int = 4
    method: Method = Method.DENSE
    recomputed: int = 0
    keep_attention: bool = False
    offloaded: int = 0
    tile_tokens: int = 0
    head_groups: int = 1

    def scheme(self, num_layers: int) -> PipelineConfig:
        """One rank, one stage."""
        return PipelineConfig(
            degree=1, stage_layers=(num_layers,), methods=(self.method,) * num_layers,
            recompute=spread(self.recomputed, num_layers), offload=spread(self.offloaded, num_layers),
            keep_attention=self.keep_attention, tile_tokens=self.tile_tokens, head_groups=self.head_groups,
        )  # fmt: skip

    def plan(self, num_layers: int) -> StepPlan:
        """A step of these micro-batches, whose seconds nobody asks for."""
        micro_batches = []
        for number in range(2):
            ids = tuple(range(number * self.count, (number + 1) * self.count))
            pack = Pack(ids=ids, lengths=(self.length,) * self.count)
            micro_batches.append(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1))
        pipeline = Pipeline(ranks=(0,), scheme=self.scheme(num_layers), micro_batches=tuple(micro_batches))
        return StepPlan(
            step=0, policy="static", pipelines=(pipeline,), loss_normaliser=2 * self.length * self.count,
            update_s=0.0, time_s=1.0, lower_bound_s=1.0,
        )  # fmt: skip


CASES = (
    Case(length=512, count=8),
    Case(length=4096),
    Case(length=16_384),
    Case(length=16_384, recomputed=NUM_LAYERS),
    Case(length=16_384, recomputed=NUM_LAYERS, keep_attention=True),
    Case(length=16_384, recomputed=NUM_LAYERS // 2),
    Case(length=16_384, offloaded=NUM_LAYERS),
    Case(length=16_384, tile_tokens=4096),
    Case(length=16_384, recomputed=NUM_LAYERS, offloaded=NUM_LAYERS, tile_tokens=4096),
    Case(length=4096, offloaded=NUM_LAYERS),
    Case(length=65_536, count=1),
    Case(length=65_536, count=1, recomputed=NUM_LAYERS),
    Case(length=65_536, count=1, recomputed=NUM_LAYERS, head_groups=4),
    Case(length=65_536, count=1, recomputed=NUM_LAYERS, offloaded=NUM_LAYERS, tile_tokens=4096),
)


def model_of(*, small: bool) -> ModelSpec:
    """Four layers of llama-7b."""
    spec = replace(model_preset("llama-7b"), num_layers=NUM_LAYERS)
    if not small:
        return spec
    return replace(spec, hidden_size=64, ffn_size=128, num_heads=4, num_kv_heads=4, head_size=16, vocab_size=256)


@contextmanager
def waits_of(device: torch.device) -> Iterator[Counter[str]]:
    """Lines of code at which the host waited for the device, as torch warns of them, and how often."""
    lines: Counter[str] = Counter()
    if device.type != "cuda":
        yield lines
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            lines[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


class Steps:
    """Steps of one model, case by case."""

    def __init__(self, *, small: bool) -> None:
        self.spec, self.world = model_of(small=small), start_world()
        self.model: Transformer = build_model(self.spec, dtype=torch.bfloat16, device=self.world.device, seed=0)
        self.state = ShardedState(self.model, self.world, OptimizerSettings())

    def run(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        source, begun_s = PlannedTokens(plan, self.spec.vocab_size), time.perf_counter()
        run_step(plan, self.model, self.state, source, lr=1e-4, clip_norm=1.0, clock=StepClock(self.world))
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    def measure(self, case: Case, *, with_allocators: bool) -> dict[str, Any]:
        """Seconds and peak bytes; where the host waited; what the allocator reserved, and whether it could do with
        the peak and a margin."""
        plan = case.plan(self.spec.num_layers)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with waits_of(self.world.device) as waits:
            first_s = self.run(plan)
        row: dict[str, Any] = {
            "seconds": [self.run(plan) for _ in range(STEPS)],
            "waits": dict(waits),
            "first_s": first_s,
        }
        if self.world.device.type != "cuda":
            return row
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        for name, settings in ALLOCATORS.items() if with_allocators else ():
            torch.cuda.memory._set_allocator_settings(settings)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.run(plan)
            row["peak_bytes"], row[f"reserved_{name}"] = (
                torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(),
            )  # fmt: skip
            row[f"limited_{name}"] = self.run_limited(plan, int(row["peak_bytes"] / (1 - MARGIN)))
        return row

    def run_limited(self, plan: StepPlan, num_bytes: int) -> dict[str, Any]:
        """A step while the allocator may reserve so many bytes."""
        total = torch.cuda.get_device_properties(self.world.device).total_memory
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(num_bytes / total)
        try:
            return {
                "seconds": self.run(plan), "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
            }  # fmt: skip
        except LengthwiseError as error:
            return {"error": str(error)[:300]}
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="which, by number")
    parser.add_argument("--allocators", action="store_true", help="also what they reserve, and steps in little memory")
    arguments = parser.parse_args()
    steps = Steps(small=arguments.small)
    with arguments.out.open("w") as file:
        for number in arguments.cases:
            case = CASES[number]
            if arguments.small:
                case = replace(case, length=case.length // 256, tile_tokens=case.tile_tokens // 256)
            try:
                row = steps.measure(case, with_allocators=arguments.allocators)
            except Exception as error:  # the next case may do
                row = {"error": f"{type(error).__name__}: {error}"[:1000]}
                steps.state.discard_gradient()
            line = json.dumps({"case": asdict(case), **row})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
    stop_world(steps.world)


if __name__ == "__main__":
    main()
