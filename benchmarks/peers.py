"""Balancers and packers of other projects, loaded from a folder that pip filled, each behind one small function.

Packages are imported as they are. Of training libraries only the functions in question are run: their definitions are
taken from the module's source with those imports that are installed, and nothing is put in place of the others. So a
function that needs more than it seems to fails, and is reported.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Split = Callable[[list[int], int], list[list[int]]]
"""Integer works and a number of parts -> positions of each part."""
Pack = Callable[[list[int], int], list[list[int]]]
"""Sizes and a capacity -> positions of each pack."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One function of another project."""

    name: str
    run: Callable[..., Any] | None
    reason: str = ""
    """Why it does not run; empty where it does."""


def splitters(folder: Path | None) -> list[Peer]:
    """Those that deal items to a fixed number of parts."""
    return [
        _peer("verl karmarkar_karp", folder, partial(_verl, name="karmarkar_karp")),
        _peer("verl greedy_partition", folder, partial(_verl, name="greedy_partition")),
        _peer("numberpartitioning karmarkar_karp", folder, _numberpartitioning),
        _peer("prtpy greedy (LPT)", folder, partial(_prtpy, name="greedy")),
        _peer("prtpy multifit", folder, partial(_prtpy, name="multifit")),
        _peer("prtpy karmarkar_karp", folder, partial(_prtpy, name="kk")),
        _peer("binpacking to_constant_bin_number", folder, _binpacking_number),
    ]


def packers(folder: Path | None) -> list[Peer]:
    """Those that fill packs up to a capacity."""
    return [
        _peer("axolotl pack_group (first fit, fed in decreasing order)", folder, _axolotl),
        _peer("LLaMA-Factory greedy_knapsack", folder, _llamafactory),
        _peer("TRL pack_dataset, bfd", folder, _trl),
        _peer("verl rearrange_micro_batches (Karmarkar-Karp, fewest that fit)", folder, _verl_micro_batches),
        _peer("binpacking to_constant_volume", folder, _binpacking_volume),
    ]


def megatron(folder: Path | None) -> Peer:
    """Megatron-Core's scheduler of hybrid context parallelism: lengths, devices, tokens a device -> groups."""
    return _peer("Megatron-Core BalancedCPScheduler", folder, _megatron)


def package(folder: Path | None, name: str) -> ModuleType:
    """An ordinary package from the folder.

    Raises:
        RuntimeError: it cannot be imported; says why.
    """
    _add(folder)
    try:
        return import_module(name)
    except ImportError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def version(folder: Path | None, name: str) -> str:
    """Name and version of an installed package."""
    try:
        found = next(iter(distributions(name=name, path=[str(folder), *sys.path])))
    except (StopIteration, PackageNotFoundError):
        return name
    return f"{name} {found.version}"


def _peer(name: str, folder: Path | None, make: Callable[[Path], Callable[..., Any]]) -> Peer:
    if folder is None:
        return Peer(name=name, run=None, reason="no folder of peers given (--peers)")
    try:
        return Peer(name=name, run=make(folder))
    except Exception as error:  # whatever it is, the others go on
        return Peer(name=name, run=None, reason=f"{type(error).__name__}: {error}".splitlines()[0])


def _add(folder: Path | None) -> None:
    """Behind what is installed, so that nothing of ours changes."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _definitions(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Functions and classes of a module, without importing the package around it."""
    body: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        wanted = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
        if wanted or (isinstance(node, ast.Import | ast.ImportFrom) and _imports(node)):
            body.append(node)
    scope: dict[str, Any] = {"__name__": path.stem}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), scope)
    return scope


