"""Record or answer the calls of a forward that make positions: ``torch.arange`` over slots, the first rows of a table.

Calls of ``arange`` and cuts ``[:n]`` that count from 0 are known by their number. Those that count from elsewhere, by
``narrow``, of ones or of a list, are known by their place in the model's code: there may be any number of others, such
as one for each chunk.
See :class:`~lengthwise.runtime.wrap.torch_function_mode.InterceptCalls`, which meets them.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.attention_calls import AttentionCalls
from lengthwise.runtime.wrap.call_rules import CallRules, ForwardCall, ForwardCalls, Place
from lengthwise.runtime.wrap.custom_masks import ON_PACKS, MaskTables

_MAKES_ONES = (torch.ones, torch.ones_like, Tensor.new_ones)
_CASTS = (Tensor.long, Tensor.int, Tensor.to)
"""What leaves ones as they are."""
_FORMS = (
    Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as, Tensor.detach, Tensor.clone,
    torch.detach, torch.clone, Tensor.contiguous, Tensor.cpu, Tensor.cuda, Tensor.unsqueeze, Tensor.squeeze,
    Tensor.transpose, Tensor.permute, Tensor.view, Tensor.reshape, torch.unsqueeze, torch.squeeze, torch.transpose,
    torch.permute, torch.reshape, Tensor.t, torch.t,
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "data")),
)  # fmt: skip
"""What leaves a table one, in another dtype or form."""
INDICES = (torch.int64, torch.int32)
_INTERCEPTING = (__name__, "lengthwise.runtime.wrap.torch_function_mode", "torch.overrides")
"""Modules between a call of the model's and its answer."""


