"""The loss of every sequence: ``lengthwise analyze`` beside the usual loop over padded batches of transformers.

Python's standard library, byte-level BPE of 8,192 entries, the first 512 tokens of every file; a Llama of the preset
``llama-tiny`` with random weights, float32. All sides read the same index and the same safetensors; ours runs as the
command does and is timed by it from its first block to the metric on disk, the loop from its first batch to its last.

    python benchmarks/analyze.py            # some ten minutes on two cores
    python benchmarks/analyze.py --quick    # one package of the library, one round
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from clock import timed
from measure import save

from lengthwise.core.specs import model_preset
from lengthwise.index.sequence_metrics import open_metric
from lengthwise.index.store import TokenStore, open_index
from lengthwise.runtime.models.hf_folder import save_pretrained
from lengthwise.runtime.models.registry import build_model

MAX_LENGTH, ROWS, NUM_RANKS = 512, 8, 2
CLOSE = 1e-3
"""Of two float32 losses of about 9."""


def lengthwise(*arguments: object) -> dict:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "lengthwise", *map(str, arguments), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return json.loads(done.stdout)


def ours(store: TokenStore, model: Path) -> tuple[np.ndarray, float]:
    """Losses, and seconds that the command says it took."""
    options = ("--max-length", MAX_LENGTH, "--truncate", "--nproc", NUM_RANKS, "--restart")
    made = lengthwise("analyze", store.path, "--metric", f"loss={model}", *options)
    return open_metric(store.path, "loss", digest=store.digest).values, made["seconds"]


def padded_loop(store: TokenStore, model: Path, *, by_length: bool) -> tuple[np.ndarray, float]:
    """Losses, and seconds of a loop over batches of ``ROWS`` sequences, padded to their longest, on all cores."""
    import transformers

    torch.set_num_threads(NUM_RANKS)
    scored = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lengths = np.minimum(store.lengths.lengths, MAX_LENGTH)
    ids = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(store))
    losses = np.empty(len(store))
    with torch.inference_mode():

        def loop() -> None:
            for rows, tokens, mask in batches(store, ids):
                logits = scored(input_ids=tokens, attention_mask=mask).logits[:, :-1]
                targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
                each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
                losses[rows] = (each.view_as(targets).sum(1) / (targets >= 0).sum(1).clamp(min=1)).numpy()

        _, seconds = timed(loop)
    return losses, seconds


def batches(store: TokenStore, ids: np.ndarray) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Ids, tokens ``[B, T]`` and mask ``[B, T]`` of every batch."""
    for start in range(0, len(ids), ROWS):
        rows = ids[start : start + ROWS]
        held = [torch.from_numpy(store.tokens(int(id))[:MAX_LENGTH].astype(np.int64)) for id in rows]
        tokens = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in held], batch_first=True)
        yield rows, tokens, mask


def main() -> None:
    """Three sides in turn, some rounds; a loss that differs ends the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as work:
        index, model = Path(work, "index"), Path(work, "model")
        source = [Path(sysconfig.get_path("stdlib")) / "json", "--glob", "*.py"] if quick else ["--python-stdlib"]
        lengthwise("index", *source, "--train-bpe", 400 if quick else 8192, "--out", index)
        store = open_index(index)
        torch.manual_seed(0)
        save_pretrained(build_model(model_preset("llama-tiny"), dtype=torch.float32), model)
        sides = {
            "ours, 2 ranks": lambda: ours(store, model),
            "padded, by length": lambda: padded_loop(store, model, by_length=True),
            "padded, as they come": lambda: padded_loop(store, model, by_length=False),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 if quick else 3):
            losses = {}
            for name, side in sides.items():
                losses[name], taken = side()
                seconds[name].append(taken)
                sys.stderr.write(f"{name}: {taken:.1f} s\n")
            assert all(np.abs(found - losses["ours, 2 ranks"]).max() < CLOSE for found in losses.values())
        num_tokens = int(np.minimum(store.lengths.lengths, MAX_LENGTH).sum())
    figures = {name: {"tokens_per_s": num_tokens / median(taken), "seconds": taken} for name, taken in seconds.items()}
    if not quick:
        save("analyze", {"num_sequences": len(store), "num_tokens": num_tokens, "sides": figures})


if __name__ == "__main__":
    main()
