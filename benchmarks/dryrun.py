"""Dry runs of layers of llama-7b: bytes counted beside bytes predicted, by method, tokens and recompute.

python benchmarks/dryrun.py                                    # every row of dryrun.md, about twenty minutes
python benchmarks/dryrun.py --methods dense,ring --layers 2    # some of them
python benchmarks/dryrun.py --stages 2                         # pipelines of two stages, the first rank of each
python benchmarks/dryrun.py --shard-gradients --methods ring   # gradients reduced to shares in every backward
python benchmarks/dryrun.py --ladder                           # layers offloaded, feed-forwards in tiles
python benchmarks/dryrun.py --slices 1,4,16 --tokens 65536     # a sequence in slices on four stages of two ranks
python benchmarks/dryrun.py --reach 8:3700000,32:15000000      # Llama-3-8B, one sequence on all GPUs, state on the host
"""

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig, WeightPlacement, spread, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import make_candidates
from lengthwise.plan.space.sliced_packs import cut_pack
from lengthwise.session.dry_run import PlanToRun, dry_run_plans

RUNGS = ((0, 4, 0), (0, 2, 0), (4, 4, 0), (0, 0, 4096), (4, 0, 4096), (4, 4, 4096))
"""Layers of four that are recomputed and offloaded, and tokens of a feed-forward's tile."""
TOKENS = (4096, 65536, 524288)
MICRO_BATCHES, SEQUENCES = 2, 4


