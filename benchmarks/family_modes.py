"""Families of transformers under every way to share a model between ranks: does each learn what the stock model learns?

    python benchmarks/family_modes.py                                # 2, 3 and 4 ranks
    python benchmarks/family_modes.py --classes LlamaForCausalLM --ranks 3
    python benchmarks/family_modes.py --table benchmarks/results/family_modes.jsonl

Tiny models as in :mod:`families`, in float64, all weights trained and with adapters of peft (LoRA), weights whole and
gathered by layer. One run of :func:`lengthwise.prepare`, with its comparison, takes one step under each kind of plan:

    alone    each rank computes sequences of its own, every other layer recomputed
    ulysses, ring, ulysses_ring
             all ranks share packs by this method; on 2 and 3 ranks, ``ulysses_ring`` is the ring
    stages   a pipeline with a stage for each rank; on 4 ranks, two stages of degree 2

and after each step all weights are compared with those of the stock model, called sequence by sequence and trained by
the same steps of SGD. A difference of :data:`families.TOLERANCE` of the largest change or less is exact.
"""

import argparse
import copy
import json
import os
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from families import LENGTHS, TOLERANCE, Trial, corpus, import_once, in_double, stock_gradients
from tiny_models import SPECIAL_TOKENS, ModelClass, build

CLASSES = {
    "LlamaForCausalLM": "causal", "Qwen3ForCausalLM": "causal", "MistralForCausalLM": "causal",
    "Gemma2ForCausalLM": "causal", "Gemma3ForCausalLM": "causal", "GPT2LMHeadModel": "causal",
    "GPTNeoXForCausalLM": "causal", "PhiForCausalLM": "causal", "Phi3ForCausalLM": "causal",
    "MixtralForCausalLM": "causal", "Qwen2MoeForCausalLM": "causal", "DeepseekV3ForCausalLM": "causal",
    "GptOssForCausalLM": "causal", "BloomForCausalLM": "causal", "FalconForCausalLM": "causal",
    "MptForCausalLM": "causal", "OPTForCausalLM": "causal", "BertForMaskedLM": "masked",
    "ModernBertForMaskedLM": "masked", "AlbertForMaskedLM": "masked",
}  # fmt: skip
"""By the name of a class, the kind of its labels."""
LR = 1e-3
KINDS = ("alone", "ulysses", "ring", "ulysses_ring", "stages")
MODES = tuple((weights, is_adapted) for weights in ("whole", "by-layer") for is_adapted in (False, True))


def kinds_on(num_ranks: int) -> tuple[str, ...]:
    """The kinds of plans that differ on so many ranks."""
    return tuple(kind for kind in KINDS if kind != "ulysses_ring" or num_ranks > 3)


def adapted(model: Any) -> Any:
    """The model with adapters of low rank on all its linear layers but the head, drawn from a fixed seed."""
    import peft
    import torch

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).double().train()


def plan_of(kind: str, num_layers: int, num_ranks: int, batch: Any) -> Any:
    """The plan of a step, of packs of one and of several sequences."""
    from lengthwise.core.batch import Pack
    from lengthwise.core.pipeline_config import Method, uniform_scheme
    from lengthwise.core.planned_micro_batch import PlannedMicroBatch
    from lengthwise.core.step_plan import Pipeline, StepPlan

    lengths = dict(zip(batch.ids, batch.lengths, strict=True))

    def pipeline(ranks: tuple[int, ...], packs: list[list[int]], phase: int = 0, stages: int = 1) -> Any:
        planned = []
        for number, ids in enumerate(ids for ids in packs if ids):
            flags = tuple((layer + number) % 2 == 1 for layer in range(num_layers))
            pack = Pack(ids=tuple(ids), lengths=tuple(lengths[i] for i in ids))
            planned.append(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=0, recompute=flags if number else None))
        degree = len(ranks) // stages
        shared = Method.ULYSSES if kind == "stages" else Method(kind) if kind in KINDS[1:-1] else Method.DENSE
        method = shared if degree > 1 else Method.DENSE
        scheme = uniform_scheme(num_layers, degree=degree, stages=stages, method=method, recomputed=0)
        return Pipeline(ranks=ranks, phase=phase, scheme=scheme, micro_batches=tuple(planned))

    ids, everyone = sorted(lengths), tuple(range(num_ranks))
    if kind == "alone":
        pipelines = [pipeline((rank,), [ids[rank::num_ranks][:1], ids[rank::num_ranks][1:]]) for rank in everyone]
    elif kind == "stages":
        pipelines = [pipeline(everyone, [ids[:3], ids[3:5], ids[5:]], stages=2 if num_ranks == 4 else num_ranks)]
    else:
        pipelines = [pipeline(everyone, [ids[:3], ids[3:5]])]
        pipelines += [pipeline((rank,), [ids[5:6], ids[6:]] if rank == 0 else [], phase=1) for rank in everyone]
    return StepPlan(
        step=batch.step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip


def outcomes_of(model_class: ModelClass, num_ranks: int, weights: str, is_adapted: bool) -> dict[str, Any]:
    """By kind of plan: the largest difference of a weight relative to the largest change, or what refused it."""
    import torch

    import lengthwise as lw
    from lengthwise.config.optimizer_settings import OptimizerSettings
    from lengthwise.core.errors import LengthwiseError
    from tests.plan.costs import SimpleCost

    model = adapted(build(model_class)) if is_adapted else build(model_class)
    stock = copy.deepcopy(model)
    kinds = kinds_on(num_ranks)
    options: dict[str, Any] = {"mask_token_id": SPECIAL_TOKENS["mask_token_id"]} if model_class.kind == "masked" else {}
    try:
        run = lw.prepare(
            model, corpus(model_class.kind), sequences_per_step=len(LENGTHS), order="corpus", steps=len(kinds), lr=LR,
            optimizer=OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0), clip_norm=0.0, weights=weights,
            cost=SimpleCost(capacity=1000), memory_gib=1000, policy="static", verbose=False,
            methods=tuple(kind for kind in kinds if kind not in ("alone", "stages")), **options,
        )  # fmt: skip
    except LengthwiseError as error:
        return {"prepare": str(error)}
    if run.wrapped_model.by_sequence is not None:
        return {"prepare": "computed sequence by sequence"}
    found: dict[str, Any] = {}
    for kind in kinds:
        run.planner = partial(plan_of, kind, run.wrapped_model.structure.num_layers, num_ranks)
        try:
            step = next(run.steps())
        except LengthwiseError as error:
            found[kind] = str(error)
            continue
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        step.update()
        gradients = stock_gradients(stock, model_class.kind)
        stock.zero_grad()
        before = dict(stock.named_parameters())
        with torch.no_grad():
            for name, gradient in gradients.items():
                before[name] -= LR * gradient
        largest = LR * max(float(gradient.abs().max()) for gradient in gradients.values())
        with run.plain():
            after = {name: value.detach() for name, value in model.named_parameters()}
            found[kind] = max(float((after[name] - before[name]).abs().max()) for name in gradients) / largest
    return found


