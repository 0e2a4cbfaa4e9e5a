"""Compiled layers with 1, 4 and 8 sizes of packs, beside eager, ``dynamic=True`` and static code for any size.

Trains a small Llama on one device on the files of Python's standard library, a token a byte, in packs as a token budget
fills them. Every way runs in a process of its own with an empty compiler cache; the one with 4 sizes a second time
with the cache that it left, which is what a resumed run finds. Every pack is trained on twice, by layers as they are
and then the way that is measured, so that a drift of the machine meets both; and once more if it had to be compiled
for. On a GPU if there is one, in bfloat16.

    python benchmarks/compile.py            # some twenty minutes on two cores; leave the machine alone meanwhile
    python benchmarks/compile.py --quick    # a few minutes: a tiny model, a few steps
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from measure import save

from lengthwise.core.batch import Pack
from lengthwise.core.specs import ModelSpec
from lengthwise.data.size_buckets import SizeBuckets, packed_lattice
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.runtime.compile import compiled_layers as layers
from lengthwise.runtime.compile.compiled_layers import CompiledLayers
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.train.micro_batch_tensors import feed

WAYS = ("eager", "1 size", "4 sizes", "4 sizes, resumed", "8 sizes", "dynamic=True", "any size, static")
VOCABULARY = 256
STATIC_STEPS = 12
"""Of static code for any size: nearly every step compiles."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained."""

    max_length: int
    budget: int
    num_steps: int
    spec: ModelSpec


