"""Dry runs of prepared Llama-3-8B, two layers of it, on eight H100s: what attention in groups of heads frees.

python benchmarks/prepared_head_groups.py                                # one sequence of 3,276,800 tokens
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.dryrun_prepared import LLAMA_3
from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.layer_profile import LayerVariant
from lengthwise.core.pipeline_config import Method, PipelineConfig, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.models.stock_model import read_stock_model
from lengthwise.session.dry_run import run_process
from lengthwise.session.prepared_dry_run import PreparedDryRun

NUM_RANKS, NUM_LAYERS, TILE, GROUPS = 8, 2, 4096, 4
MODEL = LLAMA_3 | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 32,
    "max_position_embeddings": 1 << 22,
}  # fmt: skip
WAYS = [(Method.RING, 1), (Method.ULYSSES, 1), (Method.ULYSSES, GROUPS)]
"""Methods, and groups of heads; one head of a rank at a time."""


def scheme_of(method: Method, groups: int, tile: int) -> PipelineConfig:
    """All layers recomputed, their inputs on the host."""
    recomputed = {"recomputed": NUM_LAYERS, "offloaded": NUM_LAYERS}
    scheme = uniform_scheme(NUM_LAYERS, degree=NUM_RANKS, method=method, tile_tokens=tile, **recomputed)
    return replace(scheme, head_groups=groups)


def plan_of(scheme: PipelineConfig, num_tokens: int) -> StepPlan:
    """One sequence in each of two micro-batches."""
    packs = [Pack(ids=(number,), lengths=(num_tokens,)) for number in range(2)]
    micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
    pipeline = Pipeline(ranks=tuple(range(NUM_RANKS)), scheme=scheme, micro_batches=micro_batches)
    return StepPlan(
        step=0, policy="benchmark", pipelines=(pipeline,), loss_normaliser=1, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3_276_800)
    num_tokens = parser.parse_args().tokens
    cases = [(method, groups, tile) for tile, (method, groups) in product((0, TILE), WAYS)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        cluster = cluster_preset(f"1x{NUM_RANKS}xH100-80GB")
        trial = PreparedDryRun(load(None, ["train.dtype=bfloat16"]), read_stock_model(Path(folder)), cluster)
        variants = [LayerVariant(tile_tokens=tile, head_groups=groups) for tile in (0, TILE) for groups in (1, GROUPS)]
        schemes = [(NUM_RANKS, method) for method in (Method.RING, Method.ULYSSES)]
        plans = [plan_of(scheme_of(*case), num_tokens) for case in cases]
        (profile,), *answers = run_process([
            trial.profile_request(num_tokens, schemes, variants=variants),
            *(trial.step_request(plan, [0], num_kept=0) for plan in plans),
        ])  # fmt: skip
        cost = trial.cost_of(profile, longest=num_tokens, weights="by-layer")
    print("| scheme | counted GiB | predicted GiB | ratio | longest |")
    print("| --- | --- | --- | --- | --- |")
    for case, plan, (row,) in zip(cases, plans, answers):
        row = trial.beside_prediction(plan, cost, row, num_kept=0)
        counted, predicted = row["peak_total_bytes"], row["predicted"]["peak_total_bytes"]
        longest = cost.max_tokens(scheme_of(*case), num_devices=NUM_RANKS)
        numbers = f"{counted / GIB:.2f} | {predicted / GIB:.2f} | {predicted / counted:.3f} | {longest:,}"
        print(f"| {scheme_of(*case).name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