def plan_of(
    method: Method,
    num_tokens: int,
    *,
    num_layers: int,
    num_ranks: int,
    recompute: bool,
    stages: int = 1,
    shard_gradients: bool = False,
) -> StepPlan:
    """Equal pipelines within nodes, each with two micro-batches of four sequences a stage."""
    degree = 1 if method is Method.DENSE else 8 // stages
    scheme = PipelineConfig(
        degree=degree, stage_layers=(num_layers // stages,) * stages, recompute=(recompute,) * num_layers,
        methods=(method,) * num_layers, weights=WEIGHTS_OF.get(method, WeightPlacement.WHOLE),
        shard_gradients=shard_gradients,
    )  # fmt: skip
    lengths = (num_tokens // SEQUENCES,) * SEQUENCES
    pipelines = []
    for first in range(0, num_ranks, scheme.num_devices):
        micro_batches = []
        for number in range(MICRO_BATCHES * stages):
            start = (first * MICRO_BATCHES * stages + number) * SEQUENCES
            pack = Pack(ids=tuple(range(start, start + SEQUENCES)), lengths=lengths)
            micro_batches.append(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1))
        ranks = tuple(range(first, first + scheme.num_devices))
        pipelines.append(Pipeline(ranks=ranks, scheme=scheme, micro_batches=tuple(micro_batches)))
    return plan_with(tuple(pipelines))


def plan_with(pipelines: tuple[Pipeline, ...]) -> StepPlan:
    """A step of these pipelines, whose seconds nobody asks for."""
    return StepPlan(
        step=0, policy="static", pipelines=pipelines, loss_normaliser=1, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )


def print_ladder(methods: list[str], tokens: list[int]) -> None:
    """Rows of :data:`RUNGS`: a scheme, the peak on the device, and what is on the host."""
    spec = replace(model_preset("llama-7b"), num_layers=4)
    cluster, config = cluster_preset("1x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])

    def plan_for(name: str, num_tokens: int, rung: tuple[int, int, int]) -> StepPlan:
        recomputed, offloaded, tile_tokens = rung
        plan = plan_of(Method(name), num_tokens, num_layers=4, num_ranks=8, recompute=recomputed == 4)
        changes = {"offload": spread(offloaded, 4), "tile_tokens": tile_tokens}
        pipelines = tuple(replace(part, scheme=replace(part.scheme, **changes)) for part in plan.pipelines)
        return replace(plan, pipelines=pipelines)

    print("| scheme | tokens | counted GiB | predicted GiB | ratio |\n" + "| --- " * 5 + "|")
    for name in methods:
        cells = list(product((name,), tokens, RUNGS))
        plans = [plan_for(*cell) for cell in cells]
        runs = [PlanToRun(plan=plan, model=spec, cluster=cluster, config=config, ranks=(0,)) for plan in plans]
        for (_, num_tokens, _), plan, document in zip(cells, plans, dry_run_plans(runs)):
            (row,) = document["ranks"]
            print(f"| {plan.pipelines[0].scheme.name} | {num_tokens:,} | {_compared(row)} |", flush=True)


def print_reach(wanted: list[str]) -> None:
    """One sequence of Llama-3-8B on all GPUs of ``GPUS:TOKENS``, every rung of the memory ladder, on the first rank."""
    spec = model_preset("llama-3-8b")
    config = load(None, ["train.dtype=bfloat16", "train.offload_state=host"])
    print("| GPUs | scheme | tokens | counted GiB | predicted GiB | ratio | may fill GiB | s |\n" + "| --- " * 8 + "|")
    for num_gpus, num_tokens in (map(int, cell.split(":")) for cell in wanted):
        method = Method.DENSE if num_gpus == 1 else Method.METP
        scheme = PipelineConfig(
            degree=num_gpus, stage_layers=(spec.num_layers,), recompute=(True,) * spec.num_layers,
            offload=(True,) * spec.num_layers, tile_tokens=4096 if num_gpus == 1 else 0,
            head_groups=spec.num_kv_heads if num_gpus == 1 else 1,
            methods=(method,) * spec.num_layers, weights=WEIGHTS_OF.get(method, WeightPlacement.WHOLE),
        )  # fmt: skip
        pack = PlannedMicroBatch(pack=Pack(ids=(0,), lengths=(num_tokens,)), time_s=1.0, peak_bytes=1)
        pipeline = Pipeline(ranks=tuple(range(num_gpus)), scheme=scheme, micro_batches=(pack,))
        cluster = cluster_preset(f"{max(1, num_gpus // 8)}x{min(8, num_gpus)}xH100-80GB")
        run = PlanToRun(plan=plan_with((pipeline,)), model=spec, cluster=cluster, config=config, ranks=(0,))
        (row,) = dry_run_plans([run])[0]["ranks"]
        limit = cluster.device.with_margin().memory_bytes / GIB
        line = f"| {num_gpus} | {scheme.name} | {num_tokens:,} | {_compared(row)} | {limit:.1f} | {row['time_s']:.0f} |"
        print(line, flush=True)


def print_slices(tokens: list[int], counts: list[int]) -> None:
    """One sequence at a time in slices of equal work on four stages of two ranks, the first rank of two of them."""
    spec = replace(model_preset("llama-7b"), num_layers=4)
    cluster, config = cluster_preset("1x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="bfloat16")
    cells = list(product(tokens, (0, 4), counts))
    runs = []
    for num_tokens, recomputed, count in cells:
        scheme = replace(
            uniform_scheme(4, degree=2, stages=4, method=Method.ULYSSES, recomputed=recomputed), slices=count
        )
        (candidate,) = make_candidates([scheme], cost, num_devices=8)
        peak_bytes, state = int(cost.peak_bytes(num_tokens, scheme, num_devices=8)), candidate.state_bytes
        micro_batches = tuple(
            PlannedMicroBatch(
                pack=Pack(ids=(number,), lengths=(num_tokens,)), time_s=1.0, peak_bytes=peak_bytes,
                slices=cut_pack(candidate, (num_tokens,), 1.0),
            )
            for number in range(4)
        )  # fmt: skip
        pipeline = Pipeline(ranks=tuple(range(8)), scheme=scheme, micro_batches=micro_batches, state_bytes=state)
        runs.append(PlanToRun(plan=plan_with((pipeline,)), model=spec, cluster=cluster, config=config, ranks=(0, 6)))
    print("| scheme | tokens | rank | counted GiB | predicted GiB | ratio |\n" + "| --- " * 6 + "|")
    for (num_tokens, _, _), run, document in zip(cells, runs, dry_run_plans(runs)):
        for row in document["ranks"]:
            name = run.plan.pipelines[0].scheme.name
            print(f"| {name} | {num_tokens:,} | {row['rank']} | {_compared(row)} |", flush=True)


def _compared(row: dict[str, Any]) -> str:
    counted, predicted = row["peak_total_bytes"] / GIB, row["predicted"]["peak_total_bytes"] / GIB
    return f"{counted:.2f} | {predicted:.2f} | {predicted / counted:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(map(str, Method)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--all-ranks", action="store_true", help="the middle and the last rank too")
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--shard-gradients", action="store_true")
    parser.add_argument("--slices", help="numbers of slices, such as 1,4,16")
    parser.add_argument("--reach", help="one sequence on all GPUs, such as 8:3700000,32:15000000")
    asked = parser.parse_args()
    if asked.reach:
        return print_reach(asked.reach.split(","))
    methods, tokens = asked.methods.split(","), list(map(int, asked.tokens.split(",")))
    if asked.slices:
        return print_slices(tokens, list(map(int, asked.slices.split(","))))
    if asked.ladder:
        return print_ladder(methods, tokens)
    spec = replace(model_preset("llama-7b"), num_layers=asked.layers)
    cluster, config = cluster_preset(f"{asked.nodes}x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    print("| method | tokens | recompute | rank | counted GiB | predicted GiB | ratio |\n" + "| --- " * 7 + "|")
    for name in methods:
        degree = 1 if name == Method.DENSE else 8 // asked.stages
        middle, last = cluster.num_devices // 2, cluster.num_devices - 1
        ranks = {stage * degree for stage in range(asked.stages)} | ({middle, last} if asked.all_ranks else set())
        cells = list(product(tokens, (False, True)))
        runs = [
            PlanToRun(
                plan=plan_of(
                    Method(name), num_tokens, num_layers=asked.layers, num_ranks=cluster.num_devices,
                    recompute=recompute, stages=asked.stages, shard_gradients=asked.shard_gradients,
                ),
                model=spec, cluster=cluster, config=config, ranks=tuple(sorted(ranks)),
            )
            for num_tokens, recompute in cells
        ]  # fmt: skip
        for (num_tokens, recompute), document in zip(cells, dry_run_plans(runs)):
            for row in document["ranks"]:
                kind = "all" if recompute else "none"
                print(f"| {name} | {num_tokens:,} | {kind} | {row['rank']} | {_compared(row)} |", flush=True)


if __name__ == "__main__":
    main()
