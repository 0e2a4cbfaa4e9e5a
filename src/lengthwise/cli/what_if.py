"""What if: lengths, a model and a cluster named on the command line, and the planning problem they make."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.scheme import Method
from lengthwise.core.specs import DEVICES, ClusterSpec, cluster_preset, nearest
from lengthwise.data.source import SourceFile
from lengthwise.data.store import open_index
from lengthwise.data.synthetic import NAMES, synthetic_lengths
from lengthwise.data.units import open_lengths
from lengthwise.plan.pool import DEFAULT_METHODS
from lengthwise.plan.problem import Problem

SYNTHETIC_SEQUENCES = 100_000


def check_longest(problem: Problem, lengths: LengthIndex) -> None:
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
    if path.is_dir():
        return open_index(path).lengths
    if path.is_file():
        file = SourceFile(path=source, name=source, size=path.stat().st_size, mtime_ns=0)
        try:
            return LengthIndex(lengths=open_lengths(file))
        except InputError as error:
            raise InputError(f"--lengths {source}: {error}") from None
    raise InputError(
        f"--lengths {source}: no .npy file, no index folder and no synthetic distribution of that name; "
        f"{nearest(source, NAMES)}"
    )


def make_cluster(device: str, num_devices: int, *, devices_per_node: int, memory_gib: float | None) -> ClusterSpec:
    """Nodes of ``devices_per_node`` devices; one smaller node where there are fewer.

    Raises:
        InputError: no such device, or the devices do not fill whole nodes.
    """
    if device not in DEVICES:
        raise InputError(f"--device {device}: no such device; {nearest(device, DEVICES)}")
    if devices_per_node < 1 or num_devices < 1:
        raise InputError(f"--gpus {num_devices} in nodes of {devices_per_node}: at least 1 of each is needed")
    inside = min(devices_per_node, num_devices)
    if num_devices % inside:
        raise InputError(
            f"--gpus {num_devices} do not fill nodes of {inside}; give a multiple of it or --devices-per-node"
        )
    return cluster_preset(f"{num_devices // inside}x{inside}x{device}", memory_gib=memory_gib)


def parse_counts(words: str, option: str) -> list[int]:
    """Whole numbers from ``64,128``; each once, in the order given."""
    parts = [part.strip() for part in words.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise InputError(f"{option} {words} is not a list of numbers of devices, such as 64 or 64,128,256")
    return list(dict.fromkeys(map(int, parts)))


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
            raise InputError(f"{option} {words}: no {name!r}; {nearest(name, known)}")
    return names


def parse_methods(words: str | None) -> tuple[Method, ...]:
    """Methods from ``ulysses,ring``; ``DEFAULT_METHODS`` where none is given. Dense is always there, at degree 1."""
    known = [str(method) for method in Method if method is not Method.DENSE]
    return DEFAULT_METHODS if words is None else tuple(map(Method, parse_names(words, known, "--methods")))
