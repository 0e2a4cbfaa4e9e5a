"""What the user asked of an index, and the fingerprint that tells whether two requests are the same."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import MAX_DOCUMENT, MAX_RATIO, Limits
from lengthwise.index.readers.outside_reader import load_reader
from lengthwise.index.source_file import Format
from lengthwise.index.sources import Sources, find_sources, find_standard_library

FORMAT_VERSION = 1
"""Version of the files of an index; an index of another version is refused."""
LOSS_MASK_VERSION = 2
"""Version of the files of an index that says which tokens have a loss, which programs of before would not see."""

_SMALLEST_UNIT_BYTES, _LARGEST_UNIT_BYTES = 2 << 20, 64 << 20
_MAX_UNITS = 4096


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """One request for an index. Everything here decides what the index holds; the number of workers does not."""

    source: Path | None
    """Folder or file; None: Python's standard library."""
    globs: tuple[str, ...] = ()
    format: Format | None = None
    """How files are read; None: by their suffix."""
    reader: str = ""
    """A function from a file's path to its documents, MODULE:FUNCTION or an entry point's name; empty: by format."""
    field: str = ""
    """The JSON key, column or tar member with the text, the tokens or the messages; empty: by the first row."""
    chat: bool = False
    """Whether rows are chats, though their names do not tell."""
    loss: Literal["", "completions", "assistant", "all"] = ""
    """Which tokens of chats have a loss; empty: completions."""
    ignore: tuple[str, ...] = ()
    """Columns beside tokens that are as if they were not there."""
    split: str = ""
    """Which data set of a folder that holds one for each split."""
    tokenizer: str = ""
    """``bytes``, k-mers (``3mer``, ``6mer/3``) or a path to tokenizer.json; empty: bytes."""
    train_bpe: int = 0
    """Vocabulary of a byte-level BPE to train on the corpus; 0: none."""
    append_eos: bool = True
    on_empty: Literal["", "error", "drop"] = ""
    """What happens to documents without a token; empty: drop in folders of text files, error elsewhere."""
    on_binary: Literal["", "error", "skip"] = ""
    """What happens to documents that are no text, files or rows; empty: skip in the standard library, else error."""
    max_document: int = MAX_DOCUMENT
    """Most bytes of a document."""
    on_large: Literal["", "error", "skip"] = ""
    """What happens to larger documents; empty: error."""
    max_ratio: int = MAX_RATIO
    """Most unpacked bytes per byte of a compressed archive."""
    unit_bytes: int = 0
    """Source bytes of a work unit, which a kill loses at most of each worker; 0: by the size of the source."""

    def __post_init__(self) -> None:
        if self.tokenizer and self.train_bpe:
            raise InputError("--tokenizer and --train-bpe exclude each other; leave one out")
        if self.source is None and (self.globs or self.format or self.split):
            raise InputError("--python-stdlib chooses its own files; leave --glob, --format and --split out")
        if self.reader and (self.format or self.field or self.split or self.source is None):
            raise InputError(
                "--reader reads files in its own way; leave --format, --field and --split out, and give SRC"
            )
        if self.field and self.field.rpartition(":")[2] in self.ignore:
            raise InputError(f"--ignore {self.field} and --field {self.field} contradict each other; leave one out")
        if self.format is Format.READER:
            raise InputError("--format reader needs a reader: give --reader MODULE:FUNCTION instead")
        for name, value in (("--max-document", self.max_document), ("--max-ratio", self.max_ratio)):
            if value < 1:
                raise InputError(f"{name} {value}: at least 1 is needed")

    @property
    def limits(self) -> Limits:
        """What a document and an archive may hold."""
        return Limits(document=self.max_document, ratio=self.max_ratio)

    def find(self, out: Path) -> Sources:
        """The files this request is about."""
        if self.source is None:
            return find_standard_library()
        chosen = Format.READER if self.reader else self.format
        return find_sources(self.source, globs=self.globs, format=chosen, split=self.split, out=out)

    def unit_bytes_of(self, sources: Sources) -> int:
        """Source bytes of a work unit: seconds of work, and thousands of units even for a terabyte."""
        even = sources.num_bytes // _MAX_UNITS
        return self.unit_bytes or min(max(even, _SMALLEST_UNIT_BYTES), _LARGEST_UNIT_BYTES)

    def drops_empty(self, sources: Sources) -> bool:
        """Whether empty documents are dropped (and counted) rather than refused."""
        by_default = sources.is_folder and sources.format is Format.TEXT
        return self.on_empty == "drop" or (not self.on_empty and by_default)

    def skips_binary(self) -> bool:
        """Whether documents that are no text, files or rows, are left out (and counted) rather than refused."""
        return self.on_binary == "skip" or (not self.on_binary and self.source is None)

    def to_json(self, sources: Sources, *, fields: dict[str, Any], tokenizer_digest: str) -> dict[str, Any]:
        """The request in plain values, as kept in index.json and compared before a build goes on.

        ``fields``: what is read of every row.
        """
        return {
            "source": sources.label,
            "globs": list(self.globs),
            "format": sources.format.value,
            **fields,
            "tokenizer": self.tokenizer or (f"train-bpe {self.train_bpe}" if self.train_bpe else "bytes"),
            "tokenizer_digest": tokenizer_digest,
            "append_eos": self.append_eos,
            "on_empty": "drop" if self.drops_empty(sources) else "error",
            "on_binary": "skip" if self.skips_binary() else "error",
            "unit_bytes": self.unit_bytes_of(sources),
            "files": files_digest(sources),
            **({"reader_digest": load_reader(self.reader).source_digest} if self.reader else {}),
            **({"ignore": sorted(set(self.ignore))} if self.ignore else {}),
            **self._unusual(),
        }

    def _unusual(self) -> dict[str, Any]:
        """Limits other than the usual ones; those are left out, as indexes of earlier versions know none."""
        usual = {"max_document": MAX_DOCUMENT, "on_large": "error", "max_ratio": MAX_RATIO}
        asked = {"max_document": self.max_document, "on_large": self.on_large or "error", "max_ratio": self.max_ratio}
        return {name: value for name, value in asked.items() if value != usual[name]}


def files_digest(sources: Sources) -> str:
    """Changes when a file is added, removed, renamed, resized or written to."""
    state = hashlib.blake2b(digest_size=16)
    for file in sources.files:
        state.update(os.fsencode(os.path.abspath(file.path)))
        state.update(f"\0{file.size}\0{file.mtime_ns}\0".encode())
    return state.hexdigest()


def fingerprint(request: dict[str, Any]) -> str:
    """Sixteen hex digits over a request in plain values; where the source is spelled differently does not count."""
    told_apart = {key: value for key, value in request.items() if key not in ("source", "tokenizer")}
    text = json.dumps([FORMAT_VERSION, told_apart], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What two requests disagree on, in words."""
    keys = [
        key
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key) and not (key == "source" and before.get("files") == now["files"])
    ]
    words = [
        "the source files changed" if key == "files" else f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
        for key in keys
        if key != "tokenizer_digest" or "tokenizer" not in keys
    ]
    return "; ".join(words) or "another version of this program"
