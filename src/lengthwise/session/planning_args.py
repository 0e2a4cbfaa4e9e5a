"""What if: lengths, a model and a cluster named on the command line, and the planning problem they make."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method
from lengthwise.core.read_file import brief
from lengthwise.core.specs import DEVICES, ClusterSpec, cluster_preset, nearest, whole_number
from lengthwise.data.synthetic import NAMES, synthetic_lengths
from lengthwise.index.source_file import SourceFile
from lengthwise.index.store import open_index
from lengthwise.index.work_units import open_lengths
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.search_space import DEFAULT_METHODS

SYNTHETIC_SEQUENCES = 100_000
MAX_SIZES = 16
"""Sizes of a cluster that one table compares."""


def check_longest(problem: PlanningProblem, lengths: LengthIndex) -> None:
    """Raise ``InfeasibleError`` if the longest sequence fits under no scheme, in the words of the command line."""
    kind = problem.leanest
    if lengths.max_length <= kind.max_tokens:
        return
    where = int(np.argmax(lengths.lengths))
    raise InfeasibleError(
        f"sequence {where} ({lengths.max_length:,} tokens) {problem.needs(kind, lengths.max_length)} "
        f"Give --max-length {kind.max_tokens} or less, more or larger devices, or allow more schemes with "
        "--max-degree, --max-stages, --methods and --recompute auto."
    )


def open_source(source: str, *, seed: int) -> LengthIndex:
    """The lengths in a .npy file (memory-mapped), of an index, or drawn from a distribution with a name.

    Raises:
        InputError: ``source`` is none of them; the message suggests the nearest name.
    """
    if source in NAMES:
        return LengthIndex(lengths=synthetic_lengths(source, SYNTHETIC_SEQUENCES, seed))
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--lengths {brief(source)[1:-1]}: {reason}") from None
    if is_folder and source:
        try:
            return open_index(path).lengths
        except InputError as error:
            raise InputError(f"--lengths {source}: {error}") from None
    if is_file:
        file = SourceFile(path=source, name=source, size=path.stat().st_size, mtime_ns=0)
        try:
            return LengthIndex(lengths=open_lengths(file))
        except InputError as error:
            raise InputError(f"--lengths {source}: {error}") from None
    raise InputError(
        f"--lengths {brief(source)[1:-1]}: no .npy file, no index folder and no synthetic distribution of that name; "
        f"{nearest(source, NAMES)}"
    )


def make_cluster(device: str, num_devices: int, *, devices_per_node: int, memory_gib: float | None) -> ClusterSpec:
    """Nodes of ``devices_per_node`` devices; one smaller node where there are fewer.

    Raises:
        InputError: no such device, or the devices do not fill whole nodes.
    """
    if device not in DEVICES:
        raise InputError(f"--device {brief(device)[1:-1]}: no such device; {nearest(device, DEVICES)}")
    if devices_per_node < 1 or num_devices < 1:
        raise InputError(f"--gpus {num_devices} in nodes of {devices_per_node}: at least 1 of each is needed")
    inside = min(devices_per_node, num_devices)
    if num_devices % inside:
        raise InputError(
            f"--gpus {num_devices} do not fill nodes of {inside}; give a multiple of it or --devices-per-node"
        )
    try:
        return cluster_preset(f"{num_devices // inside}x{inside}x{device}", memory_gib=memory_gib)
    except InputError as error:
        raise InputError(f"--gpus {num_devices}, --hbm {memory_gib}: {error}") from None


def parse_counts(words: str, option: str) -> list[int]:
    """Whole numbers from ``64,128``; each once, in the order given."""
    counts = [whole_number(part.strip()) for part in words.split(",")]
    if not all(counts) or len(counts) > MAX_SIZES:
        raise InputError(
            f"{option} {brief(words)} is not a list of numbers of devices, at most {MAX_SIZES}, such as "
            "64 or 64,128,256"
        )
    return list(dict.fromkeys(count for count in counts if count))


def parse_names(words: str | None, known: Sequence[str], option: str) -> list[str]:
    """Names from ``a,b``, each once, checked; all that are known where none is given.

    Raises:
        InputError: a name is not known; the message suggests the nearest.
    """
    if words is None:
        return list(known)
    names = list(dict.fromkeys(part.strip() for part in words.split(",")))
    for name in names:
        if name not in known:
            raise InputError(f"{option} {brief(words)[1:-1]}: no {brief(name)}; {nearest(name, known)}")
    return names


def parse_methods(words: str | None) -> tuple[Method, ...]:
    """Methods from ``ulysses,ring``; ``DEFAULT_METHODS`` where none is given. Dense is always there, at degree 1."""
    known = [str(method) for method in Method if method is not Method.DENSE]
    return DEFAULT_METHODS if words is None else tuple(map(Method, parse_names(words, known, "--methods")))
