"""The page gpu.md: what was measured on a GPU beside what dry runs, the memory model and costs say of it here.

python benchmarks/gpu.py    # half a minute, no GPU; from results/gpu_steps.jsonl and gpu_prepared.jsonl, which
                            # gpu_steps.py and gpu_prepared.py write on a machine with one
"""

import json
from typing import Any

import numpy as np
from gpu_steps import MARGIN, NUM_LAYERS, Case, model_of
from measure import RESULTS
from pages import Section, say, write

from lengthwise.config.run_config import load
from lengthwise.core.pipeline_config import Method, Strategy
from lengthwise.core.specs import cluster_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.session.dry_run import PlanToRun, dry_run_plans

CLUSTER = cluster_preset("1x1xH100-80GB")


def rows_of(name: str) -> list[dict[str, Any]]:
    """What was measured, in the order of the runs."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def predicted_s(case: Case, cost: AnalyticCost) -> float:
    """Seconds of a step of two micro-batches and an update."""
    scheme = case.scheme(NUM_LAYERS)
    micro_batch_s = cost.sequence_times_s(np.full(case.count, case.length), scheme).sum() + cost.overhead_s(scheme)
    return float(2 * micro_batch_s + cost.update_parts(Strategy(schemes=(scheme,), ranks=((0,),))).rest_s)


def steps(rows: list[dict[str, Any]]) -> Section:
    """Seconds and peaks of four layers of llama-7b."""
    spec = model_of(small=False)
    cost, config = AnalyticCost(model=spec, cluster=CLUSTER), load(None, ["train.dtype=bfloat16"])
    cases = [Case(**{**row["case"], "method": Method(row["case"]["method"])}) for row in rows]
    runs = [
        PlanToRun(plan=case.plan(NUM_LAYERS), model=spec, cluster=CLUSTER, config=config, ranks=(0,)) for case in cases
    ]
    table = []
    for row, case, document in zip(rows, cases, dry_run_plans(runs)):
        (rank,) = document["ranks"]
        took_s, priced_s = min(row["seconds"]), predicted_s(case, cost)
        predicted = rank["predicted"]["peak_total_bytes"]
        table.append(
            [
                f"2 x {case.count} x {case.length:,}", case.scheme(NUM_LAYERS).name, f"{row['peak_bytes'] / GIB:.2f}",
                f"{rank['peak_total_bytes'] / GIB:.2f}", f"{predicted / GIB:.2f}",
                f"{predicted / row['peak_bytes']:.3f}", f"{took_s:.3f}", f"{priced_s:.3f}", f"{priced_s / took_s:.2f}",
            ]
        )  # fmt: skip
    return Section(
        title="Steps of this library's Llama",
        text=f"`python benchmarks/gpu_steps.py` on {rows[0]['gpu']}, torch {rows[0]['torch']}, {rows[0]['date']}, at "
        f"commits {', '.join(dict.fromkeys(row['commit'] for row in rows))}: {NUM_LAYERS} layers of llama-7b, "
        "bfloat16, AdamW with float32 masters, one rank, layers not compiled. The least of two or three steps; costs "
        "are closed forms, fitted to runs that others published, with fused or compiled operations and attention of "
        "the fastest kernels.",
        head=(
            "micro-batches", "scheme", "peak GiB", "dry run", "memory model", "model over measured", "seconds",
            "by costs", "costs over measured",
        ),
        rows=table,
    )  # fmt: skip


def allocators(rows: list[dict[str, Any]]) -> Section:
    """What is reserved beyond tensors, and whether a margin is enough for it."""
    table = []
    for row in (row for row in rows if "reserved_default" in row):
        case = Case(**{**row["case"], "method": Method(row["case"]["method"])})
        for name, settings in (("default", "default"), ("expandable", "expandable_segments:True")):
            limited = row[f"limited_{name}"]
            table.append(
                [
                    f"2 x {case.count} x {case.length:,}", settings, f"{row['peak_bytes'] / GIB:.2f}",
                    f"{row[f'reserved_{name}'] / GIB:.2f}", f"{row[f'reserved_{name}'] / row['peak_bytes'] - 1:.1%}",
                    limited["retries"], f"{limited['seconds'] / min(row['seconds']) - 1:+.1%}",
                ]
            )  # fmt: skip
    return Section(
        title="What the allocator reserves",
        text=f"The same steps, and once more while the allocator may reserve the peak and {MARGIN:.0%} of the limit, "
        "which is what plans leave free by default. A retry: the allocator gave back what it had cached and asked "
        "again.",
        head=("micro-batches", "segments", "peak GiB", "reserved GiB", "more", "retries in little memory", "time"),
        rows=table,
    )


def prepared(rows: list[dict[str, Any]]) -> Section:
    """A Llama of transformers, step by step."""
    (row,) = (row for row in rows if row["side"] == "prepared")
    table = [
        [
            step["num_sequences"], step["packs"], f"{step['tokens']:,}", f"{step['seconds']:.2f}",
            f"{step['predicted_s']:.2f}", f"{max(taken / planned for taken, planned in step['bytes']):.3f}",
        ]
        for step in row["steps"]
    ]  # fmt: skip
    return Section(
        title="A Llama of transformers through prepare",
        text=f"`python benchmarks/gpu_prepared.py --sides prepared`, transformers {row['transformers']}, 0.85B "
        f"parameters, log-normal lengths up to 16,384, at commit {row['commit']}: **before** profiles left out "
        f"launch-bound rows. Its measurements and checks took {row['prepare_s']:.0f} s. The first step also warms up.",
        head=("sequences", "packs", "tokens", "seconds", "predicted", "bytes over predicted"),
        rows=table,
    )


def main() -> None:
    measured = rows_of("gpu_steps")
    sections = [say(steps(measured)), say(allocators(measured)), say(prepared(rows_of("gpu_prepared")))]
    write(
        "gpu",
        title="On one H100",
        first="The first runs of this library on a GPU: fifteen minutes of one H100. What they changed is in [GPUs]"
        "(../docs/guides/gpu.md#on-a-gpu).",
        sections=sections,
    )


if __name__ == "__main__":
    main()