class PositionCalls(AttentionCalls):
    """Records calls in ``calls`` or answers them by ``rules``."""

    def __init__(
        self,
        constants: Iterable[Tensor],
        calls: ForwardCalls | None,
        rules: CallRules | None,
        masks: MaskTables | None,
    ) -> None:
        """``constants``: tensors that the model keeps, of which some may be tables of positions."""
        super().__init__(calls, rules, masks)
        self.use_constants(constants)
        self._ones = WeakTensorKeyDictionary()
        """Tensors that were made of ones, and their versions then."""
        self._forms = WeakTensorKeyDictionary()
        """Forms of tables that the forward has made."""
        self._whole_of = WeakTensorKeyDictionary()
        """Functions that make a whole table, by its rows of this rank's slots that were answered, or forms of them."""
        self._has_noted = False
        """Whether there was anything for the two; few models have any, and nearly every operation asks."""
        self._position_answers: dict[Any, Any] = {
            torch.arange: self._arange,
            torch.tensor: self._tensor,
            Tensor.__getitem__: self._item,
            **dict.fromkeys((Tensor.narrow, torch.narrow), self._narrow),
            **dict.fromkeys((Tensor.cumsum, torch.cumsum), self._cumsum),
            **dict.fromkeys(_MAKES_ONES, self._make_ones),
            **dict.fromkeys(_CASTS, self._cast),
            **dict.fromkeys(_FORMS, self._form),
            F.embedding: self._embedding,
            **dict.fromkeys((torch.index_select, Tensor.index_select), self._index_select),
        }

    def use_constants(self, constants: Iterable[Tensor]) -> None:
        """Take the tensors that the model keeps now, of which some may be tables of positions."""
        self._tables = {id(constant): constant for constant in constants}

    def _arange(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        bounds = _bounds(args, kwargs)
        if bounds is None or _is_called_in("transformers.masking_utils", "transformers.integrations.moe"):
            return func(*args, **kwargs)  # masks of this rank's slots, whose positions they are given; places in a sort
        start, end = bounds
        if start or len(args) > 2 or not isinstance(end, int):
            is_answered = self._is_known("arange", int(start), int(end - start))
        else:
            is_answered = self._is_numbered("arange", end)
        if not is_answered:
            return func(*args, **kwargs)
        is_whole = isinstance(start, int) and isinstance(end, int)
        dtype = kwargs.get("dtype") or (torch.int64 if is_whole else torch.get_default_dtype())
        return self._from(int(start)).to(kwargs.get("device"), dtype)

    def _tensor(self, func: Any, data: Any, **kwargs: Any) -> Tensor:
        """Answer a tensor of the list of all positions."""
        if not isinstance(data, list | tuple | range) or not data or type(data[0]) is not int:
            return func(data, **kwargs)
        count, start = len(data), data[0]
        is_counted = type(data[-1]) is int and data[-1] - start == count - 1
        is_counted = is_counted and list(data) == list(range(start, start + count))
        if not self._is_known("tensor", start, count if is_counted else -1):
            return func(data, **kwargs)
        return self._from(start).to(kwargs.get("device"), kwargs.get("dtype") or torch.int64)

    def _item(self, func: Any, table: Tensor, index: Any) -> Tensor:
        """Answer indexing of the first rows of a position table by the rows of this rank's positions."""
        parts = index if isinstance(index, tuple) else (index,)
        if (make_whole := self._maker_of(table)) is not None:
            if any(isinstance(part, Tensor) and part.dtype in INDICES for part in parts):
                return func(make_whole(), index)  # rows by number
            return self._answered(func(table, index), lambda: func(make_whole(), index))
        if not self._is_table(table):
            return func(table, index)
        starts = [_start(part) for part in parts]
        cuts = [place for place, start in enumerate(starts) if start == 0]
        cuts = cuts or [place for place, start in enumerate(starts) if start is not None]
        if len(cuts) != 1 or any(isinstance(part, Tensor | list | bool) for part in parts):
            return func(table, index)
        cut, start = cuts[0], starts[cuts[0]]
        assert start is not None, "it is where a cut begins"
        count = parts[cut].stop - start
        if not (self._is_known("table", start, count) if start else self._is_numbered("table", count)):
            return func(table, index)
        rows = self._rows(table, _axis(table, parts, cut), start)
        others = tuple(slice(None) if place == cut else part for place, part in enumerate(parts))
        from_start = tuple(slice(start, None) if place == cut else part for place, part in enumerate(parts))
        return self._answered(func(rows, others), lambda: func(table, from_start))

    def _narrow(self, func: Any, input: Tensor, dim: int, start: Any, length: Any) -> Tensor:
        """Answer the first rows of a position table, or as many from a later one."""
        is_cut = isinstance(start, int) and isinstance(length, int) and start >= 0
        is_answered = is_cut and self._is_table(input) and self._is_known("narrow", start, length)
        if not is_answered:
            return func(input, dim, start, length)
        return self._answered(self._rows(input, dim, start), lambda: input.narrow(dim, start, input.shape[dim] - start))

    def _rows(self, table: Tensor, axis: int, start: int) -> Tensor:
        """The rows of this rank's positions, from ``start``."""
        assert self.shard is not None, "a micro-batch is computed"
        num_rows = table.shape[axis] - start
        if self.shard.longest > num_rows and self.shard.num_slots:
            raise InputError(
                f"a sequence has {self.shard.longest:,} slots, the model's table of positions "
                f"{tuple(table.shape)} is for {num_rows:,}; set max_length={num_rows}"
            )
        return table.index_select(axis, self._from(start))

    def _make_ones(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = func(*args, **kwargs)
        if not made.is_inference():
            self._ones[made] = made._version
        return made

    def _is_table(self, input: Tensor) -> bool:
        """Whether it is a constant of the model, or a form of one."""
        return id(input) in self._tables or (self._has_noted and input in self._forms)

    def _maker_of(self, rows: Tensor) -> Callable[[], Tensor] | None:
        return self._whole_of.get(rows) if self._has_noted else None

    def _form(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = func(input, *args, **kwargs)
        if not (self._has_noted or id(input) in self._tables) or not isinstance(made, Tensor) or made is input:
            return made
        if (make_whole := self._maker_of(input)) is not None:
            return self._answered(made, lambda: func(make_whole(), *args, **kwargs))
        if self._is_table(input):
            self._forms[made], self._has_noted = None, True
        return made

    def _answered(self, rows: Tensor, make_whole: Callable[[], Tensor]) -> Tensor:
        """Note the rows of a table that were answered; a model that takes some of them by number means the table's."""
        self._whole_of[rows], self._has_noted = make_whole, True
        return rows

    def _embedding(self, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        make_whole = self._maker_of(weight)
        return func(input, weight if make_whole is None else make_whole(), *args, **kwargs)

    def _index_select(self, func: Any, input: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
        make_whole = self._maker_of(input)
        return func(input if make_whole is None else make_whole(), dim, index, **kwargs)

    def _cast(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = self._form(func, input, *args, **kwargs)
        if made is not input and self._are_ones(input) and not made.is_inference():
            self._ones[made] = made._version
        return made

    def _are_ones(self, input: Any) -> bool:
        """Whether a tensor has been ones since it was made, whatever the data."""
        return bool(self._ones) and isinstance(input, Tensor) and self._ones.get(input, -1) == _version(input)

    def _cumsum(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Answer the running sum of ones over slots."""
        dim = args[0] if args else kwargs.get("dim")
        if not isinstance(dim, int) or "out" in kwargs or not self._are_ones(input):
            return func(input, *args, **kwargs)
        if not self._is_known("cumsum", 1, input.shape[dim]):
            return func(input, *args, **kwargs)
        default = input.dtype if input.is_floating_point() else torch.int64
        values = self._from(1).to(input.device, kwargs.get("dtype") or default)
        return values.view(-1, *[1] * (-1 - dim if dim < 0 else input.dim() - 1 - dim)).expand(input.shape).clone()

    def _from(self, start: int) -> Tensor:
        """The positions of this rank's slots, where the first is ``start``."""
        assert self.shard is not None, "a micro-batch is computed"
        return self.shard.positions + start if start else self.shard.positions

    def _is_numbered(self, kind: str, count: int) -> bool:
        """Whether a call that counts from 0 is one of positions, known by its number; count it."""
        rule = self._rule("positions", ForwardCall(kind=kind, shape=(count,), layer=self.layer))
        return rule is not None and rule.dim is not None

    def _is_known(self, kind: str, start: int, count: int) -> bool:
        """Whether a call is one of positions, known by its place in the code; where rules are learned, record it.

        Raises:
            InputError: it was one when the model was prepared, and is no more.
        """
        assert self.shard is not None, "a micro-batch is computed"
        place, is_over_slots = _place(kind), count == self.shard.num_slots
        if self._calls is not None:
            self.shard.counts.known_places += is_over_slots
            self._calls.note_place(place, start if is_over_slots else None)
            return False
        assert self._rules is not None, "there are calls to note, or rules to follow"
        learned = self._rules.places.get(place)
        if learned is None:
            return False
        self.shard.counts.known_places += 1
        if start != learned or not is_over_slots:
            raise InputError(
                f"the positions that {place[1].co_name} makes by {kind} were one for each slot, from {learned} on, "
                f"when the model was prepared; now {max(count, 0)} from {start} on are made for {self.shard.num_slots} "
                f"slots; {ON_PACKS}"
            )
        return True


def _version(input: Tensor) -> int:
    return -2 if input.is_inference() else input._version


def _calling_frame() -> FrameType | None:
    """Where the intercepted torch call was made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _INTERCEPTING:
        frame = frame.f_back
    return frame


def _is_called_in(*modules: str) -> bool:
    """Whether the intercepted torch call was made in one of ``modules``."""
    frame = _calling_frame()
    return frame is not None and frame.f_globals.get("__name__") in modules


def _place(kind: str) -> Place:
    """The place in the code of the intercepted torch call."""
    frame = _calling_frame()
    assert frame is not None, "somebody called it"
    return kind, frame.f_code, frame.f_lasti


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """The whole numbers that ``torch.arange`` counts from and up to, by ones; None: it does otherwise."""
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    bounds = dict(zip(names, args)) | kwargs
    start, end, step = bounds.get("start", 0), bounds.get("end"), bounds.get("step", 1)
    is_whole = all(isinstance(x, int) or (isinstance(x, float) and x.is_integer()) for x in (start, end, step))
    if not is_whole or step != 1 or "out" in bounds:
        return None
    return start, cast(float, end)


def _start(part: Any) -> int | None:
    """Where a part of an index begins that is ``[:n]`` or ``[start:n]``; None: it is another."""
    if not isinstance(part, slice) or not isinstance(part.stop, int) or part.step not in (None, 1):
        return None
    start = 0 if part.start is None else part.start
    return start if isinstance(start, int) and start >= 0 else None


def _axis(table: Tensor, parts: tuple[Any, ...], cut: int) -> int:
    """The axis of the table that part ``cut`` of an index slices."""
    before, after = parts[:cut], parts[cut:]
    if any(part is Ellipsis for part in before):
        return table.dim() - sum(part is not None for part in after)
    return sum(part is not None for part in before)
