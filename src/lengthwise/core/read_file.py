"""Read files that somebody else wrote: regular files of bounded size, UTF-8 text, JSON with finite numbers.

Every refusal is an ``InputError`` of one sentence that names the file.
"""

import json
import os
import stat
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError

CHUNK = 1 << 16
"""Bytes that are read at once: where memory has run out, a short file can still be read."""
MAX_DOCUMENT_BYTES = 64 << 20
"""Size limit of a document that is read whole, such as index.json or a profile."""

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: Path, *, what: str) -> int:
    """The size of the regular file at ``path``; pipes and devices are refused before a read could wait for ever.

    Raises:
        FileNotFoundError: nothing is there.
        InputError: it is not a regular file, or may not be looked at; ``what`` says what was expected, such as
            "a configuration".
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise InputError(f"cannot read {brief(str(path), 200)[1:-1]}: {_reason(error)}") from None
    kind = next((words for is_kind, words in _KINDS if is_kind(status.st_mode)), None)
    if kind is not None:
        raise InputError(f"{path} is {kind}; {what} is a regular file: save it to one and name that")
    return status.st_size


def read_bytes(path: Path, *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The content of a regular file of at most ``max_bytes``.

    Raises:
        FileNotFoundError: nothing is there.
        InputError: it is no regular file, too large, or not readable.
    """
    size = check_regular(path, what=what)
    if size > max_bytes:
        raise InputError(f"{path} has {size:,} bytes; {what} has at most {max_bytes:,}")
    try:
        with path.open("rb") as file:
            content = b"".join(takewhile(bool, (file.read(CHUNK) for _ in range(-(-max_bytes // CHUNK) + 1))))
    except OSError as error:
        raise InputError(f"cannot read {path}: {_reason(error)}") from None
    if len(content) > max_bytes:  # it grew, or its file system tells no sizes
        raise InputError(f"{path} has more than {max_bytes:,} bytes, the limit of {what}")
    return content


def read_text(path: Path, *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The UTF-8 text of a regular file of at most ``max_bytes``, without a byte order mark."""
    content = read_bytes(path, what=what, max_bytes=max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start:,} is 0x{content[error.start]:02x}), so it is not {what}"
        ) from None


def read_json(path: Path, *, what: str, finite: bool = True) -> Any:
    """The JSON document in a file.

    Raises:
        FileNotFoundError: nothing is there.
        InputError: it is not readable or not JSON, a key is there twice, or a number is not ``finite``.
    """
    text = read_text(path, what=what)
    try:
        return parse_json(text, unique_keys=True, finite=finite)
    except ValueError as error:
        raise InputError(f"{path} is not {what}: {error}") from None


def parse_json(text: str | bytes, *, unique_keys: bool = False, finite: bool = True) -> Any:
    """The value that JSON ``text`` spells.

    Raises:
        ValueError: it is not JSON, spells NaN or Infinity although ``finite``, nests beyond reason, holds a number of
            thousands of digits or text that is not Unicode; with ``unique_keys``, an object names a key twice.
    """
    hook = _unique if unique_keys else None
    try:
        return json.loads(text, parse_constant=_refuse_constant if finite else None, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("it nests objects or lists too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start:,})") from None
    except json.JSONDecodeError as error:
        end = len(error.doc.rstrip())  # what is missing is missed there, not on a line that follows
        place = json.JSONDecodeError(error.msg.removesuffix(" at"), error.doc, min(error.pos, end))
        line = f"line {place.lineno}, " if place.lineno > 1 else ""
        raise ValueError(f"{place.msg[0].lower()}{place.msg[1:]} at {line}column {place.colno}") from None


def brief(value: object, limit: int = 80) -> str:
    """``repr`` of a value in at most ``limit`` characters, for messages."""
    if isinstance(value, str | bytes):
        words = repr(value[:limit])
        shortened = len(value) > limit or len(words) > limit
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > limit * 3:
        return f"a number of about {int(value.bit_length() * 0.30103):,} digits"
    else:
        words = repr(value)
        shortened = len(words) > limit
    return words[: limit - 3] + "..." if shortened else words


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {brief(twice)} twice")
    return document


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or os.strerror(error.errno or 0)
    return str(error)
