"""Dry runs of prepared models of transformers: bytes predicted and counted, by family, weights, degree and stages.

python benchmarks/dryrun_prepared.py                                # all cases of all models
python benchmarks/dryrun_prepared.py --families "qwen3;llama-8b" --degree 1
                                                                    # some, added to results/dryrun_prepared.jsonl
python benchmarks/dryrun_prepared.py --families ""                  # the table of what is there
python benchmarks/dryrun_prepared.py --sweep all                    # classes of transformers, tiny; hours on two cores
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lengthwise.config.choices import HeldWeights
from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.stage_memory import LOGITS_AT_ONCE
from lengthwise.models.stock_model import read_stock_model
from lengthwise.session.dry_run import run_process
from lengthwise.session.prepared_dry_run import PreparedDryRun, largest_pack, schemes_of

LAYERS, WIDTH, POSITIONS = 4, 2048, 1 << 18
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 5632, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": POSITIONS,
}  # fmt: skip
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES, "sliding_window": None},
    "mistral, window of 4,096": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES, "sliding_window": 4096,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **SIZES, "head_dim": 128,
        "sliding_window": 4096,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **SIZES, "head_dim": 128,
        "sliding_window": 4096, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "qwen2, windows in two of four layers": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES, "use_sliding_window": True,
        "sliding_window": 4096, "max_window_layers": 2,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **SIZES, "intermediate_size": 2816,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **SIZES, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 2816,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": WIDTH, "n_layer": LAYERS,
        "n_head": 16, "vocab_size": 32000, "hidden_dropout": 0.0, "attention_dropout": 0.0, **TOKEN_IDS,
    },
    "deberta": {
        "architectures": ["DebertaV2ForMaskedLM"], "model_type": "deberta-v2", **SIZES, **TOKEN_IDS,
        "position_buckets": 256, "max_relative_positions": 512,
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 16,
        "vocab_size": 32000, "n_positions": POSITIONS, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", **SIZES, **TOKEN_IDS,
        "mask_token_id": 4, "cls_token_id": 1, "sep_token_id": 2,
    },
    "llama-8b": {
        **LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": {
        **LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
WHOLE = ("bloom", "deberta")
"""Families whose weights cannot be gathered layer by layer; DeBERTa's sequences are each computed by one rank."""
LARGE = {"llama-8b": (8, 8192), "llama-70b": (16, 12288)}
"""Ranks of the large models, and tokens of each; not the hidden size, or the head's gradient passed for logits."""
MICRO_BATCHES, SEQUENCES = 2, 4
RESULTS = Path(__file__).parent / "results" / "dryrun_prepared.jsonl"
SHARES = {"": (False, False), "recompute": (True, False), "offload": (False, True), "both": (True, True)}
"""Whether all layers are recomputed and offloaded, by what a row says of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of a model; ``num_tokens`` are those of each rank."""

    weights: HeldWeights
    degree: int
    num_tokens: int
    stages: int = 1
    rung: str = ""
    """Of :data:`SHARES`."""

    def plan(self, num_layers: int, num_ranks: int) -> StepPlan:
        """Equal pipelines with packs of four sequences, twice as many packs as stages."""
        method, (is_recomputed, is_offloaded) = Method.DENSE if self.degree == 1 else Method.ULYSSES, SHARES[self.rung]
        scheme = uniform_scheme(
            num_layers, degree=self.degree, method=method, recomputed=num_layers * is_recomputed, stages=self.stages
        )
        scheme = replace(scheme, offload=(True,) * num_layers if is_offloaded else ())
        lengths, pipelines, sequence = (self.num_tokens * self.degree // SEQUENCES,) * SEQUENCES, [], 0
        for first in range(0, num_ranks, scheme.num_devices):
            packs = []
            for _ in range(MICRO_BATCHES * self.stages):
                packs.append(Pack(ids=tuple(range(sequence, sequence := sequence + SEQUENCES)), lengths=lengths))
            micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
            ranks = tuple(range(first, first + scheme.num_devices))
            pipelines.append(Pipeline(ranks=ranks, scheme=scheme, micro_batches=micro_batches))
        return StepPlan(
            step=0, policy="static", pipelines=tuple(pipelines), loss_normaliser=1, update_s=0.0, time_s=1.0,
            lower_bound_s=1.0,
        )  # fmt: skip


def cases_of(family: str) -> Iterator[Case]:
    """What is run of a family: degrees, stages, 64K tokens on a rank and 512K on eight; of large models by layer."""
    both: tuple[HeldWeights, ...] = ("whole",) if family in WHOLE else ("whole", "by-layer")
    plain = ("", "recompute")
    if family in LARGE:
        for degree, rung in product((1, 8), plain):
            yield Case(weights="by-layer", degree=degree, num_tokens=LARGE[family][1], rung=rung)
        return
    for degree, weights, rung in product((1, 2, 8), both, plain):
        yield Case(weights=weights, degree=degree, num_tokens=4096, rung=rung)
    for degree, weights, rung in product((1, 2), both, plain):
        yield Case(weights=weights, degree=degree, num_tokens=32768, stages=2, rung=rung)
    for rung in plain:
        yield Case(weights="whole", degree=1, num_tokens=65536, rung=rung)
    for weights, rung in product(both, ("recompute", "offload", "both")):
        yield Case(weights=weights, degree=8, num_tokens=65536, rung=rung)


def rows_of(
    family: str, cases: Sequence[Case], *, document: dict[str, Any] | None = None, num_layers: int = 0
) -> Iterator[dict[str, Any]]:
    """Counted and predicted peaks of the first rank of each stage, from one process for all ``cases``.

    ``document``, ``num_layers``: the configuration of a family that is none of :data:`FAMILIES`, and its layers.
    """
    document, num_ranks = document or FAMILIES[family], LARGE.get(family, (8, 0))[0]
    num_layers = num_layers or document.get("num_hidden_layers", LAYERS)
    plans = [case.plan(num_layers, num_ranks) for case in cases]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(document))
        cluster = cluster_preset(f"{num_ranks // 8}x8xH100-80GB")
        trial = PreparedDryRun(load(None, ["train.dtype=bfloat16"]), read_stock_model(Path(folder)), cluster)
        sizes = {
            (case.degree, case.num_tokens): (max(largest_pack(plan)), schemes_of(plan), largest_pack(plan))
            for case, plan in zip(cases, plans)
        }
        steps = [
            trial.step_request(
                plan, [stage * case.degree for stage in range(case.stages)],
                num_kept=None if case.weights == "whole" else 0,
            )
            for case, plan in zip(cases, plans)
        ]  # fmt: skip
        answers = run_process([*(trial.profile_request(*size) for size in sizes.values()), *steps])
        profiles = dict(zip(sizes, (rows[0] for rows in answers)))
        for case, plan, rows in zip(cases, plans, answers[len(sizes) :]):
            key = case.degree, case.num_tokens
            cost = trial.cost_of(profiles[key], longest=sizes[key][0], weights=case.weights)
            for row in rows:
                row = trial.beside_prediction(plan, cost, row, num_kept=0)
                numbers = {name: row[name] for name in ("rank", "peak_bytes", "peak_total_bytes", "peak_at", "time_s")}
                num_logits = case.num_tokens * trial.stock.vocab_size
                numbers["has_logits"] = row["largest_allocation"][0] >= num_logits > 2 * LOGITS_AT_ONCE
                state = sum(row["peak_bytes"][kind] for kind in ("weights", "gradients", "optimizer"))
                numbers |= {"family": family, **asdict(case), "stage": row["rank"] // case.degree, "state_bytes": state}
                predicted = row["predicted"]
                numbers |= {"predicted": predicted["peak_bytes"], "predicted_bytes": predicted["peak_total_bytes"]}
                yield numbers


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One row for every case of a family, its rungs beside one another: predicted / counted GiB, and their ratio."""
    names = ("weights", "degree", "stages", "stage", "num_tokens")
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        counted, predicted = row["peak_total_bytes"] / GIB, row["predicted_bytes"] / GIB
        cell = f"{predicted:.2f} / {counted:.2f} ({predicted / counted:.3f})"
        cells.setdefault((row["family"], *(row[name] for name in names)), {})[row["rung"]] = cell
    lines = [
        "| model | weights | ranks a pack | stage | tokens | keep all | recompute | offload | both |",
        "| --- " * 9 + "|",
    ]
    for (family, weights, degree, stages, stage, num_tokens), of_rungs in cells.items():
        values = " | ".join(of_rungs.get(rung, "") for rung in SHARES)
        lines.append(f"| {family} | {weights} | {degree} | {stage + 1} of {stages} | {num_tokens:,} | {values} |")
    return "\n".join(lines)


def latest(path: Path) -> list[dict[str, Any]]:
    """The last row of each case in a file, by family."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    names = ("family", "weights", "degree", "stages", "stage", "num_tokens", "rung")
    last = {tuple(row[name] for name in names): row for row in rows}
    return sorted(last.values(), key=lambda row: list(FAMILIES).index(row["family"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=";".join(FAMILIES), help="separated by semicolons")
    filters = {"weights": str, "degree": int, "stages": int, "num_tokens": int, "rung": str}
    for name, kind in filters.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of the cases that are run; default: all")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="where rows are added")
    parser.add_argument(
        "--sweep", help="classes of transformers, tiny, separated by commas; all: every one that prepare takes"
    )
    asked = parser.parse_args()
    if asked.sweep is not None:
        from dryrun_families import sweep  # which uses this module

        sweep(asked.sweep)
        return
    for family in filter(None, asked.families.split(";")):
        wanted = {name: getattr(asked, name) for name in filters if getattr(asked, name) is not None}
        cases = [
            case for case in cases_of(family) if all(getattr(case, name) == value for name, value in wanted.items())
        ]
        rows = list(rows_of(family, cases))
        with asked.rows.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(latest(asked.rows)))


if __name__ == "__main__":
    main()
