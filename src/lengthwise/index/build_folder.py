"""The folder of an index while it is built: claimed for one request, and filled or replaced when the index is whole.

``parts/`` holds build.json (what was asked), what is finished, and at last the whole index. That one is then put in
place file by file, which goes on after a kill: an index that was there before is untouched until another is whole.
"""

import errno
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.lock import FolderLock
from lengthwise.index.sequence_metrics import FOLDER as METRICS_FOLDER
from lengthwise.index.settings import differences
from lengthwise.index.store import INDEX_FILES, read_info

REMOVALS, REMOVAL_S = 40, 0.05
"""How often it is tried to remove a folder, and seconds in between: workers end within a second of their build."""
_NOTE, _LOCK, _INFO, _WHOLE = "build.json", "build.lock", "index.json", "whole"


def parts_of(out: Path) -> Path:
    """The folder of finished parts in the folder of an index."""
    return out / "parts"


def up_to_date(out: Path, request: dict[str, Any], mark: str, *, restart: bool) -> dict[str, Any] | None:
    """What index.json holds, if the index that is there is the one asked for; None: one is to be built, or goes on.

    Raises:
        InputError: there is another index, or something that is none.
    """
    if not (out / _INFO).exists():
        return None
    note = _any_json(parts_of(out) / _NOTE)
    if restart and "fingerprint" in _any_json(out / _INFO):
        return None
    info = read_info(out)
    if info["fingerprint"] == mark:
        shutil.rmtree(parts_of(out), ignore_errors=True)  # of a build that was killed before it removed them
        return info
    if note.get("fingerprint") == mark:  # begun with --restart
        return None
    raise InputError(
        f"{out} holds another index ({differences(info['request'], request)}); "
        "choose another --out, or replace it with --restart"
    )


def claim(out: Path, request: dict[str, Any], mark: str, *, restart: bool) -> Path:
    """The folder of parts, new or of an interrupted build of the same request.

    ``restart`` removes the parts of another build; those of one that replaces an index, and was interrupted, go on.

    Raises:
        InputError: the folder holds something else, or a half-written index of another request.
    """
    parts, replaces = parts_of(out), "fingerprint" in _any_json(out / _INFO)
    note = _any_json(parts / _NOTE)
    if restart and not (note.get("fingerprint") == mark and note.get("replaces")):
        clear(out)
    if not (parts / _NOTE).exists():
        ours = [parts, out / METRICS_FOLDER, out / _LOCK]  # metrics of a replaced index tell which one they are of
        ours += [out / name for name in INDEX_FILES] if replaces else []
        foreign = [path.name for path in out.iterdir() if path not in ours or (path == parts and any(parts.iterdir()))]
        if foreign:
            raise InputError(
                f"{out} is not empty (it holds {foreign[0]}) and not an index; choose a new folder for --out"
            )
        _write_note(parts, {"fingerprint": mark, "request": request, "replaces": replaces})
        return parts
    if note.get("fingerprint") != mark:
        before = note.get("request")
        other = differences(before, request) if isinstance(before, dict) else f"{_NOTE} is damaged"
        raise InputError(
            f"{out} holds a half-written index of another request ({other}); "
            "run the same command as before, or start over with --restart"
        )
    for stray in parts.glob("*.partial-*"):
        _remove(stray) if stray.is_dir() else stray.unlink(missing_ok=True)
    return parts


def whole_of(out: Path) -> Path:
    """The folder in which the finished index is put together, empty."""
    assembled = parts_of(out) / _WHOLE
    shutil.rmtree(assembled, ignore_errors=True)
    assembled.mkdir()
    return assembled


def put_in_place(out: Path) -> None:
    """Move an index that is whole to where it belongs, in place of any that is there; goes on where it was killed."""
    parts = parts_of(out)
    assembled = parts / _WHOLE
    info = _any_json(assembled / _INFO)
    if "fingerprint" not in info or not (parts / _NOTE).exists():
        return
    _write_note(parts, {"fingerprint": "", "request": {}})  # nothing goes on with these parts
    (out / _INFO).unlink(missing_ok=True)
    for name in INDEX_FILES:
        if name != _INFO and (assembled / name).exists():
            (assembled / name).replace(out / name)
        elif name not in info["files"] and name != _INFO:
            (out / name).unlink(missing_ok=True)
    (assembled / _INFO).replace(out / _INFO)
    _remove(parts)


def clear(out: Path) -> None:
    """Remove a half-written index and nothing else; killed half-way, the folder is still known as ours."""
    parts = parts_of(out)
    if not (parts / _NOTE).exists():
        return
    _write_note(parts, {"fingerprint": "", "request": {}})
    for name in INDEX_FILES if not (out / _INFO).exists() else ():  # where an earlier version put them together
        (out / name).unlink(missing_ok=True)
        (out / f"{name}.partial").unlink(missing_ok=True)
    for path in parts.iterdir():
        if path.is_dir():
            _remove(path)
        elif path.name != _NOTE:
            path.unlink()
    _remove(parts)


def _remove(folder: Path) -> None:
    """Remove a folder into which workers of a killed build may still write, until they see that it is gone."""
    for _ in range(REMOVALS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
        time.sleep(REMOVAL_S)
    shutil.rmtree(folder)


def _write_note(parts: Path, note: dict[str, Any]) -> None:
    parts.mkdir(exist_ok=True)
    partial = parts / f"{_NOTE}.partial"
    partial.write_text(json.dumps(note))
    partial.replace(parts / _NOTE)


def _any_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


@contextmanager
def made_folder(out: Path) -> Iterator[None]:
    """The folder ``out``, made if it is not there; folders that were made go again if they stay empty.

    Raises:
        InputError: it cannot be a folder.
    """
    made: list[Path] = []
    try:
        made = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _remove_empty(made)
        why = "it is a file" if isinstance(error, FileExistsError) else getattr(error, "strerror", None) or str(error)
        raise InputError(f"--out {out} cannot be made a folder: {why}; name another") from None
    try:
        yield
    finally:
        _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # the first that holds something
        for folder in folders:
            folder.rmdir()


def only_builder(out: Path) -> AbstractContextManager[None]:
    """Hold the folder while building; a build that was killed holds it no longer."""
    lock = FolderLock(out / _LOCK, user="another build of an index", way_out="wait for it, or choose another --out")
    return lock.held()
