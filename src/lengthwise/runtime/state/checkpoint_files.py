"""The files of checkpoints: which are complete, how one becomes it, how damage is found. No tensors here.

checkpoints/step_00000100/             complete: every rank had finished when it got this name
            step_00000100.partial/     being written, or what a crash left of it
            step_00000100.replaced/    an older one of the same step, until the new one has its name
            latest                     the name of the newest; moved last
            best                       the name of that with the lowest validation loss, if there is validation

``state.json`` is the last file written and the first removed: a folder without it is no checkpoint. Whatever moment a
process is killed at, the newest complete checkpoint stays where :func:`latest` finds it.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.atomic_write import reason, shell_word
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lock import FolderLock
from lengthwise.runtime.state.damaged_checkpoint import DamagedCheckpoint, no_checkpoint, wrong_pointer

CHECKPOINT_SCHEMA_VERSION = 2

STATE_FILE, POINTER, BEST = "state.json", "latest", "best"
_PARTIAL, _REPLACED, _DIGEST = ".partial", ".replaced", "blake2b"
_HELD_BY_NFS = ".nfs"
"""How names begin of removed files that a process on a network file system still has open; they go with it."""
_EXACT_IN = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
}
"""The dtypes that have every number of a dtype."""
_NAME = re.compile(r"step_\d{8,}")


def step_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` steps."""
    return f"step_{step:08d}"


