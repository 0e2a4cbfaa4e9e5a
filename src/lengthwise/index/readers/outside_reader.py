"""Readers of other packages: functions from the path of a file to its documents, text or token ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError, first_line
from lengthwise.core.plugins import READERS, Plugin, load_plugin
from lengthwise.core.wording import counted
from lengthwise.index.document_limits import Limits
from lengthwise.index.readers.document import OversizedValue
from lengthwise.index.source_file import WorkUnit, check_unchanged


def load_reader(name: str) -> Plugin:
    """The reader MODULE:FUNCTION, or the one that an installed package registers by this name.

    Raises:
        InputError: there is none, or it cannot be imported.
    """
    return load_plugin(name, what="reader", usage="f(path)", group=READERS)


def read_outside(unit: WorkUnit, *, field: str, limits: Limits) -> Iterator[tuple[int, Any]]:
    """The documents of a file, numbered, as the reader called ``field`` yields them.

    Raises:
        InputError: the reader fails, or yields what is neither text nor token ids.
    """
    file, num_read = unit.files[0], 0
    try:
        for row, value in enumerate(load_reader(field).function(Path(file.path))):
            document = _checked(value, limits)
            num_read += 1
            yield row, document
    except InputError:
        raise
    except Exception as error:
        place = f"{file.name} after {counted(num_read, 'document')}"
        raise InputError(f"reader {field} fails in {place}: {type(error).__name__}: {first_line(error)}") from error
    check_unchanged(file)


def _checked(value: Any, limits: Limits) -> Any:
    if isinstance(value, str | bytes):
        is_large = len(value) > limits.document
        return OversizedValue(len(value)) if is_large else value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise TypeError(f"a document is text, bytes of text, or a list of token ids, not {type(value).__name__}")
    return value
