"""One training of the convergence study: a small Llama on part of the demo's corpus, with one order and one scaling."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 20
"""Every so many documents one is held out."""
MAX_LENGTH = 1024
SIZES = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "tie_word_embeddings": True,
}  # fmt: skip
LONG = 256
"""Positions from which on a token counts as one of a long context."""
NUM_POINTS = 10
CLAMP = (0.25, 4.0)
ORDERS = {"shuffled": {"order": "shuffled"}, "curriculum": {"order": "curriculum", "pacing": "root"}}
FIRST_EPOCH = {"curriculum, first epoch": {**ORDERS["curriculum"], "curriculum_epochs": 1}}
"""What is shuffled from the second epoch on."""
SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all trainings of it share."""

    index: str
    every: int
    """One document of so many is trained on."""
    tokens_per_step: int
    num_held_out: int
    """Documents."""
    lr: float
    epochs: int = 1

    def rows(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Sequences to train on, longer ones in pieces, and beginnings of held-out documents."""
        from lengthwise.core.lengths import LengthIndex
        from lengthwise.data.max_length import apply_max_length
        from lengthwise.index.store import open_index

        store = open_index(self.index)
        chosen = [i for i in range(len(store)) if i % self.every == 1 and i % HELD_OUT]
        lengths = LengthIndex(lengths=np.array([len(store.tokens(i)) for i in chosen]))
        view = apply_max_length(lengths, max_length=MAX_LENGTH, rule="split")
        pieces = zip(view.base_ids.tolist(), view.starts.tolist(), view.lengths.lengths.tolist())
        train = [store.tokens(chosen[base])[start : start + length].astype(np.int64) for base, start, length in pieces]
        held_out = [i for i in range(0, len(store), HELD_OUT) if len(store.tokens(i)) >= 2 * LONG]
        spread = np.linspace(0, len(held_out) - 1, min(self.num_held_out, len(held_out))).astype(int)
        return train, [store.tokens(held_out[i])[:MAX_LENGTH].astype(np.int64) for i in spread]


def train(study: Study, order: str, scaling: str, seed: int, out: Path) -> dict[str, Any]:
    """The curves of one training; read from ``out`` where they are there already."""
    told = {"study": asdict(study), "order": order, "scaling": scaling, "seed": seed}
    if out.exists() and (found := json.loads(out.read_text()))["told"] == told:
        return found
    found = {"told": told, **_train(study, order, scaling, seed)}
    out.write_text(json.dumps(found))
    return found


def _train(study: Study, order: str, scaling: str, seed: int) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    import lengthwise as lw
    from lengthwise.core.specs import ModelSpec, cluster_preset
    from lengthwise.cost.analytic.analytic_cost import AnalyticCost
    from lengthwise.index.store import open_index

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    vocab_size = open_index(study.index).vocab_size
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab_size, **SIZES))
    rows, held_out = study.rows()
    spec = ModelSpec(
        name="study", num_layers=3, hidden_size=96, ffn_size=256, num_heads=4, num_kv_heads=4, head_size=24,
        vocab_size=vocab_size, tied_embeddings=True,
    )  # fmt: skip
    cost = AnalyticCost(model=spec, cluster=cluster_preset("1xcpu"), dtype="float32")  # what things take is no matter
    run = lw.prepare(
        model, rows, policy="static", tokens_per_step=study.tokens_per_step, seed=seed, device="cpu", verbose=False,
        cost=cost, lr=lambda step: study.lr * min(1.0, (step + 1) / 10, max(0.1, 1.1 - step / run.num_steps)),
        lr_scaling=scaling, lr_scaling_by="sequences", lr_clamp=CLAMP, epochs=study.epochs,
        **{**ORDERS, **FIRST_EPOCH}[order],
    )  # fmt: skip
    points, train_losses, factors, num_tokens = [evaluate(run, held_out, 0)], [], [], 0
    grad_norms: list[float] = []
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        result = step.update()
        num_tokens += sum(sum(m.pack.lengths) for p in step.plan.pipelines for m in p.micro_batches)
        train_losses.append(result.loss)
        grad_norms.append(result.grad_norm)
        factors.append(step.plan.lr_factor)
        if len(points) * run.num_steps <= NUM_POINTS * run.next_step:
            points.append(evaluate(run, held_out, num_tokens))
    run.close()
    curves = {"points": points, "train": train_losses, "factors": factors, "grad_norms": grad_norms}
    return {**curves, "num_sequences": len(rows)}


def evaluate(run: Any, held_out: list[np.ndarray], num_tokens: int) -> dict[str, float]:
    """Mean loss of held-out tokens: all, the first ``LONG`` of each document, and those after them."""
    import torch
    from torch.nn import functional as F

    near, far = [], []
    with run.plain() as model, torch.no_grad():
        for row in held_out:
            tokens = torch.from_numpy(row)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            losses = F.cross_entropy(logits[:-1], tokens[1:], reduction="none").double().numpy()
            near.append(losses[: LONG - 1])
            far.append(losses[LONG - 1 :])
    both = np.concatenate([*near, *far])
    return {
        "tokens": num_tokens,
        "all": float(both.mean()),
        "near": float(np.concatenate(near).mean()),
        "far": float(np.concatenate(far).mean()),
    }
