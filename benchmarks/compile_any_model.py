"""Layers of models of transformers compiled around their attention, beside the same steps uncompiled.

Two runs of `lengthwise.prepare` in one process, one with compile=True, train on the same steps in turn, so that a drift
of the machine meets both: files of Python's standard library, a token a byte, eight of them a step. Figures are medians
over steps of the CPU seconds that the forwards and backwards of one took over those of the other, on one thread,
without steps in which something was compiled.

    python benchmarks/compile_any_model.py [--steps 16] [--models llama gpt2]
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from measure import save

import lengthwise as lw

MAX_LENGTH, SEQUENCES_PER_STEP, MEMORY_GIB = 512, 8, 2
SIZES = {"vocab_size": 256, "num_layers": 4, "width": 256, "num_heads": 4}


def rows(count: int) -> list[np.ndarray]:
    """The beginnings of modules, of ragged lengths."""
    rng = np.random.default_rng(0)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths if path.stat().st_size]
    ends = rng.lognormal(np.log(MAX_LENGTH / 6), 1, count).astype(int) + 8
    return [texts[number % len(texts)][: min(end, MAX_LENGTH)].astype(np.int64) for number, end in enumerate(ends)]


def model_of(name: str, *, dropout: float) -> torch.nn.Module:
    """A small model; with dropout, modules of its layers are compiled instead of layers."""
    import transformers

    torch.manual_seed(0)
    width, heads, layers = SIZES["width"], SIZES["num_heads"], SIZES["num_layers"]
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3 // 16 * 16, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, attention_dropout=dropout,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=width, n_layer=layers, n_head=heads, n_positions=MAX_LENGTH, **drops
    )
    return transformers.GPT2LMHeadModel(config)


def compare(name: str, *, dropout: float, num_steps: int, folder: str) -> dict[str, object]:
    """Train both runs in lockstep; what the compiled one takes."""
    data, runs, begun_s = rows(SEQUENCES_PER_STEP * num_steps), [], []
    for compiled in (False, True):
        start_s = perf_counter()
        profile = f"{folder}/{name}-{dropout}-{compiled}.json"
        run = lw.prepare(
            model_of(name, dropout=dropout), data, policy="static", sequences_per_step=SEQUENCES_PER_STEP,
            steps=num_steps, memory_gib=MEMORY_GIB, verbose=False, compile=compiled, recompute="none", profile=profile,
        )  # fmt: skip
        runs.append(run)
        begun_s.append(perf_counter() - start_s)
    times_s: list[list[float]] = [[], []]
    recompiles, steps = [], [run.steps() for run in runs]
    for number in range(num_steps):
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            run, step = runs[side], next(steps[side])
            start_s = process_time()
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs).loss)
            times_s[side].append(process_time() - start_s)
            step.update()
        recompiles.append(runs[1].num_recompiles)
    names = runs[1].wrapped_model.compiled.names
    for run in reversed(runs):
        run.close()
    ratios = [eager_s / compiled_s for eager_s, compiled_s, new in zip(*times_s, recompiles) if not new]
    return {
        "model": name, "dropout": dropout, "compiled": names, "num_steps": len(ratios), "over_eager": median(ratios),
        "over_eager_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(), "recompiles": sum(recompiles),
        "prepare_s": begun_s[0], "prepare_compiled_s": begun_s[1],
    }  # fmt: skip


def main() -> None:
    """Compare every model, and say what the machine did beside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--models", nargs="*", default=["llama", "gpt2"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    found, load = [], [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            for dropout in (0.0, 0.1) if name == "gpt2" else (0.0,):
                found.append(compare(name, dropout=dropout, num_steps=given.steps, folder=folder))
                print(found[-1], flush=True)
    save("compile_any_model", {"models": found, "load": [*load, os.getloadavg()[0]]})


if __name__ == "__main__":
    main()
