"""What is to be indexed: the files under a folder in a fixed order, one file, or Python's own standard library."""

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lengthwise.core.errors import InputError
from lengthwise.index.readers.biology import (
    FASTA_SUFFIXES,
    OTHER_FORMATS,
    is_fasta,
    is_other_format,
    other_format_refused,
)
from lengthwise.index.readers.compressed import SUFFIXES
from lengthwise.index.readers.hf_saved import choose_split, data_files, is_saved
from lengthwise.index.readers.json_array import json_format
from lengthwise.index.source_file import Format, SourceFile, source_file

_FORMAT_OF_SUFFIX = {
    ".jsonl": Format.JSONL,
    ".jsonlines": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".parquet": Format.PARQUET,
    ".npy": Format.NPY,
    ".fa": Format.FASTA,
    ".fasta": Format.FASTA,
    ".fna": Format.FASTA,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
    ".tar": Format.TAR,
    ".tgz": Format.TAR,
    ".tar.gz": Format.TAR,
}
_UNPACKED = (".jsonl", ".jsonlines", ".ndjson", ".json", ".fa", ".fasta", ".fna", *FASTA_SUFFIXES)
"""Suffixes of files that are also read where .gz or .zst follows."""
_JSON, _SHEETS = ".json", (".csv", ".tsv")
_MEGATRON = (".idx", ".bin")
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


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


def find_sources(
    source: Path, *, globs: tuple[str, ...] = (), format: Format | None = None, split: str = "", out: Path
) -> Sources:
    """The files of ``source``, sorted by name; ``out`` is never taken for a source.

    Hidden files and folders are passed over, links to folders are not followed. A pattern of ``globs`` matches a file
    name or the path below ``source``; its ``*`` crosses folders. A folder written by Hugging Face's ``save_to_disk``
    is the data files it lists, in that order, of ``split`` if it has splits. ``source`` may also be the prefix that
    Megatron's ``.bin`` and ``.idx`` have in common.

    Raises:
        InputError: nothing is there, or a folder mixes formats.
    """
    if source.is_dir() and is_saved(source) and format in (None, Format.ARROW):
        return _saved_sources(source, globs=globs, split=split)
    if split:
        raise InputError(f"--split {split}: {source} is no dataset saved by Hugging Face's save_to_disk; leave it out")
    if source.is_dir():
        return _folder_sources(source, globs=globs, format=format, out=out)
    if not source.is_file() and not _has_twin(source, _MEGATRON[0]):
        raise InputError(f"no file or folder at {source}; give the folder or file to index, or --python-stdlib")
    if globs:
        raise InputError(f"--glob chooses files in a folder, but {source} is a file; leave --glob out")
    prefix = source.with_suffix("") if source.is_file() and source.suffix in _MEGATRON else source
    file = source_file(source, source.name)
    chosen = format or (_common_format(source, (file,)) if source.is_file() else Format.MEGATRON)
    files = _pair(prefix, prefix.name) if chosen is Format.MEGATRON else (file,)
    return Sources(label=str(source), format=chosen, files=files, is_folder=False)


def _saved_sources(source: Path, *, globs: tuple[str, ...], split: str) -> Sources:
    if globs:
        raise InputError(f"{source} is a saved dataset, which lists its own files; leave --glob out")
    dataset = choose_split(source, split)
    files = tuple(source_file(path, path.relative_to(source).as_posix()) for path in data_files(dataset))
    return Sources(label=str(dataset), format=Format.ARROW, files=files, is_folder=True)


def _folder_sources(source: Path, *, globs: tuple[str, ...], format: Format | None, out: Path) -> Sources:
    files = tuple(sorted(_walk(source, globs=globs, out=out.resolve()), key=_name))
    if not files:
        pattern = f" that matches {' or '.join(globs)}" if globs else ""
        raise InputError(f"{source} holds no file{pattern}; hidden files and folders are passed over")
    chosen = format or _common_format(source, files)
    if chosen is Format.MEGATRON:
        strangers = [file.name for file in files if Path(file.name).suffix not in _MEGATRON]
        if strangers:
            raise InputError(f"{source}: {strangers[0]} is no .bin or .idx file; choose with --glob '*.idx'")
        prefixes = dict.fromkeys(Path(file.name).with_suffix("").as_posix() for file in files)
        files = tuple(file for prefix in prefixes for file in _pair(source / prefix, prefix))
    return Sources(label=str(source), format=chosen, files=files, is_folder=True)