def _imports(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import works here; packages from the folder itself only where they stand alone."""
    alone = {"verl", "llamafactory", "axolotl", "trl", "megatron"}
    if getattr(node, "level", 0):
        return False
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
    if any(module.split(".")[0] in alone for module in modules):
        return False
    try:
        exec(compile(ast.Module(body=[node], type_ignores=[]), "import", "exec"), {})
    except ImportError:
        return False
    return True


def _verl(folder: Path, *, name: str) -> Split:
    function = _definitions(folder / "verl/utils/seqlen_balancing.py", [name])[name]
    return lambda work, parts: function(work, parts, equal_size=False)


def _verl_micro_batches(folder: Path) -> Pack:
    """As verl's ``rearrange_micro_batches`` does on one rank, with its own estimate of work."""
    names = ["karmarkar_karp", "get_seqlen_balanced_partitions", "calculate_workload", "ceildiv"]
    found = _definitions(folder / "verl/utils/seqlen_balancing.py", names)

    def run(sizes: list[int], capacity: int) -> list[list[int]]:
        work = found["calculate_workload"](np.array(sizes)).tolist()
        count = min(len(sizes), found["ceildiv"](sum(sizes), capacity))
        while True:
            packs = found["get_seqlen_balanced_partitions"](work, count, equal_size=False)
            if all(sum(sizes[at] for at in pack) <= capacity for pack in packs):
                return packs
            count += 1

    return run


def _numberpartitioning(folder: Path) -> Split:
    function = package(folder, "numberpartitioning").karmarkar_karp
    return lambda work, parts: function(work, num_parts=parts, return_indices=True).partition


def _prtpy(folder: Path, *, name: str) -> Split:
    prtpy = package(folder, "prtpy")
    algorithm = getattr(prtpy.partitioning, name)
    return lambda work, parts: prtpy.partition(algorithm=algorithm, numbins=parts, items=dict(enumerate(work)))


def _binpacking_number(folder: Path) -> Split:
    function = package(folder, "binpacking").to_constant_bin_number
    return lambda work, parts: [list(part) for part in function(dict(enumerate(work)), parts)]


def _binpacking_volume(folder: Path) -> Pack:
    function = package(folder, "binpacking").to_constant_volume
    return lambda sizes, capacity: [list(pack) for pack in function(dict(enumerate(sizes)), capacity)]


def _axolotl(folder: Path) -> Pack:
    _add(folder)
    function = _definitions(folder / "axolotl/utils/samplers/multipack.py", ["pack_group"])["pack_group"]

    def run(sizes: list[int], capacity: int) -> list[list[int]]:
        order = np.argsort(-np.array(sizes), kind="stable")
        packs = function(np.array(sizes)[order], 0, capacity, len(sizes), len(sizes), True)
        return [order[list(pack)].tolist() for pack in packs]

    return run


def _llamafactory(folder: Path) -> Pack:
    path = folder / "llamafactory/data/processor/processor_utils.py"
    function = _definitions(path, ["search_for_fit", "greedy_knapsack"])["greedy_knapsack"]

    def run(sizes: list[int], capacity: int) -> list[list[int]]:
        places: dict[int, list[int]] = {}
        for at, size in enumerate(sizes):
            places.setdefault(size, []).append(at)
        return [[places[size].pop() for size in pack] for pack in function(list(sizes), capacity)]

    return run


def _trl(folder: Path) -> Pack:
    """On a table with one column of tokens, each sequence's filled with its position."""
    names = ["_pack_bfd", "_SegmentTree", "_check_if_columns_can_be_packed"]
    function = _definitions(folder / "trl/data_utils.py", names)["_pack_bfd"]
    arrow = import_module("pyarrow")

    def run(sizes: list[int], capacity: int) -> list[list[int]]:
        tokens = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
        packed = function(arrow.table({"tokens": arrow.ListArray.from_arrays(offsets, tokens)}), capacity)
        return [np.unique(pack).tolist() for pack in packed["tokens"].combine_chunks().to_numpy(zero_copy_only=False)]

    return run


def _megatron(folder: Path) -> Callable[[list[int], int, int], list[list[float]]]:
    path = folder / "megatron/core/pipeline_parallel/hybrid_cp_schedule.py"
    scheduler = _definitions(path, ["BalancedCPScheduler"])["BalancedCPScheduler"]

    def run(sizes: list[int], devices: int, tokens_per_device: int) -> list[list[float]]:
        held = scheduler(tokens_per_device, _Group(devices))
        groups, left = [], sorted(enumerate(sizes), key=lambda item: -item[1])
        while left:
            _, left, times, _ = held.next_hdp_group(left, held.get_total_workload, devices)
            groups.append(times)
        return groups

    return run


class _Group:
    """What the scheduler asks of a process group: how many ranks it has."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks
