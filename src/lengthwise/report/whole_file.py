"""Files that appear whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path

from lengthwise.core.errors import InputError


def check_place(path: Path | None, option: str) -> None:
    """Raise ``InputError`` if no file can be at ``path``: before the work, so that none is done in vain."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    probe = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
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
    try:
        for path, content in files.items():
            if path.is_dir():
                raise InputError(f"{path} is a folder; give the name of a file in it")
            partials[path] = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partials[path].write_bytes(content)
        for path, partial in partials.items():
            partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from None
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
