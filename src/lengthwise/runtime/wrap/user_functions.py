"""Call ``inputs=`` and ``loss=`` of ``prepare``: check what they return, and tell their errors from a forward's."""

import re
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb, walk_tb
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.refused_draws import draws_refused

INPUTS, LOSS = "inputs=", "loss="
_NOTE = "raised by {} of prepare"
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")


@contextmanager
def user_function(name: str, device: torch.device) -> Iterator[None]:
    """Within, a user's function is called, :data:`INPUTS` or :data:`LOSS`; what it raises is noted as its own.

    Raises:
        InputError: it draws random numbers that ranks would not share.
    """
    try:
        with draws_refused(name, device):
            yield
    except Exception as error:
        if not isinstance(error, LengthwiseError):
            error.add_note(_NOTE.format(name))
        raise


def raised_by(error: BaseException) -> str:
    """The user's function that raised an error, :data:`INPUTS` or :data:`LOSS`; an empty string: neither did."""
    notes = getattr(error, "__notes__", ())
    return next((name for name in (INPUTS, LOSS) if _NOTE.format(name) in notes), "")


def checked_loss(loss: Any) -> Tensor:
    """Return what ``loss=`` returned.

    Raises:
        InputError: it is no tensor.
    """
    if isinstance(loss, Tensor):
        return loss
    raise InputError(
        f"loss= returned {_kind(loss)}; return one number, a tensor without dimensions that the output's gradients "
        "flow from: the mean over the targets of the micro-batch"
    )


def checked_inputs(inputs: Any) -> dict[str, Any]:
    """Return what ``inputs=`` returned.

    Raises:
        InputError: it is no dictionary.
    """
    if isinstance(inputs, Mapping):
        return inputs  # type: ignore[return-value]  # such as a BatchEncoding
    raise InputError(
        f"inputs= returned {_kind(inputs)}; return a dictionary of the forward's arguments by name, such as "
        "{'idx': micro_batch.tokens[None]}"
    )


def line_of(error: BaseException) -> str:
    """Which line raised an error, in words: the innermost of neither torch, Python nor this library; empty: none."""
    lines = [line for line in extract_tb(error.__traceback__) if not _is_of_library(line.filename)]
    return f", in {Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else ""


def _is_of_library(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file  # site-packages may lie within
    return is_standard or file.startswith(_LIBRARIES)


def is_of_embedding(error: BaseException) -> bool:
    """Whether an error is that of an embedding, or another table, that has no row for an id."""
    return isinstance(error, IndexError) and "index out of range in self" in str(error)


def label_advice(error: BaseException, *, ignore_index: int, makes_inputs: bool) -> str:
    """What to do about an error of a loss that is given a label it has no class for; empty: it is another error.

    ``ignore_index``: as ``prepare`` was given it; ``makes_inputs``: whether the user makes the forward's arguments.
    """
    if (match := _TARGET.search(str(error))) is None:
        return ""
    label, ignored = int(match[1]), _ignored_by_loss(error)
    in_both = f"micro_batch.labels is {IGNORE} and micro_batch.targets is ignore_index= of prepare ({ignore_index})"
    if label not in (IGNORE, ignore_index):
        return f"labels are from 0 to the number of classes less 1; where there is no loss, {in_both}"
    another = "the label that this loss ignores" if ignored in (None, label) else f"{ignored}, which this loss ignores"
    if not (makes_inputs or raised_by(error)):
        return f"tokens without a loss have the label {label}; set ignore_index= of prepare to {another}"
    if label != IGNORE:
        way_out = f"take micro_batch.labels for a loss that ignores {IGNORE}, or let it ignore {label}"
    elif ignored == ignore_index:
        way_out = f"take micro_batch.targets for a loss that ignores {ignored}"
    else:
        way_out = f"let it ignore {label}, or take micro_batch.targets and set ignore_index= of prepare to {another}"
    return f"where there is no loss, {in_both}: {way_out}"


def _ignored_by_loss(error: BaseException) -> int | None:
    """The label that a loss of torch which raised ``error`` ignores; None: not known."""
    values = [frame.f_locals.get("ignore_index") for frame, _ in walk_tb(error.__traceback__)]
    return next((value for value in reversed(values) if isinstance(value, int)), None)


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
