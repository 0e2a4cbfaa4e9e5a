"""A softmax over keys that a model writes out as well: of exponentials and their sum, or of a logarithm of weights.

``a / a.sum(-1, keepdim=True)`` of ``a = logits.exp()``, ``logits.log_softmax(-1).exp()`` and what subtracts the maximum
or the log of the sum of each row first: all are the softmax of the logits, for which weights are computed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lengthwise.runtime.wrap.manual_attention import CASTS, LogitsKind, ManualAttention, Scores, find_scores, form_of

_OF_ROWS = {
    ("amax", LogitsKind.LOGITS): "maximum", ("max", LogitsKind.LOGITS): "maximum",
    ("logsumexp", LogitsKind.LOGITS): "log of sum", ("logsumexp", LogitsKind.SHIFTED): "log of sum",
    ("sum", LogitsKind.EXPONENTIALS): "sum",
}  # fmt: skip
"""What a function gives of each row of scores, by its name and what they are."""
_SUBTRACTIONS = ("sub", "subtract", "__sub__")
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__")


def part_of_softmax(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scores after a function that is a part of a softmax over keys; None if it is none, and nothing was done."""
    scores, name = find_scores(args), getattr(function, "__name__", "")
    if scores is None or scores.attended.is_weights or not args:
        return None
    attended = scores.attended
    if args[0] is scores and (row := _OF_ROWS.get((name, attended.kind))) and not scores.row:
        return _row_of(scores, row, function, args, kwargs)
    keeps_numbers = name in CASTS or (name == "detach" and scores.row == "maximum")
    if keeps_numbers and args[0] is scores and (scores.row or attended.kind is not LogitsKind.LOGITS):
        return _with(scores, attended, function, args, kwargs)
    is_logits = attended.kind in (LogitsKind.LOGITS, LogitsKind.SHIFTED)
    if name == "log_softmax" and args[0] is scores and _is_over_keys(scores, args[1:], kwargs):
        log_weights = replace(attended, kind=LogitsKind.LOG_WEIGHTS)
        return _with(scores, log_weights, function, args, kwargs) if is_logits and not scores.row else None
    if name == "softmax" and attended.kind is LogitsKind.SHIFTED and not scores.row:
        weights = replace(attended, kind=LogitsKind.LOGITS, is_weights=True)
        is_over_keys = args[0] is scores and _is_over_keys(scores, args[1:], kwargs)
        return _with(scores, weights, function, args, kwargs) if is_over_keys else None
    if name == "exp" and args[0] is scores and not scores.row and attended.kind is not LogitsKind.EXPONENTIALS:
        is_log = attended.kind is LogitsKind.LOG_WEIGHTS
        made = {"kind": LogitsKind.LOGITS, "is_weights": True} if is_log else {"kind": LogitsKind.EXPONENTIALS}
        return _with(scores, replace(attended, **made), function, args, kwargs)
    return _of_rows(function, args, kwargs)


def _of_rows(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """Logits minus what was made of their rows, or exponentials divided by their sums; None if it is neither."""
    if len(args) != 2 or kwargs or not all(isinstance(value, Scores) for value in args):
        return None
    (scores, rows), name = args, getattr(function, "__name__", "")
    if scores.row or rows.attended is not scores.attended:
        return None
    if name in _SUBTRACTIONS and rows.row == "maximum":
        return _with(scores, replace(scores.attended, kind=LogitsKind.SHIFTED), function, args, kwargs)
    if name in _SUBTRACTIONS and rows.row == "log of sum":
        return _with(scores, replace(scores.attended, kind=LogitsKind.LOG_WEIGHTS), function, args, kwargs)
    if name in _DIVISIONS and rows.row == "sum":
        return _with(scores, replace(scores.attended, kind=LogitsKind.LOGITS, is_weights=True), function, args, kwargs)
    return None


def _row_of(scores: Scores, row: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """What a function makes of each row of scores, kept as a column; None if it is over something else."""
    others = args[1:]
    is_kept = kwargs.get("keepdim", others[1] if len(others) > 1 else False)
    if not is_kept or len(others) > 2 or not _is_over_keys(scores, others, kwargs):
        return None
    form = torch.empty(*scores.shape[:-1], 1, dtype=scores.dtype, device="meta")
    result = Scores.of(scores.attended, form, scores.device)
    result.row = row
    return torch.return_types.max((result, result)) if getattr(function, "__name__", "") == "max" else result


def _is_over_keys(scores: Scores, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs["dim"] if "dim" in kwargs else others[0] if others else None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return dim in (-1, scores.dim() - 1)


def _with(scores: Scores, attended: ManualAttention, function: Any, args: Any, kwargs: Any) -> Scores:
    """Scores of ``attended`` in the form that a function gives them, and of rows what they were of."""
    result = Scores.of(attended, form_of(function, args, kwargs), scores.device)
    result.row = scores.row
    return result
