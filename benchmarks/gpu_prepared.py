"""A Llama of transformers on one GPU: ``lengthwise.prepare`` beside padded batches of transformers, on the same steps.

python benchmarks/gpu_prepared.py --out FILE            # on a machine with a GPU; a JSON line for every side
python benchmarks/gpu_prepared.py --small --out FILE    # a tiny model on any device, to see that the script works

Both train float32 masters in bfloat16: ours casts the weights, transformers' side runs under autocast, as its Trainer
does. Padded sides take micro-batches of so many sequences, in the order of the draw or sorted by length within the
step, with or without gradient checkpointing.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lengthwise


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and of what it is trained on."""

    hidden: int
    layers: int
    vocabulary: int
    longest: int
    tokens_per_step: int
    steps: int


SIZES = {
    False: Sizes(hidden=2048, layers=16, vocabulary=32_000, longest=16_384, tokens_per_step=65_536, steps=4),
    True: Sizes(hidden=64, layers=2, vocabulary=512, longest=512, tokens_per_step=2_048, steps=3),
}
SIDES = ("prepared", "padded 1", "padded 4 sorted", "padded 4 sorted, checkpointed", "padded 4, checkpointed")


def corpus_of(sizes: Sizes) -> list[np.ndarray]:
    """Log-normal lengths, half below a sixty-fourth of the longest."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(sizes.longest / 64), 1.3, 40_000)
    return [rng.integers(0, sizes.vocabulary, int(length)) for length in np.clip(drawn, 16, sizes.longest)[:4_000]]


def model_of(sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """With random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=max(1, sizes.hidden // 256), max_position_embeddings=sizes.longest, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train_prepared(sizes: Sizes) -> dict[str, Any]:
    """Steps of ``auto``; the sequences of each are noted for the other sides."""
    corpus, dtype = corpus_of(sizes), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        model, profile = model_of(sizes, dtype), Path(folder) / "profile.json"
        begun_s = time.perf_counter()
        run = lengthwise.prepare(
            model, corpus, tokens_per_step=sizes.tokens_per_step, steps=sizes.steps, profile=profile
        )
        wait()
        prepared_s, table = time.perf_counter() - begun_s, json.loads(profile.read_text())
        rows: list[dict[str, Any]] = []
        start_s = time.perf_counter()
        for step in run.steps():
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs).loss)
            result = step.update()
            wait()
            now_s = time.perf_counter()
            pipelines = step.plan.pipelines
            packs = [micro_batch for pipeline in pipelines for micro_batch in pipeline.micro_batches]
            planned = [packs[measured.micro_batch] for measured in step.measured]
            state_bytes = pipelines[0].state_bytes
            measured = {
                "bytes": [[m.peak_bytes, p.peak_bytes - state_bytes] for m, p in zip(step.measured, planned)],
                "micro_batch_s": [[m.time_s, p.time_s] for m, p in zip(step.measured, planned)],
            }  # fmt: skip
            rows.append(
                {
                    "seconds": now_s - start_s, "predicted_s": step.plan.time_s, **measured,
                    "ids": [sequence for pack in packs for sequence in pack.pack.ids],
                    "tokens": sum(sum(pack.pack.lengths) for pack in packs),
                    "scheme": [pipeline.scheme.name for pipeline in pipelines], "packs": len(packs),
                    "loss": None if result is None else result.loss,
                }
            )  # fmt: skip
            start_s = time.perf_counter()
        run.close()
    return {"prepare_s": prepared_s, "steps": rows, "profile": table}


def train_padded(sizes: Sizes, side: str, steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The same sequences step by step, as transformers' Trainer computes them."""
    corpus, device = corpus_of(sizes), "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(sizes, torch.float32).to(device)
    if "checkpointed" in side:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    size, rows = int(side.split()[1].rstrip(",")), []
    for ids in steps:
        start_s, loss_sum = time.perf_counter(), torch.zeros((), device=device)
        ordered = sorted(ids, key=lambda i: len(corpus[i])) if "sorted" in side else list(ids)
        num_targets = sum(len(corpus[i]) - 1 for i in ids)
        for first in range(0, len(ordered), size):
            batch = [corpus[i] for i in ordered[first : first + size]]
            longest = max(map(len, batch))
            tokens = np.zeros((len(batch), longest), dtype=np.int64)
            mask = np.zeros_like(tokens)
            for row, sequence in enumerate(batch):
                tokens[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
            labels = np.where(mask == 1, tokens, -100)
            inputs = {
                name: torch.from_numpy(x).to(device, non_blocking=True)
                for name, x in (("input_ids", tokens), ("labels", labels))
            }
            if mask.min() == 0:
                inputs["attention_mask"] = torch.from_numpy(mask).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(**inputs, num_items_in_batch=num_targets).loss
            loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        rows.append(
            {
                "seconds": time.perf_counter() - start_s, "tokens": sum(len(corpus[i]) for i in ids),
                "loss": float(loss_sum),
            }
        )  # fmt: skip
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"steps": rows, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sides", nargs="*", default=SIDES)
    arguments = parser.parse_args()
    sizes, steps = SIZES[arguments.small], []
    with arguments.out.open("w") as file:
        for side in arguments.sides:
            try:
                row = train_prepared(sizes) if side == "prepared" else train_padded(sizes, side, steps)
            except torch.OutOfMemoryError as error:
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if side == "prepared":
                steps = [step["ids"] for step in row["steps"]]
            line = json.dumps({"side": side, **row})
            print(line[:1500], flush=True)
            file.write(line + "\n")
            file.flush()


if __name__ == "__main__":
    main()
