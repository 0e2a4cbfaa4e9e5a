"""lengthwise.compile under DistributedDataParallel beside torch.compile alone: overlap of sums, recompiles, step time.

    python benchmarks/compile_ddp.py                        # two ranks of one thread on this machine; many minutes
    python benchmarks/compile_ddp.py --backend aot_eager    # the same graphs without generated code; a minute

A rank's gradients are summed bucket by bucket. *Lead* says how early: of the time from the beginning of a backward to
the start of its last sum, the mean share that is left when the sum of a gradient starts. 0: all start at the end.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lengthwise
from lengthwise.runtime.compile.graphs import GraphCount, allow_shapes

RANKS, LAYERS, WIDTH, VOCABULARY = 2, 6, 192, 257
BUCKET_MIB = 1.0
SHAPES = ((2, 128), (4, 64))
STEPS = 8


class Model(nn.Module):
    """A causal transformer of torch's own layers; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting every token from itself."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Sums:
    """When the sum of each bucket starts in a backward."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, int]] = []

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Note the bucket and sum it."""
        self.starts.append((time.perf_counter(), bucket.buffer().nbytes))
        return allreduce_hook(None, bucket)

    def lead(self, begin_s: float) -> float:
        """The mean share of the backward that is left when a gradient's sum starts."""
        last_s, total = max(start for start, _ in self.starts), sum(size for _, size in self.starts)
        lead = sum(size * (last_s - start) for start, size in self.starts) / total / (last_s - begin_s)
        self.starts = []
        return lead


def made_up(rows: int, length: int) -> dict[str, Tensor]:
    """A batch of one of the shapes."""
    return {"tokens": torch.zeros(rows, length, dtype=torch.int64)}


def way(name: str, backend: str) -> tuple[nn.Module, Sums]:
    """A model that is trained in the way of this name, and when its sums start."""
    torch.manual_seed(0)
    model: nn.Module = Model()
    bucket = BUCKET_MIB if name == "lengthwise.compile(bucket_mib), then DDP" else None
    if name.startswith("lengthwise"):
        model = lengthwise.compile(model, SHAPES, made_up, loss=lambda loss: loss, backend=backend, bucket_mib=bucket)
    wrapped, sums = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB), Sums()
    wrapped.register_comm_hook(None, sums.hook)
    return (torch.compile(wrapped, dynamic=False, backend=backend) if name.startswith("torch") else wrapped), sums


WAYS = (
    "DDP, not compiled",
    "lengthwise.compile, then DDP",
    "lengthwise.compile(bucket_mib), then DDP",
    "torch.compile of DDP",
)


def rank(number: int, store: str, out: str, backend: str) -> None:
    """Train in all ways in turn, step by step, as one rank."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{store}-kernels-{number}"  # none of an earlier run, or of the other rank
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    allow_shapes(4 * len(SHAPES))
    rows = []
    plain, plain_sums = way(WAYS[0], backend)
    for name in WAYS:
        torch.compiler.reset()  # else graphs of the way before would be taken
        begin_s = time.perf_counter()
        trained, sums = way(name, backend)
        warm_up_s, graphs = time.perf_counter() - begin_s, GraphCount()
        ratios, leads, compiling_s = [], [], 0.0
        for step in range(STEPS):
            batch = {"tokens": torch.randint(VOCABULARY, SHAPES[step % len(SHAPES)])}
            plain_s, _ = timed(plain, plain_sums, batch)
            step_s, lead = timed(trained, sums, batch)
            if graphs.new():
                compiling_s += step_s - plain_s
                continue
            ratios.append(plain_s / step_s)
            leads.append(lead)
        rows.append(
            {
                "way": name, "over DDP": median(ratios), "lead": median(leads), "warm-up s": warm_up_s,
                "steps that compile": STEPS - len(ratios), "compiling in steps s": compiling_s,
            }
        )  # fmt: skip
    if number == 0:
        with open(out, "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def timed(model: nn.Module, sums: Sums, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of a forward and backward, and the lead of its sums."""
    dist.barrier()
    begin_s = time.perf_counter()
    loss = model(**batch)
    backward_s = time.perf_counter()
    loss.backward()
    end_s = time.perf_counter()
    return end_s - begin_s, sums.lead(backward_s)


def main() -> int:
    """Print a table of all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    backend = parser.parse_args().backend
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        mp.start_processes(partial(rank), (f"{folder}/store", out, backend), nprocs=RANKS, start_method="spawn")
        with open(out) as file:
            rows = json.load(file)
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(value if isinstance(value, str) else f"{value:.2f}" for value in row.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