def compare_modes(weights: str, is_adapted: bool, model_class: ModelClass, num_ranks: int) -> dict[str, Any]:
    """The outcome of one mode on this rank; ``message``: that of each kind of plan, as JSON."""
    with in_double():
        found = outcomes_of(model_class, num_ranks, weights, is_adapted)
    errors = [error for error in found.values() if not isinstance(error, str)]
    is_exact = all(error <= TOLERANCE for error in errors)
    outcome = "refused" if not errors else "exact" if is_exact else "wrong"
    return {"outcome": outcome, "error": max(errors, default=None), "message": json.dumps(found)}


def row_of(name: str, num_ranks: int, weights: str, is_adapted: bool) -> dict[str, Any]:
    """The outcome of a class in one mode, by kind of plan."""
    model_class = ModelClass(kind=CLASSES[name], name=name)
    result = Trial(model_class, num_ranks, partial(compare_modes, weights, is_adapted)).outcome()
    is_found = result.message.startswith("{")
    return {
        "name": name, "ranks": num_ranks, "weights": weights, "adapters": is_adapted, "outcome": result.outcome,
        "plans": json.loads(result.message) if is_found else {"all": result.message},
    }  # fmt: skip


def table(path: Path) -> str:
    """The rows of a file as Markdown: classes by what plans of one stage and of several are, and on which ranks."""
    cells: dict[str, dict[tuple[str, str], set[str]]] = {}
    ranks: dict[str, set[int]] = {}
    largest = 0.0
    for row in map(json.loads, path.read_text().splitlines()):
        ranks.setdefault(row["name"], set()).add(row["ranks"])
        of_class = cells.setdefault(
            row["name"], {(w, s): set() for w in ("whole", "by-layer") for s in ("one", "more")}
        )
        for kind, found in row["plans"].items():
            for stages in (
                ("one", "more") if kind in ("prepare", "all") else ("more",) if kind == "stages" else ("one",)
            ):
                is_said = isinstance(found, str)
                largest = largest if is_said else max(largest, found)
                outcome = "refused" if is_said else "exact" if found <= TOLERANCE else "wrong"
                of_class[row["weights"], stages].add("failed" if row["outcome"] == "failed" else outcome)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, of_class in cells.items():
        numbers = ", ".join(map(str, sorted(ranks[name])))
        key = (numbers, *(" and ".join(sorted(outcomes)) for outcomes in of_class.values()))
        groups.setdefault(key, []).append(name)
    heading = "| classes | ranks | whole, one stage | whole, stages | by layer, one stage | by layer, stages |"
    lines = [f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in groups.items()]
    return "\n".join(
        [heading, "|" + " --- |" * 6, *lines, "", f"Largest difference: {largest:.1e} of the largest change"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default=",".join(CLASSES), help="names, separated by commas")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--out", default="", help="file of JSON lines; rows that are in it are not computed again")
    parser.add_argument("--table", default="", help="a file of rows, to print as a table; nothing is computed")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(Path(arguments.table)))
        return
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(Path(__file__).parents[1]))
    warnings.filterwarnings("ignore")
    import_once()
    out, done, counts = Path(arguments.out) if arguments.out else None, set(), Counter[str]()
    if out and out.exists():
        rows = map(json.loads, out.read_text().splitlines())
        done = {(row["name"], row["ranks"], row["weights"], row["adapters"]) for row in rows}
    for num_ranks in map(int, arguments.ranks.split(",")):
        for name in arguments.classes.split(","):
            for weights, is_adapted in MODES:
                if (name, num_ranks, weights, is_adapted) in done:
                    continue
                row = row_of(name, num_ranks, weights, is_adapted)
                counts[row["outcome"]] += 1
                print(json.dumps(row), flush=True)
                if out:
                    with out.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main()
