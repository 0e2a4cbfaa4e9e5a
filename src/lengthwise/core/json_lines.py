"""Files of JSON lines, an object each, that a process appends to until something ends it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.core.atomic_write import partial_of, remove_stale
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import MAX_DOCUMENT_BYTES, brief, check_regular, parse_json


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file, if there is one; a last line cut off by a kill is passed over.

    Raises:
        InputError: a line is damaged; the message names it.
    """
    if not path.is_file():
        return
    check_regular(path, what="a file of JSON lines")
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise InputError(f"{path}:{number} is damaged: it has more than {MAX_DOCUMENT_BYTES:,} bytes")
            if line.endswith(b"\n"):
                try:
                    row = parse_json(line.rstrip(), finite=False)
                except ValueError as error:
                    raise InputError(f"{path}:{number} is damaged: {error}") from None
                if not isinstance(row, dict):
                    raise InputError(f"{path}:{number} is damaged: it holds {brief(row)}, not an object")
                yield row


def drop_steps_from(path: Path, step: int) -> None:
    """Remove the rows of ``step`` and later ones from a file of JSON lines, and a last line that a kill cut off.

    Other rows stay as they are, damaged ones too. Rows at the end are cut off; where some lie between others, the file
    is written anew beside its place first. A kill at any moment leaves all rows of earlier steps.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    end_of_kept = size = first_dropped = 0
    with path.open("rb") as file:
        for line in file:
            size += len(line)
            if _is_before(line, step):
                end_of_kept = size
            elif not first_dropped:
                first_dropped = size
    if first_dropped > end_of_kept:
        os.truncate(path, end_of_kept)
    elif first_dropped:
        _keep(path, step)


def _keep(path: Path, step: int) -> None:
    """Write the rows before ``step`` beside the file, and move them into its place."""
    remove_stale(path)
    partial = partial_of(path)
    try:
        with path.open("rb") as file, partial.open("wb") as stream:
            stream.writelines(line for line in file if _is_before(line, step))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_before(line: bytes, step: int) -> bool:
    """Whether a row is kept: it is whole, and not of ``step`` or a later one."""
    if not line.endswith(b"\n"):
        return False
    try:
        row = parse_json(line, finite=False)
    except ValueError:
        return True
    number = row.get("step") if isinstance(row, dict) else None
    return type(number) is not int or number < step