def candidates(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, newest first; whether their files are intact is found by reading them."""
    checkpoints: dict[str, Path] = {}
    for path in folder.glob("step_*"):
        name = path.name.removesuffix(_REPLACED)
        is_complete = _NAME.fullmatch(name) and (path / STATE_FILE).is_file()
        if is_complete and (
            name not in checkpoints or path.name == name
        ):  # what was to be replaced counts while it is alone
            checkpoints[name] = path
    return [checkpoints[name] for name in sorted(checkpoints, key=_step_of, reverse=True)]


def latest(folder: Path, *, is_of_run: bool = True) -> Path:
    """The newest complete checkpoint in ``folder``; ``is_of_run``: whether that is of `lengthwise train`, for errors.

    Raises:
        InputError: there is none, or ``latest`` names one that is not there.
    """
    complete = candidates(folder)
    if not complete:
        without_state = [path for path in (folder, *sorted(folder.glob("step_*"))) if _NAME.fullmatch(path.name)]
        without_state = [path for path in without_state if path.is_dir()]
        raise no_checkpoint(folder, state_file=STATE_FILE, without_state=without_state, is_of_run=is_of_run)
    pointer = folder / POINTER
    if not pointer.is_file():
        return complete[0]  # a crash between giving it its name and pointing to it
    name = pointer.read_text(errors="replace").strip()
    for path in complete:
        if path.name.removesuffix(_REPLACED) == name:
            return path
    raise wrong_pointer(pointer, name, complete, state_file=STATE_FILE, is_of_run=is_of_run)


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints stay when there is a new one."""

    newest: int
    """So many, the new one included."""
    good_step: int | None = None
    """Besides, the newest of this step or an earlier one: with its weights the loss was finite. None: none is known."""
    steps: frozenset[int] | None = None
    """Steps of the checkpoints that led to the new one; others are neither counted nor removed. None: all did."""


def lock_of_save(folder: Path) -> FolderLock:
    """Lock to hold while one checkpoint is written to a folder that no run holds as a whole."""
    return FolderLock(folder / "saving.lock", user="another save", way_out="wait for it, or name another folder")


def begin(folder: Path, name: str) -> Path:
    """An empty folder to write the checkpoint ``name`` in; what crashes left behind is cleared away.

    The parent of ``folder`` is not made: where somebody removed the folder of a run, nothing is written in its place.
    """
    folder.mkdir(exist_ok=True)
    for replaced in folder.glob(f"step_*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if (replaced / STATE_FILE).is_file() and not (final / STATE_FILE).is_file():
            _remove(final)
            replaced.rename(final)  # a crash came before the new one had its name
        else:
            _remove(replaced)
    for path in folder.glob("step_*"):
        if path.name.endswith(_PARTIAL) or (_NAME.fullmatch(path.name) and not (path / STATE_FILE).is_file()):
            _remove(path)
    partial = folder / f"{name}{_PARTIAL}"
    partial.mkdir(exist_ok=True)
    if left := [path.name for path in partial.iterdir() if not path.name.startswith(_HELD_BY_NFS)]:
        raise OSError(errno.ENOTEMPTY, f"{left[0]} of an earlier save cannot be removed", str(partial))
    return partial


def publish(partial: Path, document: dict[str, Any], *, keep: RetentionPolicy) -> Path:
    """Make a checkpoint that all ranks have written complete and ``latest``, then remove what ``keep`` leaves out.

    Those that did not lead to it, left by a run that was resumed from before them because they were damaged or its loss
    was not finite, are neither counted nor removed. The one whose validation loss was the lowest, by the document's
    ``validation``, stays as ``best``.

    Raises:
        OSError: a file that a rank has written is not here with its size, or the disk refuses something.
    """
    folder, name = partial.parent, partial.name.removesuffix(_PARTIAL)
    final, replaced = folder / name, folder / f"{name}{_REPLACED}"
    _check_sizes(partial, document["files"])
    earlier = [path for path in led_to(candidates(folder), keep.steps) if step_of(path) < _step_of(name)]
    _write(partial / STATE_FILE, _encoded({**document, "earlier_steps": [step_of(path) for path in earlier]}))
    if final.exists():  # the same step again, after a resume from an older checkpoint
        final.rename(replaced)
    partial.rename(final)
    _sync(folder)
    point_to(folder, name)
    validation = document.get("validation", {})
    best_step = validation.get("best_step") or validation.get("earlier_step")
    point_to_best(folder, best_step)
    _remove(replaced)
    counted = [final, *earlier]
    good = next((path for path in counted if keep.good_step is not None and step_of(path) <= keep.good_step), None)
    for path in counted[keep.newest :]:
        if path != good and step_of(path) != best_step:
            _remove(path)
    return final


def led_to(checkpoints: list[Path], steps: frozenset[int] | None) -> list[Path]:
    """The ``checkpoints`` of these steps, which led to a state; None: all did."""
    return [path for path in checkpoints if steps is None or step_of(path) in steps]


def steps_up_to(checkpoint: Path, document: dict[str, Any]) -> frozenset[int]:
    """Steps of the checkpoints in its folder that led to ``checkpoint``, and its own; ``document``: its state."""
    step = document["step"]  # it may have been copied to another name
    if "earlier_steps" not in document:  # older checkpoints have none
        return frozenset(number for number in map(step_of, candidates(checkpoint.parent)) if number <= step)
    return frozenset([*document["earlier_steps"], step])


def point_to(folder: Path, name: str, *, pointer: str = POINTER) -> None:
    """Make the checkpoint ``name`` the latest, or the best."""
    partial = folder / f"{pointer}{_PARTIAL}"
    _write(partial, name + "\n")
    partial.replace(folder / pointer)
    _sync(folder)


def point_to_best(folder: Path, step: int | None) -> None:
    """Make ``best`` the checkpoint after ``step`` steps; without one, or if it is not complete, there is no best.

    It may name another, of a run that was killed before it could move it, or went on from before its best step.
    """
    pointer, name = folder / BEST, "" if step is None else step_name(step)
    if not any(path.name.removesuffix(_REPLACED) == name for path in candidates(folder)):
        pointer.unlink(missing_ok=True)
    elif not pointer.is_file() or pointer.read_text(errors="replace").strip() != name:
        point_to(folder, name, pointer=BEST)


def step_back(folder: Path, step: int) -> str:
    """Make the newest checkpoint before ``step`` the latest, if that of ``step`` is; says what is safe, in words.

    For a step whose loss is not finite: the weights that it began with may be to blame.
    """
    complete = candidates(folder)
    before = [path for path in complete if _step_of(path.name) < step]
    if not any(_step_of(path.name) == step for path in complete):
        return outlook(folder)
    if not before:
        return f"the only checkpoint, {step_name(step)}, holds the weights of that loss: start anew"
    try:
        point_to(folder, before[0].name.removesuffix(_REPLACED))
    except OSError as error:
        return (
            f"{step_name(step)} holds the weights of that loss, and {folder / POINTER} could not be changed "
            f"({reason(error)}): write {before[0].name} into it before going on"
        )
    return (
        f"{step_name(step)} holds the weights of that loss, so the latest checkpoint is now {before[0].name}; go on "
        f"from it with: lengthwise train --resume {shell_word(folder.parent)}"
    )


def discard(folder: Path, name: str) -> None:
    """Remove what there is of a checkpoint that could not be written, as far as the disk allows."""
    shutil.rmtree(folder / f"{name}{_PARTIAL}", ignore_errors=True)
    for pointer in (POINTER, BEST):
        with suppress(OSError):
            (folder / f"{pointer}{_PARTIAL}").unlink(missing_ok=True)


def outlook(folder: Path, *, is_of_run: bool = True) -> str:
    """What is safe after a file could not be written, in words; ``is_of_run``: in a folder of `lengthwise train`."""
    try:
        is_there, complete = folder.parent.is_dir(), candidates(folder)
        newest = latest(folder) if complete else folder
    except InputError:
        newest = complete[0]
    except OSError as error:
        return f"which checkpoints are safe cannot be told ({reason(error)})"
    if not is_there:
        is_file = folder.parent.exists()
        return f"{folder.parent} is {'no folder, but a file' if is_file else 'gone, and its checkpoints with it'}"
    if not complete:
        return "no checkpoint is complete yet, so that there is nothing to go on from"
    way_on = f"with: lengthwise train --resume {shell_word(folder.parent)}" if is_of_run else "from it with resume()"
    return f"complete ones are as they were, the newest is {newest.name}. Once the cause is gone, go on {way_on}"


def check_files(partial: Path, expected: dict[str, Any]) -> None:
    """Raise ``OSError`` unless the files of a checkpoint that is being written are as the rank that wrote them said."""
    for name, digest in expected.items():
        if wrong := damage(partial / name, digest):
            raise OSError(f"{partial / name} {wrong}, though it has just been written")


def _check_sizes(partial: Path, expected: dict[str, Any]) -> None:
    for name, digest in expected.items():
        try:
            num_bytes = (partial / name).stat().st_size
        except FileNotFoundError:
            raise OSError(f"{partial / name} is missing, though a rank has just written it") from None
        if num_bytes != digest["num_bytes"]:
            raise OSError(f"{partial / name} has {num_bytes:,} bytes of {digest['num_bytes']:,}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What was saved beside the tensors.

    Raises:
        InputError: not a checkpoint, damaged, or of another schema version.
    """
    path = checkpoint / STATE_FILE
    try:
        text = path.read_text()
        document = json.loads(text)
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # the first is also what bytes raise that are no text
        raise damaged(path, "is no JSON document") from None
    if not isinstance(document, dict):
        raise damaged(path, "is no JSON object")
    digest = document.pop(_DIGEST, None)
    version = document.get("schema_version")
    is_intact = digest is not None and _encoded(document) == text
    if version != CHECKPOINT_SCHEMA_VERSION and (is_intact or digest is None):
        raise InputError(
            f"{path} has checkpoint schema {version}, this version of lengthwise reads {CHECKPOINT_SCHEMA_VERSION}; go "
            f"on with the version that wrote it, or export the weights with that one and start from them ({Setting.HF})"
        )
    if not is_intact:
        raise damaged(path, "has changed since it was written")
    return document


def check_optimizer(checkpoint: Path, saved: dict[str, Any], name: str) -> None:
    """Raise ``InputError`` if a checkpoint has the state of another optimizer than ``name``; ``saved``: its own."""
    if saved["name"] != name:
        raise InputError(
            f"{checkpoint / STATE_FILE} holds the state of {saved['name']}, this run has {Setting.OPTIMIZER}={name}; "
            f"set {Setting.OPTIMIZER}={saved['name']}, or export the weights and start from them ({Setting.HF})"
        )


def check_precision(checkpoint: Path, saved: str, here: str) -> None:
    """Raise ``InputError`` if master weights in dtype ``saved`` would be rounded to the dtype ``here``."""
    if here not in _EXACT_IN.get(saved, (here,)):
        raise InputError(
            f"{checkpoint / STATE_FILE} holds master weights and optimizer state in {saved}, this run would round them "
            f"to {here}; set {Setting.DTYPE} as when it was saved ({saved}), or export the weights and start from them "
            f"({Setting.HF})"
        )


def digest_of(file: Path) -> dict[str, Any]:
    """Size and content digest of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return {"num_bytes": stream.tell(), _DIGEST: digest}


def damage(file: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file of which :func:`digest_of` said ``expected`` when it was written; None: nothing."""
    try:
        num_bytes = file.stat().st_size
        if num_bytes != expected["num_bytes"]:
            return f"has {num_bytes:,} bytes of {expected['num_bytes']:,}"
        return None if digest_of(file) == expected else "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"


def damaged(file: Path, what: str) -> DamagedCheckpoint:
    """The error for a file of a checkpoint, with the way out."""
    problem = f"{file} {what}"
    checkpoint = file.parent
    others = [path.name for path in candidates(checkpoint.parent) if path != checkpoint and _has_its_sizes(path)]
    if not others:
        way_out = "no other checkpoint with all of its files lies beside it: start the run anew"
    else:
        way_out = f"go on from a checkpoint beside it that has files of the right sizes: {', '.join(others)}"
    return DamagedCheckpoint(f"{problem}; {way_out}", problem=problem)


def _has_its_sizes(checkpoint: Path) -> bool:
    """Whether the files of a checkpoint have the sizes that its state says; their content is not read."""
    try:
        files = json.loads((checkpoint / STATE_FILE).read_text())["files"]
        return all((checkpoint / name).stat().st_size == digest["num_bytes"] for name, digest in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def step_of(checkpoint: Path) -> int:
    """After how many steps it was made."""
    return _step_of(checkpoint.name)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step_").removesuffix(_REPLACED))


def _encoded(document: dict[str, Any]) -> str:
    """Serialize ``state.json`` as text that carries its own digest."""
    digest = hashlib.blake2b(json.dumps(document).encode(), digest_size=16).hexdigest()
    return json.dumps({**document, _DIGEST: digest}) + "\n"


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """Put the names in a folder on disk, so that they survive a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems cannot, and do it by themselves
            raise
    finally:
        os.close(handle)


def _remove(checkpoint: Path) -> None:
    """What is half removed is no checkpoint any more, and the next :func:`begin` removes the rest."""
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
