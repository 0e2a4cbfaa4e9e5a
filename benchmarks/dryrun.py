"""Dry runs of layers of llama-7b: bytes counted beside bytes predicted, by method, tokens and recompute.

python benchmarks/dryrun.py                                    # every row of dryrun.md, about twenty minutes
python benchmarks/dryrun.py --methods dense,ring --layers 2    # some of them
python benchmarks/dryrun.py --stages 2                         # pipelines of two stages, the first rank of each
python benchmarks/dryrun.py --ladder                           # layers offloaded, feed-forwards in tiles
python benchmarks/dryrun.py --prepared 8b                      # a Llama of transformers, weights whole and by layer
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig, WeightPlacement, spread
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.step_plan import Pipeline, PlannedMicroBatch, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.models.stock_model import read_stock_model
from lengthwise.session.dry_run import dry_run_plan, dry_run_stock

RUNGS = ((0, 4, 0), (0, 2, 0), (4, 4, 0), (0, 0, 4096), (4, 0, 4096), (4, 4, 4096))
"""Layers of four that are recomputed and offloaded, and tokens of a feed-forward's tile."""
TOKENS = (4096, 65536, 524288)
MICRO_BATCHES, SEQUENCES = 2, 4


def plan_of(
    method: Method, num_tokens: int, *, num_layers: int, num_ranks: int, recompute: bool, stages: int = 1
) -> StepPlan:
    """Equal pipelines within nodes, each with two micro-batches of four sequences a stage."""
    degree = 1 if method is Method.DENSE else 8 // stages
    scheme = PipelineConfig(
        degree=degree, stage_layers=(num_layers // stages,) * stages, recompute=(recompute,) * num_layers,
        methods=(method,) * num_layers, weights=WEIGHTS_OF.get(method, WeightPlacement.WHOLE),
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
    return StepPlan(
        step=0,
        policy="static",
        pipelines=tuple(pipelines),
        loss_normaliser=1,
        update_s=0.0,
        time_s=1.0,
        lower_bound_s=1.0,
    )


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
PREPARED = {
    "8b": (8, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}),
    "70b": (16, {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}),
}
"""Ranks and sizes of models that transformers computes."""


def print_prepared(name: str) -> None:
    """Rows of a prepared model: each rank a micro-batch of its own, or all ranks of a node share one by ulysses."""
    num_ranks, sizes = PREPARED[name]
    cluster, config = cluster_preset(f"{num_ranks // 8}x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    print(
        "| weights | ranks a pack | tokens | recompute | state | peak | predicted | ratio | waits |\n"
        + "| --- " * 9
        + "|"
    )
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
        stock = read_stock_model(Path(folder))
        for weights, (method, num_tokens), recompute in product(
            ("whole", "by-layer"), ((Method.DENSE, 8192), (Method.ULYSSES, 65536)), (False, True)
        ):
            num_layers = sizes["num_hidden_layers"]
            plan = plan_of(method, num_tokens, num_layers=num_layers, num_ranks=num_ranks, recompute=recompute)
            document = dry_run_stock(plan, stock, cluster, config=config, ranks=[0], weights=weights, num_kept=0)
            (row,) = document["ranks"]
            counted, predicted = row["peak_total_bytes"] / GIB, row["predicted"]["peak_total_bytes"] / GIB
            state = sum(row["peak_bytes"][kind] for kind in ("weights", "gradients", "optimizer")) / GIB
            waits = sum(wait["count"] for wait in row["synchronisations"])
            degree = 1 if method is Method.DENSE else 8
            print(
                f"| {weights} | {degree} | {num_tokens:,} | {'all' if recompute else 'none'} | {state:.2f} | "
                f"{counted:.2f} | {predicted:.2f} | {predicted / counted:.3f} | {waits} |",
                flush=True,
            )


def print_ladder(methods: list[str], tokens: list[int]) -> None:
    """Rows of :data:`RUNGS`: a scheme, the peak on the device, and what is on the host."""
    spec = replace(model_preset("llama-7b"), num_layers=4)
    cluster, config = cluster_preset("1x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])

    def run(cell: tuple[str, int, tuple[int, int, int]]) -> tuple[str, dict[str, Any]]:
        name, num_tokens, (recomputed, offloaded, tile_tokens) = cell
        plan = plan_of(Method(name), num_tokens, num_layers=4, num_ranks=8, recompute=recomputed == 4)
        changes = {"offload": spread(offloaded, 4), "tile_tokens": tile_tokens}
        pipelines = tuple(replace(part, scheme=replace(part.scheme, **changes)) for part in plan.pipelines)
        plan = replace(plan, pipelines=pipelines)
        (row,) = dry_run_plan(plan, spec, cluster, config=config, ranks=[0])["ranks"]
        return pipelines[0].scheme.name, row

    print("| scheme | tokens | counted GiB | predicted GiB | ratio |\n" + "| --- " * 5 + "|")
    cells = list(product(methods, tokens, RUNGS))
    with ThreadPoolExecutor(2) as pool:
        for (_, num_tokens, _), (scheme, row) in zip(cells, pool.map(run, cells)):
            counted, predicted = row["peak_total_bytes"] / GIB, row["predicted"]["peak_total_bytes"] / GIB
            print(
                f"| {scheme} | {num_tokens:,} | {counted:.2f} | {predicted:.2f} | {predicted / counted:.3f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(map(str, Method)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--prepared", choices=PREPARED)
    parser.add_argument("--ladder", action="store_true")
    asked = parser.parse_args()
    if asked.ladder:
        return print_ladder(asked.methods.split(","), list(map(int, asked.tokens.split(","))))
    if asked.prepared:
        return print_prepared(asked.prepared)
    spec = replace(model_preset("llama-7b"), num_layers=asked.layers)
    cluster, config = cluster_preset(f"{asked.nodes}x8xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    cells = list(product(asked.methods.split(","), map(int, asked.tokens.split(",")), (False, True)))
    ranks = sorted({stage * (1 if asked.methods == "dense" else 8 // asked.stages) for stage in range(asked.stages)})

    def run(cell: tuple[str, int, bool]) -> list[dict[str, Any]]:
        name, num_tokens, recompute = cell
        plan = plan_of(
            Method(name), num_tokens, num_layers=asked.layers, num_ranks=cluster.num_devices, recompute=recompute,
            stages=asked.stages,
        )  # fmt: skip
        rows: list[dict[str, Any]] = dry_run_plan(plan, spec, cluster, config=config, ranks=ranks)["ranks"]
        return rows

    print("| method | tokens | recompute | rank | counted GiB | predicted GiB | ratio |\n" + "| --- " * 7 + "|")
    with ThreadPoolExecutor(2) as pool:
        for (name, num_tokens, recompute), rows in zip(cells, pool.map(run, cells)):
            for row in rows:
                counted, predicted = row["peak_total_bytes"] / GIB, row["predicted"]["peak_total_bytes"] / GIB
                print(
                    f"| {name} | {num_tokens:,} | {'all' if recompute else 'none'} | {row['rank']} | {counted:.2f} | "
                    f"{predicted:.2f} | {predicted / counted:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