def _pair(prefix: Path, name: str) -> tuple[SourceFile, SourceFile]:
    """The .idx and the .bin of a Megatron data set."""
    index, data = (source_file(Path(f"{prefix}{suffix}"), f"{name}{suffix}") for suffix in _MEGATRON)
    for file, other in ((index, data), (data, index)):
        if file.size < 0:
            raise InputError(f"{other.name} has no {Path(file.path).name} beside it; a Megatron data set is both files")
    return index, data


def _has_twin(prefix: Path, suffix: str) -> bool:
    return Path(f"{prefix}{suffix}").is_file()


def _suffix_of(path: Path) -> str:
    """The suffix that says the format: that of the packed file, where .gz or .zst follows it."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    if suffix not in SUFFIXES:
        return suffix
    return inner if inner in (*_UNPACKED, *_SHEETS, *OTHER_FORMATS) else inner + suffix


def _format_of(file: SourceFile) -> Format | str:
    """The format by the file's name, and of some by what they begin with; a suffix of one that is not read as it is.

    A .bin or .idx is Megatron's only with the other one beside it.
    """
    path = Path(file.path)
    suffix = _suffix_of(path)
    if suffix in _MEGATRON:
        other = _MEGATRON[1 - _MEGATRON.index(suffix)]
        return Format.MEGATRON if _has_twin(path.with_suffix(""), other) else Format.TEXT
    if suffix == _JSON and file.size >= 0:
        return json_format(file) or _JSON
    if suffix in FASTA_SUFFIXES:
        return Format.FASTA if is_fasta(file) else Format.TEXT
    return suffix if suffix in _SHEETS or is_other_format(file, suffix) else _FORMAT_OF_SUFFIX.get(suffix, Format.TEXT)


def _common_format(source: Path, files: tuple[SourceFile, ...]) -> Format:
    """The format of all files; settings of JSON, which are no rows, are texts among texts.

    Raises:
        InputError: formats are mixed, or there is none that is read.
    """
    formats = [_format_of(file) for file in files]
    counts = Counter(Format.TEXT if format == _JSON else format for format in formats)
    if len(counts) > 1:
        mix = ", ".join(f"{count:,} {format.removeprefix('.')}" for format, count in sorted(counts.items()))
        common, _ = Counter(_suffix_of(Path(file.path)) for file in files).most_common(1)[0]
        raise InputError(
            f"{source} mixes formats ({mix}, by what files hold); choose files by their names, as with "
            f"--glob '*{common}', or read every file as one text with --format text"
        )
    if Format.TEXT not in formats and _JSON in formats:
        raise InputError(
            f"{files[0].name} is neither JSON lines nor a JSON array of rows; write an object a line, or read every "
            "file as one text with --format text"
        )
    if isinstance(formats[0], Format):
        return formats[0]
    if _JSON in formats:
        return Format.TEXT
    if formats[0] in OTHER_FORMATS:
        raise other_format_refused(files[0], formats[0])
    raise InputError(
        f"{files[0].name} is a {formats[0]} table, which is not read; write it as Parquet "
        "(pandas: read_csv, then to_parquet), or read every file as one text with --format text"
    )


def _walk(
    root: Path, *, globs: tuple[str, ...], skip: frozenset[str] = frozenset(), out: Path | None = None
) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        if out is not None:
            folders[:] = [name for name in folders if (Path(folder) / name).resolve() != out]
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            if not name.startswith(".") and _matches(relative, name, globs):
                file = source_file(path, relative)
                if file.mtime_ns >= 0:
                    yield file


def _refuse_folder(error: OSError) -> None:
    raise InputError(
        f"the folder {error.filename} cannot be read: {error.strerror}; mend its permissions, or index other folders"
    )


def _matches(relative: str, name: str, globs: tuple[str, ...]) -> bool:
    spellings = (name, relative, f"/{relative}")  # the last lets **/*.py match at the top too
    return not globs or any(fnmatchcase(spelling, pattern) for spelling in spellings for pattern in globs)


def _name(file: SourceFile) -> str:
    return file.name
