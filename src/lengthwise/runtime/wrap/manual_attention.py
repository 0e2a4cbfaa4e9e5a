"""Attention that a model writes out by hand: matmul of queries and keys, mask, softmax, matmul with values.

On a shard that product would be of this rank's slots alone, in a pack of all sequences with each other. So it is not
computed: it is a tensor without numbers, which notes what is done to it. Where that amounts to a scale and a bias by
position, the whole is an attention like any other; where it does not, the model is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.errors import InputError

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
ADDED_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)
_DROPOUTS = (F.dropout, torch.dropout)
_QUESTIONS = (Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)
CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
"""Functions of logits that change their dtype and nothing else."""
_TRIED = 1 << 16
"""Weights that a function is tried on: as many as the sequences have that a model is learned from."""
_HIDDEN = -5000.0
"""Logits this low have a weight of exactly 0."""
_SHORT = 256
"""Slots of sequences for which what is done to logits is tried on random ones."""


@dataclass(frozen=True)
class LogitsOperation:
    """A recorded function of the logits and of other arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, logits: Any) -> Any:
        """Apply the operation to logits."""
        args, kwargs = _replaced((self.args, self.kwargs), lambda value: logits if value is HERE else value)
        return self.function(*args, **kwargs)


HERE = object()


class LogitsKind(Enum):
    """What scores are before they are weights."""

    LOGITS = auto()
    SHIFTED = auto()
    """Logits minus the maximum of their row, which the softmax of them does not show, and another function might."""
    LOG_WEIGHTS = auto()
    EXPONENTIALS = auto()


@dataclass(frozen=True, kw_only=True)
class ManualAttention:
    """The recorded operations of a manual attention between its two products."""

    query: Tensor
    key: Tensor
    steps: tuple[LogitsOperation, ...] = ()
    is_weights: bool = False
    kind: LogitsKind = LogitsKind.LOGITS
    dropout: float = 0.0
    is_beyond: bool = False
    """Whether there are more slots than a table has that was applied, so that the steps cannot be computed."""

    def logits(self, products: Tensor, *, has_casts: bool = True) -> Tensor:
        """Apply the recorded operations to the product of queries and keys; ``has_casts``: those to a dtype too."""
        for step in self.steps:
            products = step.of(products) if has_casts or _name(step.function) not in CASTS else products
        return products

    def of(self, value: Tensor) -> Tensor:
        """Compute the attention as the model would, without dropout."""
        weights = self.logits(self.query @ self.key.transpose(-2, -1)).softmax(-1)
        return weights.reshape(*value.shape[:-2], *weights.shape[-2:]).to(value.dtype) @ value

    def scale_and_bias(self) -> tuple[float, Tensor]:
        """Reduce the operations to a scale of the logits and a bias [heads or 1, t, t], -inf where hidden.

        They are computed in float64 where they can be: after a cast, as many models have before their softmax, a scale
        would be rounded to that dtype, and the attention would be another one than that of the model in float64.

        Raises:
            InputError: they do not become scaled products and a bias.
        """
        heads = torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2])
        computed = ((torch.float64, False), (torch.float64, True), (self.query.dtype, True))
        for (dtype, has_casts), leading in product(computed, ((1,) * len(heads), heads)):
            zeros = torch.zeros(*leading, self.query.shape[-2], self.key.shape[-2], dtype=dtype)
            try:
                return self._scale_and_bias(zeros.to(self.query.device), has_casts=has_casts)
            except (RuntimeError, IndexError):  # not of this dtype, or all heads must be there
                continue
        raise _refusal(self.steps[-1].function)

    def _scale_and_bias(self, zeros: Tensor, *, has_casts: bool) -> tuple[float, Tensor]:
        logits = partial(self.logits, has_casts=has_casts)
        bias = logits(zeros)
        seen = bias > _HIDDEN
        slope = logits(zeros + 1.0) - bias
        place = torch.where(seen, bias.abs(), torch.inf).argmin()
        scale = float(slope.flatten()[place])
        products = torch.ones_like(zeros) * 0.5
        if zeros.shape[-1] <= _SHORT:
            products = torch.rand(zeros.shape, generator=torch.Generator().manual_seed(0)).to(zeros)
            if torch.finfo(zeros.dtype).bits >= 32:  # where rounding of the scale is small
                products = products * 16.0 - 8.0
        same = products.numel() == bias.numel()
        expected = bias + scale * (products.reshape(bias.shape) if same else products)
        limit = 1e-2 if torch.finfo(bias.dtype).bits < 32 else 1e-4
        is_near = (logits(products) - expected).abs() <= limit * (1.0 + expected.abs())
        if not bool((is_near | ~seen).all()):
            raise InputError(
                "a model that attends by hand does more to its logits than to scale them and to add a mask or a bias "
                "by position, which cannot be honoured on packs"
            )
        bias = bias.masked_fill(~seen, -torch.inf)
        bias = bias.flatten(0, -3) if bias.dim() > 3 else bias
        return scale, bias[:1] if bool((bias == bias[:1]).all()) else bias


