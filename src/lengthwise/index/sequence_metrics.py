"""Metrics of an index: one number per sequence, made by ``lengthwise analyze``, in the folder ``metrics`` beside it.

NAME.npy holds the values, NAME.order.npy the ids from the smallest to the largest value, NAME.json what they are. The
last is written last: without it there is no metric.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lengthwise.core.atomic_write import shell_word
from lengthwise.core.correlation import pearson, ranks
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, read_json
from lengthwise.index.array_file import load_array

FOLDER = "metrics"
"""In the folder of the index."""
METRIC_VERSION = 1
DTYPES = ("<i8", "<f4", "<f8")
"""What values are stored as."""

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One number per sequence of an index."""

    name: str
    values: np.ndarray
    """[num_sequences] int64, float32 or float64, all finite; read-only."""
    order: np.ndarray | None
    """[num_sequences] int64, the ids from the smallest to the largest value, equal ones by id; read-only."""
    digest: str
    """Sixteen hex digits over the index and the values."""
    info: dict[str, Any]
    """What NAME.json holds."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class MetricFiles:
    """Where a metric of an index is."""

    index: Path
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"{self.name!r} cannot name a metric; use letters, digits, - and _")

    @property
    def folder(self) -> Path:
        """Folder of all metrics of the index."""
        return self.index / FOLDER

    @property
    def values(self) -> Path:
        """One number per sequence."""
        return self.folder / f"{self.name}.npy"

    @property
    def order(self) -> Path:
        """Ids by value."""
        return self.folder / f"{self.name}.order.npy"

    @property
    def info(self) -> Path:
        """File that describes the metric; its presence says that the others are complete."""
        return self.folder / f"{self.name}.json"

    @property
    def parts(self) -> Path:
        """Finished blocks of an analysis that goes on."""
        return self.folder / f"{self.name}.parts"

    def read_info(self) -> dict[str, Any]:
        """What NAME.json holds.

        Raises:
            InputError: there is none, or it is of another version.
        """
        if not self.info.is_file():
            raise InputError(self._why_none())
        try:
            info: Any = read_json(self.info, what="that of a metric")
        except InputError as error:
            raise InputError(f"{error}; {self._again}") from None
        if not isinstance(info, dict) or "schema_version" not in info:
            raise InputError(f"{self.info} is not that of a metric; {self._again}")
        if (version := info["schema_version"]) != METRIC_VERSION:
            raise InputError(
                f"{self.info} has schema version {brief(version)}, this program reads {METRIC_VERSION}; {self._again}"
            )
        files = info.get("files")
        file_names = {self.values.name, self.order.name}
        is_whole = (
            all(isinstance(info.get(name), str) for name in ("index_digest", "digest"))
            and type(info.get("num_sequences")) is int
            and isinstance(files, dict)
            and self.values.name in files
            and files.keys() <= file_names
            and all(type(size) is int for size in files.values())
            and (self.order.name not in files or isinstance(info.get("order_digest"), str))
        )
        if not is_whole:
            raise self.damaged(f"{self.info.name} lacks a value, or has one of another type")
        return info

    def _why_none(self) -> str:
        if self.parts.is_dir():
            return (
                f"the analysis of metric {self.name!r} of {self.index} is not finished; run the same "
                "`lengthwise analyze` command again to finish it"
            )
        names = metric_names(self.index)
        there = f"the metrics there are {', '.join(names)}" if names else "there is none yet"
        return (
            f"no metric {self.name!r} beside {self.index}; {there}; make one with: "
            f"lengthwise analyze {shell_word(self.index)} --metric loss=MODEL --name {shell_word(self.name)}"
        )

    @property
    def _again(self) -> str:
        return "analyze again with --restart"

    def damaged(self, what: str) -> InputError:
        """The error of a file that is not the one that was written."""
        return InputError(f"metric {self.name!r} of {self.index} is damaged: {what}; {self._again}")


def metric_names(index_folder: Path) -> list[str]:
    """Names of the finished metrics of an index."""
    return sorted(path.stem for path in (index_folder / FOLDER).glob("*.json"))


def open_metric(index_folder: Path, name: str, *, digest: str) -> Metric:
    """The metric called ``name`` of the index in ``index_folder``, whose digest is ``digest``.

    Reads every value once, to check it; keeps nothing in memory.

    Raises:
        InputError: there is none, it is of an index of another digest, or its files are not the ones it lists.
    """
    files = MetricFiles(index=Path(index_folder), name=name)
    info = files.read_info()
    if info["index_digest"] != digest:
        raise InputError(
            f"metric {name!r} beside {files.index} was made of another index (digest "
            f"{brief(info['index_digest'])[1:-1]}, this one has {digest}); {files._again}"
        )
    for file, size in info["files"].items():
        path = files.folder / file
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise files.damaged(
                f"{file} " + ("is missing" if actual is None else f"has {actual:,} bytes, not {size:,}")
            )
    values = _load(files, files.values)
    order = _load(files, files.order) if files.order.name in info["files"] else None
    if values.dtype.str not in DTYPES or values.shape != (info["num_sequences"],):
        raise files.damaged(f"{files.values.name} holds {values.dtype} of shape {values.shape}")
    if not np.isfinite(values).all():
        raise files.damaged(f"{files.values.name} holds values that are not finite")
    if order is not None and (order.dtype.kind not in "iu" or order.shape != values.shape):
        raise files.damaged(f"{files.order.name} holds {order.dtype} of shape {order.shape}")
    if values_digest(values, index_digest=digest) != info["digest"]:
        raise files.damaged(f"the values in {files.values.name} are not the ones that were written")
    if order is not None and order_digest(order) != info["order_digest"]:
        raise files.damaged(f"the ids in {files.order.name} are not the ones that were written")
    return Metric(name=name, values=values, order=order, digest=info["digest"], info=info)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write one of a metric's arrays, whole or not at all."""
    _whole(path, lambda file: np.save(file, array))


