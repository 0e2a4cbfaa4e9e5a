"""Dry runs of prepared models of transformers: bytes counted and predicted, by family, weights, degree and stages.

python benchmarks/dryrun_prepared.py                            # every row of dryrun.md
python benchmarks/dryrun_prepared.py --families qwen3 --tokens 4096 --weights whole
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lengthwise.config.choices import HeldWeights
from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset
from lengthwise.core.step_plan import Pipeline, PlannedMicroBatch, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.models.stock_model import read_stock_model
from lengthwise.session.dry_run import run_process
from lengthwise.session.prepared_dry_run import PreparedDryRun, schemes_of

LAYERS, WIDTH = 4, 2048
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 5632, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 1 << 18,
}  # fmt: skip
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **SIZES},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **SIZES, "head_dim": 128, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], **SIZES, "sliding_window": None},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 16, "vocab_size": 32000,
        "n_positions": 1 << 18, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], **SIZES, **TOKEN_IDS, "mask_token_id": 4, "cls_token_id": 1,
        "sep_token_id": 2,
    },
}  # fmt: skip
NUM_RANKS, MICRO_BATCHES, SEQUENCES = 8, 2, 4


def plan_of(num_tokens: int, *, degree: int, stages: int, recompute: bool, num_layers: int = LAYERS) -> StepPlan:
    """Equal pipelines with packs of four sequences, ``num_tokens`` on each rank, twice as many packs as stages."""
    method = Method.DENSE if degree == 1 else Method.ULYSSES
    recomputed = num_layers if recompute else 0
    scheme = uniform_scheme(num_layers, degree=degree, method=method, recomputed=recomputed, stages=stages)
    lengths, pipelines, sequence = (num_tokens * degree // SEQUENCES,) * SEQUENCES, [], 0
    for first in range(0, NUM_RANKS, scheme.num_devices):
        packs = []
        for _ in range(MICRO_BATCHES * stages):
            packs.append(Pack(ids=tuple(range(sequence, sequence := sequence + SEQUENCES)), lengths=lengths))
        micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
        ranks = tuple(range(first, first + scheme.num_devices))
        pipelines.append(Pipeline(ranks=ranks, scheme=scheme, micro_batches=micro_batches))
    return StepPlan(
        step=0, policy="static", pipelines=tuple(pipelines), loss_normaliser=1, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
    )  # fmt: skip


def rows_of(
    family: str, num_tokens: int, *, degrees: Sequence[int], stages: Sequence[int], weights: Sequence[HeldWeights]
) -> Iterator[dict[str, Any]]:
    """Counted and predicted peaks of the first rank of each stage, with and without recompute."""
    cells = [
        (degree, num_stages, recompute)
        for degree, num_stages, recompute in product(degrees, stages, (False, True))
        if degree * num_stages <= NUM_RANKS
    ]
    plans = {
        (degree, num_stages, recompute): plan_of(num_tokens, degree=degree, stages=num_stages, recompute=recompute)
        for degree, num_stages, recompute in cells
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**FAMILIES[family], "model_type": family}))
        config = load(None, ["train.dtype=bfloat16"])
        trial = PreparedDryRun(config, read_stock_model(Path(folder)), cluster_preset("1x8xH100-80GB"))
        by_degree = {plan.pipelines[0].scheme.degree: plan for plan in plans.values()}
        profiles = [trial.profile_request(num_tokens * degree, schemes_of(plan)) for degree, plan in by_degree.items()]
        tables = dict(zip(by_degree, (rows[0] for rows in run_process(profiles))))
        costs = {
            (degree, name): trial.cost_of(tables[degree], longest=num_tokens * degree, weights=name)
            for degree, name in product(by_degree, weights)
        }
        steps = [(*cell, name) for cell in cells for name in weights]
        requests = [
            trial.step_request(
                plans[degree, num_stages, recompute], costs[degree, name],
                [stage * degree for stage in range(num_stages)], num_kept=0,
            )
            for degree, num_stages, recompute, name in steps
        ]  # fmt: skip
        for (degree, num_stages, recompute, name), request in zip(steps, requests):
            for row in run_process([request])[0]:
                plan = plans[degree, num_stages, recompute]
                row = trial.beside_prediction(plan, costs[degree, name], row, num_kept=0)
                row |= {"family": family, "tokens": num_tokens, "degree": degree, "stages": num_stages}
                yield row | {"stage": row["rank"] // degree, "recompute": recompute, "weights": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--tokens", default="4096,32768", help="on each rank")
    parser.add_argument("--degrees", default="1,2,8")
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--weights", default="whole,by-layer")
    parser.add_argument("--json", type=Path, help="write all that was counted here")
    asked = parser.parse_args()
    names = ("family", "weights", "degree", "stages", "stage", "tokens", "recompute")
    print(f"| {' | '.join(names)} | counted GiB | predicted GiB | ratio |\n" + "| --- " * 10 + "|")
    documents = []
    for family, num_tokens in product(asked.families.split(","), map(int, asked.tokens.split(","))):
        degrees, stages = ([int(number) for number in text.split(",")] for text in (asked.degrees, asked.stages))
        rows = rows_of(family, num_tokens, degrees=degrees, stages=stages, weights=asked.weights.split(","))
        for row in rows:
            counted, predicted = row["peak_total_bytes"] / GIB, row["predicted"]["peak_total_bytes"] / GIB
            print(
                f"| {' | '.join(str(row[name]) for name in names)} | {counted:.2f} | {predicted:.2f} | "
                f"{predicted / counted:.3f} |",
                flush=True,
            )
            documents.append(row)
    if asked.json:
        asked.json.write_text(json.dumps(documents))


if __name__ == "__main__":
    main()
