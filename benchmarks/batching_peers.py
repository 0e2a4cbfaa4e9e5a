"""Batching of other projects, as it is in their packages: cut out of the sources by name and run unchanged.

    pip download --no-deps deepspeed trl llamafactory axolotl     # unpack all into one folder: --peers DIR
    pip install --no-deps --target DIR numba llvmlite             # axolotl's is compiled by numba

Cut out, because importing the packages builds extensions or needs much else. Every function here takes lengths and a
budget and returns batches of sequence ids, and the tokens that are in no batch.
"""

import ast
import bisect
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

Batches = tuple[Sequence[Sequence[int]], int]
"""Ids of each batch, and tokens lost."""
Batching = Callable[[np.ndarray, int], Batches]

TRL_ROWS = 1000
"""Rows that ``datasets.map`` gives to trl's packing at a time, by default."""
AXOLOTL_GROUP = 100_000
"""Sequences that axolotl packs at a time, by default."""
AXOLOTL_BIN = 200
"""Most sequences of a pack, its ``sample_packing_bin_size`` by default."""


def load(folder: Path | None) -> dict[str, Batching]:
    """The peers whose sources are in ``folder``."""
    if folder is None:
        return {}
    sys.path.append(str(folder))
    found: dict[str, Batching] = {}
    for make in (_deepspeed, _trl, _llama_factory, _axolotl):
        try:
            found |= make(folder)
        except (FileNotFoundError, ImportError) as error:
            sys.stdout.write(f"left out: {error}\n")
    return found


def _cut_out(folder: Path, pattern: str, names: Sequence[str], scope: dict[str, Any]) -> SimpleNamespace:
    """Functions and classes of a source file, run in a scope that has what they use."""
    path = next(iter(sorted(folder.glob(pattern))), None)
    if path is None:
        raise FileNotFoundError(f"no {pattern} in the folder of peers")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    exec(compile(tree, str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def _deepspeed(folder: Path) -> dict[str, Batching]:
    silent = SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
    pattern = "deepspeed*/deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py"
    theirs = _cut_out(folder, pattern, ["batch_by_seqlens"], {"random": random, "np": np, "logger": silent})

    def batch(lengths: np.ndarray, budget: int, *, order: str) -> Batches:
        found, _, _ = theirs.batch_by_seqlens(lengths.tolist(), budget, sequence_picking_order=order, seed=0)
        held = [ids for _, ids in found]
        return held, int(lengths.sum()) - sum(int(lengths[ids].sum()) for ids in held)

    return {f"DeepSpeed batch_by_seqlens, {order}": partial(batch, order=order) for order in ("random", "seqlen")}


def _trl(folder: Path) -> dict[str, Batching]:
    import pyarrow as pa
    import pyarrow.compute as pc

    scope = {"pa": pa, "pc": pc, "np": np, "defaultdict": defaultdict, "deque": deque, "Literal": Literal}
    scope["pyarrow"] = pa
    names = ["_SegmentTree", "_check_if_columns_can_be_packed", "_pack_bfd", "_pack_wrapped"]
    theirs = _cut_out(folder, "trl/data_utils.py", names, scope)

    def batch(lengths: np.ndarray, budget: int, *, wrapped: bool) -> Batches:
        """Packs of ids of the sequences that begin in them; a piece of a sequence counts where it lies."""
        packs: list[list[int]] = []
        kept = 0
        for start in range(0, len(lengths), TRL_ROWS):
            held = lengths[start : start + TRL_ROWS]
            offsets = np.concatenate([[0], np.cumsum(held)])
            ids = np.repeat(np.arange(start, start + len(held), dtype=np.int32), held)
            column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids))
            table = pa.table({"input_ids": column})
            packed = theirs._pack_wrapped(table, budget) if wrapped else theirs._pack_bfd(table, budget)
            for row in packed.column("input_ids").combine_chunks():
                inside = row.values.to_numpy()
                kept += len(inside)
                packs.append(inside[np.flatnonzero(np.diff(inside, prepend=-1))].tolist())
        return packs, int(lengths.sum()) - kept

    return {"trl pack_dataset, bfd": partial(batch, wrapped=False), "trl, wrapped": partial(batch, wrapped=True)}


def _llama_factory(folder: Path) -> dict[str, Batching]:
    pattern = "llamafactory/data/processor/processor_utils.py"
    theirs = _cut_out(folder, pattern, ["search_for_fit", "greedy_knapsack"], {"bisect": bisect})

    def batch(lengths: np.ndarray, budget: int) -> Batches:
        ids_of: dict[int, list[int]] = defaultdict(list)
        fitting = np.flatnonzero(lengths <= budget)  # its processor leaves longer ones out
        for i in fitting.tolist():
            ids_of[int(lengths[i])].append(i)
        packs = theirs.greedy_knapsack(lengths[fitting].tolist(), budget)
        return [[ids_of[length].pop() for length in pack] for pack in packs], int(lengths[lengths > budget].sum())

    return {"LLaMA-Factory greedy_knapsack": batch}


def _axolotl(folder: Path) -> dict[str, Batching]:
    import numba

    names = ["pack_group"]
    theirs = _cut_out(folder, "axolotl/utils/samplers/multipack.py", names, {"numba": numba, "np": np})
    theirs.pack_group(np.ones(3, np.int32), 0, 10, 3, 4, True)  # compiled before it is timed

    def batch(lengths: np.ndarray, budget: int) -> Batches:
        fitting = np.flatnonzero(lengths <= budget)  # its preprocessing leaves longer ones out
        held, packs = lengths[fitting].astype(np.int32), []
        for start in range(0, len(held), AXOLOTL_GROUP):
            group = held[start : start + AXOLOTL_GROUP]
            packs += theirs.pack_group(group, start, budget, len(group), AXOLOTL_BIN, True)
        return [fitting[pack].tolist() for pack in packs], int(lengths[lengths > budget].sum())

    return {"axolotl multipack": batch}