def save_json(path: Path, document: dict[str, Any]) -> None:
    """Write what is to be known of them, whole or not at all."""
    _whole(path, lambda file: file.write(json.dumps(document, indent=1).encode() + b"\n"))


def finish(files: MetricFiles, *, index_digest: str, lengths: np.ndarray, details: dict[str, Any]) -> dict[str, Any]:
    """Write NAME.json beside the finished arrays: from here on there is a metric. Returns what it holds.

    Args:
        files: of which values and, if there is one, the order are in place.
        index_digest: of the index.
        lengths: [num_sequences] of its sequences.
        details: what else is to be known, such as how the values were made.
    """
    values = _load(files, files.values)
    present = [path for path in (files.values, files.order) if path.is_file()]
    info = {
        "schema_version": METRIC_VERSION,
        "name": files.name,
        **details,
        "num_sequences": len(values),
        "dtype": values.dtype.name,
        "index_digest": index_digest,
        "digest": values_digest(values, index_digest=index_digest),
        "files": {path.name: path.stat().st_size for path in present},
        **summary(values, lengths),
    }
    if files.order in present:
        info["order_digest"] = order_digest(_load(files, files.order))
    save_json(files.info, info)
    return info


def summary(values: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Smallest, mean and largest value, quantiles, and the correlation with length (None where nothing varies)."""
    wide = values.astype(np.float64)
    quantiles = np.quantile(wide, QUANTILES)
    return {
        "min": values.min().item(),
        "mean": float(wide.mean()),
        "max": values.max().item(),
        "quantiles": {f"p{round(100 * share)}": float(value) for share, value in zip(QUANTILES, quantiles)},
        "correlation_with_length": {
            "pearson": pearson(wide, lengths.astype(np.float64)),
            "spearman": pearson(ranks(values), ranks(lengths)),
        },
    }


def _whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def values_digest(values: np.ndarray, *, index_digest: str) -> str:
    """Sixteen hex digits over the index and the values of a metric, in the type they are stored in."""
    return _digest(values, f"{index_digest}/{values.dtype.str}")


def order_digest(order: np.ndarray) -> str:
    """Sixteen hex digits over ids by value."""
    return _digest(order, "order")


def _digest(array: np.ndarray, mark: str) -> str:
    state = blake2b(mark.encode(), digest_size=8)
    for start in range(0, len(array), _BLOCK):
        state.update(np.ascontiguousarray(array[start : start + _BLOCK]).data)
    return state.hexdigest()


def _load(files: MetricFiles, path: Path) -> np.ndarray:
    try:
        return load_array(path, way_out="analyze again with --restart")
    except InputError:
        raise files.damaged(f"{path.name} is no array") from None
