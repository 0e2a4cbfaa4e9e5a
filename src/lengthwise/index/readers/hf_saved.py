"""Folders that Hugging Face's ``save_to_disk`` wrote: which Arrow files hold the rows, and in which order."""

import json
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_INDICES = ("_indices_data_files", "_indices_files")


def is_saved(folder: Path) -> bool:
    """Whether ``folder`` is a saved dataset, or a dictionary of them by split."""
    return (folder / _SPLITS).is_file() or all((folder / name).is_file() for name in (_STATE, _INFO))


def choose_split(folder: Path, split: str) -> Path:
    """The folder of the dataset meant: ``folder`` itself, or its split.

    Raises:
        InputError: a dictionary of datasets without ``split``, or a ``split`` that is not there.
    """
    if not (folder / _SPLITS).is_file():
        if split:
            raise InputError(f"--split {split}: {folder} is one dataset, without splits; leave --split out")
        return folder
    splits = _read(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not splits:
        raise InputError(f"{folder / _SPLITS} names no splits; save the dataset again")
    if split not in splits:
        said = f"--split {split}: no such split" if split else "holds a dataset for each split"
        raise InputError(f"{folder}: {said}; choose with --split (splits: {', '.join(map(str, splits))})")
    return folder / split


def data_files(dataset: Path) -> list[Path]:
    """The Arrow files of a saved dataset, in the order of its rows.

    Raises:
        InputError: a file is missing, or the rows are chosen and ordered by a list beside them.
    """
    state = _read(dataset / _STATE)
    for key in _INDICES:
        if state.get(key):
            raise InputError(
                f"{dataset / _STATE} orders its rows by a list of row numbers ({key}), which is not followed here; "
                "load the dataset, call flatten_indices() on it and save it again"
            )
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in entries):
        raise InputError(f"{dataset / _STATE} does not list the data files (_data_files); save the dataset again")
    paths = [dataset / str(entry["filename"]) for entry in entries]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{dataset / _STATE} lists {path.name}, which is not there; copy the whole folder again")
    return paths


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}; save the dataset again") from None
    if not isinstance(document, dict):
        raise InputError(f"{path} holds no JSON object; save the dataset again")
    return document