class Scores(Tensor):
    """Symbolic logits, later weights, of a manual attention: a shape and recorded operations, no numbers."""

    attended: ManualAttention
    form: Tensor
    row: str = ""
    """What it is of each row of scores, such as its sum; empty: it is scores."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(attended: ManualAttention, form: Tensor, device: torch.device) -> "Scores":
        """``form``: a tensor of its shape and dtype on the meta device."""
        scores: Scores = torch.Tensor._make_wrapper_subclass(Scores, form.shape, dtype=form.dtype, device=device)
        scores.attended, scores.form = attended, form
        return scores

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        """Refuse operations that are not recorded."""
        raise InputError(f"a model that attends by hand takes its logits to {func}, which cannot be honoured on packs")


def begin_scores(query: Tensor, key: Tensor) -> Scores:
    """Begin symbolic scores: the product of queries [..., t, H] and keys [..., H, t]."""
    form = torch.empty(query.shape, dtype=query.dtype, device="meta") @ torch.empty(
        key.shape, dtype=key.dtype, device="meta"
    )
    return Scores.of(ManualAttention(query=query, key=key.transpose(-2, -1)), form, query.device)


def begin_scores_with_bias(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Scores:
    """Begin symbolic scores scaled and with a bias, with the arguments of ``torch.baddbmm``."""
    scores, bias = begin_scores(batch1, batch2), input
    scores = record_operation(torch.mul, (scores, alpha), {}) if alpha != 1.0 else scores
    return record_operation(torch.add, (scores, bias * beta), {}) if beta else scores


def find_scores(args: Any) -> Scores | None:
    """The scores among the arguments of a call, whose lists are looked into."""
    for value in args:
        if isinstance(value, Scores):
            return value
        if type(value) in (list, tuple) and (scores := find_scores(value)) is not None:
            return scores
    return None


def record_operation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool = False
) -> Any:
    """Record a function of scores; returns scores again, or an answer about their shape.

    Args:
        is_known: what follows from positions was learned from whole sequences. A pack may be longer than any of them,
            and than the tables of the model, such as a triangle that it keeps.

    Raises:
        InputError: it cannot be noted.
    """
    scores = find_scores((*args, *kwargs.values()))
    assert scores is not None, "a function of scores"
    if function in _QUESTIONS or getattr(function, "__name__", "") == "__get__":
        return function(*args, **kwargs)
    attended = scores.attended
    if scores.row or attended.kind is not LogitsKind.LOGITS:
        raise _refusal(function)
    if function in _DROPOUTS:
        p, training = [*args[1:], *(kwargs[name] for name in ("p", "training", "train") if name in kwargs)][:2]
        return Scores.of(replace(attended, dropout=p if training else 0.0), scores.form, scores.device)
    try:
        form = form_of(function, args, kwargs)
    except InputError:
        if not is_known or attended.is_weights or not _is_cut(scores, (*args, *kwargs.values())):
            raise
        form, attended = scores.form, replace(attended, is_beyond=True)
    if _name(function) == "softmax":  # that of torch, of torch.nn.functional, or of tensors
        dim = kwargs["dim"] if "dim" in kwargs else args[1]
        if attended.is_weights or dim not in (-1, scores.dim() - 1):
            raise _refusal(function)
        return Scores.of(replace(attended, is_weights=True), form, scores.device)
    if attended.is_weights:
        if form.shape[-2:] != scores.shape[-2:] or not _keeps_numbers(function, args, kwargs, scores):
            raise _refusal(function)
        return Scores.of(attended, form, scores.device)
    others: list[Tensor] = []
    _replaced((args, kwargs), lambda value: others.append(value) if isinstance(value, Tensor) else None)
    if function in PRODUCTS:
        raise InputError(
            "a model that attends by hand multiplies its logits by its values without a softmax over keys between "
            "them, which cannot be honoured on packs"
        )
    if any(isinstance(other, Scores) for other in others if other is not scores):
        raise _refusal(function)
    if any(other.requires_grad for other in others if other is not scores):
        raise InputError(
            f"a model that attends by hand calls {_name(function)} of its logits and of what is trained, such as a "
            "bias by position, which cannot be honoured on packs"
        )
    args, kwargs = _replaced((args, kwargs), lambda value: HERE if value is scores else value)
    attended = replace(attended, steps=(*attended.steps, LogitsOperation(function, args, kwargs)))
    if _name(function).endswith("_") and not _name(function).endswith("__"):  # in place
        scores.attended, scores.form = attended, form
        return scores
    return Scores.of(attended, form, scores.device)


def _is_cut(scores: Scores, others: tuple[Any, ...]) -> bool:
    """Whether another argument is a table that is shorter than the scores."""
    tables = [other for other in others if isinstance(other, Tensor) and other is not scores and other.dim() > 1]
    return any(1 < size < of for table in tables for size, of in zip(table.shape[-2:], scores.shape[-2:], strict=True))


def _keeps_numbers(function: Callable[..., Any], args: Any, kwargs: Any, scores: Scores) -> bool:
    """Whether a function changes only dtype and shape, which is all that may be done to weights."""
    if scores.numel() > _TRIED:
        return True  # it was tried when the model was learned
    numbers = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores.device, scores.dtype)
    args, kwargs = _replaced((args, kwargs), lambda value: numbers.clone() if value is scores else value)
    with torch.no_grad():
        result = function(*args, **kwargs).flatten().to(scores.dtype)
    return result.shape == numbers.flatten().shape and torch.allclose(result, numbers.flatten(), rtol=1e-2, atol=0.0)


def form_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A meta tensor with the shape and dtype of what a function of scores returns.

    Raises:
        InputError: it is no function of one tensor, or not of this shape.
    """

    def on_meta(value: Any) -> Any:
        if isinstance(value, Scores):
            return value.form.clone()
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    args, kwargs = _replaced((args, kwargs), on_meta)
    try:
        form = function(*args, **kwargs)
    except Exception as error:  # whatever torch raises for what it cannot do without numbers
        raise _refusal(function) from error
    if not isinstance(form, Tensor):
        raise _refusal(function)
    return form


def _refusal(function: Callable[..., Any]) -> InputError:
    return InputError(
        f"a model that attends by hand calls {_name(function)} between its products of queries, keys and values, which "
        "cannot be honoured on packs"
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every leaf of nested tuples, lists and dictionaries."""
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, change) for part in value)
    if type(value) is dict:
        return {name: _replaced(part, change) for name, part in value.items()}
    return change(value)