def work_of(*, quick: bool) -> Work:
    """A Llama of 4 x 256, or for a quick look of 2 x 64."""
    layers, hidden, budget, num_steps = (2, 64, 512, 8) if quick else (4, 256, 2048, 40)
    spec = ModelSpec(
        name="bytes", num_layers=layers, hidden_size=hidden, ffn_size=hidden * 8 // 3 // 16 * 16, num_heads=4,
        num_kv_heads=4, head_size=hidden // 4, vocab_size=VOCABULARY,
    )  # fmt: skip
    return Work(max_length=budget // 2, budget=budget, num_steps=num_steps, spec=spec)


class Files:
    """The standard library's modules, one to six kilobytes of each, as a budget packs them."""

    def __init__(self, work: Work) -> None:
        rng = np.random.default_rng(0)
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths]
        cut = [text[:end] for text in texts for end in rng.lognormal(np.log(work.max_length / 6), 1, 4).astype(int) + 8]
        self.texts = [text[: work.max_length] for text in cut if len(text)]
        self.budget, self._rng = work.budget, rng

    def tokens(self, sequence: int) -> np.ndarray:
        """Of one text."""
        return self.texts[sequence]

    def packs(self) -> Iterator[Pack]:
        """Steps of four packs' worth of texts at random, packed first fit decreasing; the last pack is rarely full."""
        while True:
            drawn = self._rng.integers(0, len(self.texts), 4 * self.budget // int(np.mean([*map(len, self.texts)])))
            lengths = [len(self.texts[number]) for number in drawn]
            for held in first_fit_decreasing(lengths, self.budget):
                yield Pack(ids=tuple(int(drawn[at]) for at in held), lengths=tuple(lengths[at] for at in held))


def filled(pack: Pack, lattice: SizeBuckets | None) -> Pack:
    """The pack at a size of the lattice."""
    filler = 0 if lattice is None else lattice.size_of(pack.num_tokens) - pack.num_tokens
    return Pack(ids=pack.ids, lengths=pack.lengths, filler=filler)


def compiled_of(way: str, device: torch.device, lattice: SizeBuckets | None) -> CompiledLayers | None:
    """What runs the layers; None: they run as they are."""
    if way == "eager":
        return None
    compiled = CompiledLayers(device, lattice.sizes if lattice else ())
    if way == "dynamic=True":
        halves = (torch.compile(half, dynamic=True) for half in (layers.before_attention, layers.after_attention))
        compiled._before, compiled._after = halves
    return compiled


@dataclass(frozen=True, kw_only=True)
class Step:
    """One pack, trained on as it is by layers as they are, and then the way that is measured."""

    eager_s: float
    way_s: float
    """Nothing being compiled."""
    compiling_s: float
    recompiles: int
    real: int
    computed: int


def train_on(pack: Pack, files: Files, model: Transformer, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one step."""
    device, start_s = next(model.parameters()).device, perf_counter()
    fed = feed(files, pack, device)
    (model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / pack.num_targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start_s


def run(way: str, *, quick: bool) -> dict:
    """Train ``num_steps`` packs one way, each beside eager; what it took."""
    work = work_of(quick=quick)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = Files(work)
    typical = [pack.num_tokens for pack in islice(files.packs(), 256)]
    most = int(way.split()[0]) if way[0].isdigit() else 0
    lattice = packed_lattice(typical, most=most, largest=work.budget) if most else None
    model = build_model(work.spec, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled, start_s = compiled_of(way, device, lattice), perf_counter()
    if compiled is not None:
        compiled.warm_up(model)
    warm_up_s, steps, plain = perf_counter() - start_s, [], model.run_layer
    for pack in islice(files.packs(), STATIC_STEPS if way == "any size, static" else work.num_steps):
        eager_s, whole = train_on(pack, files, model, optimizer), filled(pack, lattice)
        model.run_layer = compiled or plain
        first_s = way_s = train_on(whole, files, model, optimizer)
        if recompiles := compiled.recompiles() if compiled else 0:
            way_s = train_on(whole, files, model, optimizer)
        model.run_layer = plain
        times = {"eager_s": eager_s, "way_s": way_s, "compiling_s": first_s - way_s}
        steps.append(Step(**times, recompiles=recompiles, real=sum(pack.lengths), computed=whole.num_tokens))
    return {
        "way": way,
        "num_steps": len(steps),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "num_sizes": len(lattice.sizes) if lattice else len(set(typical)),
        "warm_up_s": warm_up_s,
        "peak_mib": peak_bytes(device) / 2**20,
        **summary(steps),
    }


def summary(steps: list[Step]) -> dict:
    """Speed, and what compiling took."""
    ratios = [step.eager_s / step.way_s for step in steps]
    return {
        "steps_per_s": 1 / median(step.way_s for step in steps),
        "over_eager": median(ratios),
        "over_eager_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "recompiles": sum(step.recompiles for step in steps),
        "compiling_in_steps_s": sum(step.compiling_s for step in steps),
        "waste": 1 - sum(step.real for step in steps) / sum(step.computed for step in steps),
    }


def peak_bytes(device: torch.device) -> int:
    """Of the process, or on a GPU of its allocator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run every way in a process of its own, or with ``--one`` that one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--one", choices=WAYS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.one, quick=given.quick)))
        return
    found = []
    with tempfile.TemporaryDirectory() as caches:
        for way in given.ways:
            cache = Path(caches, way.removesuffix(", resumed").replace(" ", "-"))  # spaces break C++ builds
            command = [sys.executable, __file__, "--one", way, *(["--quick"] if given.quick else [])]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            line = found[-1]
            print(
                f"{way:18} {line['steps_per_s']:7.2f} steps/s  {line['over_eager']:5.3f}x eager "
                f"({line['over_eager_quartiles'][0]:.3f} to {line['over_eager_quartiles'][1]:.3f})  "
                f"recompiles {line['recompiles']:3}  warm-up {line['warm_up_s']:6.1f} s  in steps "
                f"{line['compiling_in_steps_s']:6.1f} s  peak {line['peak_mib']:7,.0f} MiB  waste {line['waste']:.1%}",
                file=sys.stderr,
            )
    if not given.quick:
        save("compile", {"ways": found})


if __name__ == "__main__":
    main()
