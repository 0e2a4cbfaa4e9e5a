"""Run checks on all ranks with one verdict: an error on any of them is raised on each with the same message."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lengthwise.core.errors import CheckError, CommunicationError, InfeasibleError, InputError, LengthwiseError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.user_functions import is_of_embedding, label_advice, line_of, raised_by

T = TypeVar("T")


class NotInThisDtype(Exception):  # noqa: N818 - an outcome, not a fault
    """The model cannot be computed in the dtype of the comparison."""

    def __init__(self, reason: LengthwiseError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class NotComputedError(CheckError):
    """The model fails with an error where plans compute it otherwise than its user."""


class FailsAloneError(CheckError):
    """The model fails on a sequence alone, called as its user calls it."""


class NotWithTheseWeights(Exception):  # noqa: N818 - an outcome, not a fault
    """The model cannot be compared while its weights of zero have other values."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def on_every_rank(run: PreparedModel, compute: Callable[[], T], what: str = "", *, is_stock: bool = False) -> T:
    """Return what ``compute`` returns, once all ranks have computed it; if one failed, all raise the same error.

    Args:
        run: whose ranks call this.
        compute: what each of them does.
        what: the sequences that it computes, and how, in words.
        is_stock: whether the model is called as before it was prepared.
    """
    result: Any = None
    failure: tuple[str, str] | None = None
    try:
        result = compute()
    except CommunicationError:
        raise  # ranks are gone, and nothing can be shared with the others
    except Exception as error:
        failure = _described(run, error, what, is_stock)
    failed = gather_rows(torch.tensor([failure is not None], dtype=torch.int64, device=run.world.device)).tolist()
    first = next((rank for rank, (has_failed,) in enumerate(failed) if has_failed), None)
    if first is None:
        return result
    kind, message = broadcast_json(run.world, failure, source=first)
    if kind == "dtype":
        raise NotInThisDtype(FailsAloneError(message) if is_stock else NotComputedError(message))
    if kind == "weights":
        raise NotWithTheseWeights(message)
    raise next(
        error_class for error_class in (InputError, InfeasibleError, CheckError) if error_class.__name__ == kind
    )(message)


def _described(run: PreparedModel, error: Exception, what: str, is_stock: bool) -> tuple[str, str]:
    """Return the error class of a failure by name, and its message."""
    if isinstance(error, NotWithTheseWeights):
        return "weights", error.reason
    if isinstance(error, LengthwiseError):
        kinds = [
            error_class.__name__
            for error_class in (InputError, InfeasibleError, CheckError)
            if isinstance(error, error_class)
        ]
        return (kinds[0] if kinds else "CheckError"), error.marked
    name, function = type(run.model).__name__, raised_by(error)
    if is_stock and not function and is_of_embedding(error):
        return "InputError", (
            f"{name} looked up a row that one of its tables has not ({error}), in {what} with the corpus's own tokens; "
            "give its embedding a row for every token id, and its positions one for each slot, or set max_length"
        )
    if is_out_of_memory(error):
        return "InfeasibleError", (
            f"{name} ran out of memory when it was compared with the stock model on {what}; lower max_length, use more "
            "devices, or leave the comparison out with check=False"
        )
    words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    reason = f"{function} raises {words}{line_of(error)}" if function else words
    makes_inputs = run.wrapped_model.make_inputs is not None
    if is_stock and (advice := label_advice(error, ignore_index=run.collator.ignore_index, makes_inputs=makes_inputs)):
        return "InputError", f"{name} fails on a sequence alone, in {what} ({reason}); {advice}"
    if is_stock:
        dtypes = (str(weight.dtype) for weight in run.model.parameters() if weight.is_floating_point())
        numbers = next(dtypes, "torch.float32").removeprefix("torch.")
        return "dtype", (
            f"{name} in {numbers} fails on a sequence alone, called as before it was prepared, in {what} ({reason})"
        )
    return "dtype", f"{name} fails where plans compute it otherwise than its user, in {what} ({reason})"
