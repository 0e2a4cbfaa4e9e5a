"""Files that appear whole or not at all.

The file behind a symbolic link is replaced, and the link stays; a device or FIFO is written to.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from lengthwise.core.atomic_write import behind_links, is_stream, partial_of, remove_stale, write_stream
from lengthwise.core.errors import InputError


def check_place(path: Path | None, option: str) -> None:
    """Raise ``InputError`` if no file can be at ``path``: before the work, so that none is done in vain."""
    if path is None:
        return
    if path == Path("-"):
        raise InputError(f"{option} - names no file, and this is not written to stdout; give the name of a file")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give the name of a file in it")
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write to {path}: it may only be read; choose another {option}")
        return
    try:
        place = behind_links(path)
        if not place.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {place.parent}; make it first")
        probe = partial_of(place)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write {path}: the folder {path.parent} takes no file ({error.strerror}); choose another {option}"
        ) from None


def check_folder(path: Path | None, option: str) -> None:
    """Raise ``InputError`` if no folder can be at ``path``: before the work, so that none is done in vain."""
    if path is not None and path.exists() and not path.is_dir():
        raise InputError(f"{option} {path} is a file; give the name of a folder")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it first")


def write_whole(files: Mapping[Path, bytes]) -> None:
    """Write all files beside their places first, then move each into place; nothing appears if any write fails.

    Raises:
        InputError: a folder is missing, or not writable, or a path is a folder.
    """
    partials: dict[Path, Path] = {}
    streams: dict[Path, bytes] = {}
    try:
        for path, content in files.items():
            if path.is_dir():
                raise InputError(f"{path} is a folder; give the name of a file in it")
            if is_stream(path):
                streams[path] = content
                continue
            place = behind_links(path)
            partials[place] = partial_of(place)
            remove_stale(place)
            partials[place].write_bytes(content)
        for path, content in streams.items():
            write_stream(path, content)
        for path, partial in partials.items():
            partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from None
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
