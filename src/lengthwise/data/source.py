"""What is to be indexed: the files under a folder in a fixed order, one file, or Python's own standard library."""

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from lengthwise.core.errors import InputError


class Format(StrEnum):
    """How a file is read."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    NPY = "npy"
    FASTA = "fasta"


_FORMAT_OF_SUFFIX = {
    ".jsonl": Format.JSONL,
    ".parquet": Format.PARQUET,
    ".npy": Format.NPY,
    ".fa": Format.FASTA,
    ".fasta": Format.FASTA,
    ".fna": Format.FASTA,
}
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


class SourceFile(NamedTuple):
    """One file: where it is, what it is called in the index, and what tells that it changed."""

    path: str
    name: str
    size: int
    """Bytes; -1 when the file cannot be read at all (a broken link)."""
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The files of a corpus, in the order their sequences are numbered."""

    label: str
    format: Format
    files: tuple[SourceFile, ...]
    is_folder: bool

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(max(file.size, 0) for file in self.files)


def find_standard_library() -> Sources:
    """The .py files of the running interpreter's standard library, tests included, installed packages not."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = tuple(sorted(_walk(root, globs=("*.py",), skip=_NOT_STANDARD_LIBRARY), key=_name))
    if not files:
        raise InputError(f"this Python has no standard library as .py files under {root}; index a folder instead")
    return Sources(label="python-stdlib", format=Format.TEXT, files=files, is_folder=True)


def find_sources(source: Path, *, globs: tuple[str, ...] = (), format: Format | None = None, out: Path) -> Sources:
    """The files of ``source``, sorted by name; ``out`` is never taken for a source.

    Hidden files and folders are passed over, links to folders are not followed. A pattern of ``globs`` matches a file
    name or the path below ``source``; its ``*`` crosses folders.

    Raises:
        InputError: nothing is there, or a folder mixes formats.
    """
    if source.is_file():
        if globs:
            raise InputError(f"--glob chooses files in a folder, but {source} is a file; leave --glob out")
        chosen = format or _FORMAT_OF_SUFFIX.get(source.suffix.lower(), Format.TEXT)
        return Sources(label=str(source), format=chosen, files=(_source_file(source, source.name),), is_folder=False)
    if not source.is_dir():
        raise InputError(f"no file or folder at {source}; give the folder or file to index, or --python-stdlib")
    files = tuple(sorted(_walk(source, globs=globs, out=out.resolve()), key=_name))
    if not files:
        pattern = f" that matches {' or '.join(globs)}" if globs else ""
        raise InputError(f"{source} holds no file{pattern}; hidden files and folders are passed over")
    return Sources(label=str(source), format=format or _common_format(source, files), files=files, is_folder=True)


def _common_format(source: Path, files: tuple[SourceFile, ...]) -> Format:
    counts = Counter(_FORMAT_OF_SUFFIX.get(Path(file.name).suffix.lower(), Format.TEXT) for file in files)
    if len(counts) > 1:
        mix = ", ".join(f"{count:,} {format.value}" for format, count in sorted(counts.items()))
        raise InputError(
            f"{source} mixes formats ({mix}); choose files with --glob '*.jsonl', "
            "or read every file as one text with --format text"
        )
    return next(iter(counts))


def _walk(
    root: Path, *, globs: tuple[str, ...], skip: frozenset[str] = frozenset(), out: Path | None = None
) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        if out is not None:
            folders[:] = [name for name in folders if (Path(folder) / name).resolve() != out]
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            if not name.startswith(".") and _matches(relative, name, globs):
                file = _source_file(path, relative)
                if file.mtime_ns >= 0:
                    yield file


def _matches(relative: str, name: str, globs: tuple[str, ...]) -> bool:
    spellings = (name, relative, f"/{relative}")  # the last lets **/*.py match at the top too
    return not globs or any(fnmatchcase(spelling, pattern) for spelling in spellings for pattern in globs)


def _source_file(path: Path, name: str) -> SourceFile:
    try:
        status = path.stat()
    except OSError:
        return SourceFile(path=str(path), name=name, size=-1, mtime_ns=0)
    if not stat.S_ISREG(status.st_mode):  # sockets and pipes are no documents
        return SourceFile(path=str(path), name=name, size=-1, mtime_ns=-1)
    return SourceFile(path=str(path), name=name, size=status.st_size, mtime_ns=status.st_mtime_ns)


def _name(file: SourceFile) -> str:
    return file.name
