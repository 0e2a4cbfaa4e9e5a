"""What an attention by hand does to its logits, in a form that calls are compared by without computing it.

Functions and numbers are compared as they are; of tensors over slots, such as masks, what they are by position. Sizes
that are multiples of the number of slots count as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.manual_attention import CASTS, HERE, LogitsOperation
from lengthwise.runtime.wrap.position_tables import OPEN, IndexSamples, PositionTable, TableComparison

_ADDING = ("add", "add_", "sub", "sub_", "__add__", "__sub__", "__radd__", "__iadd__", "__isub__")
"""Functions of logits and of what is added, of which one value for all keys of a query makes no difference."""


class _Operand(NamedTuple):
    """A tensor among the arguments of an operation."""

    function: str
    value: Tensor


class _Size(NamedTuple):
    """A number that is a multiple of the number of slots."""

    slots: int


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of one call."""

    form: tuple[Any, ...]
    """Functions and numbers, in order."""
    operands: tuple[_Operand, ...] = field(repr=False)
    num_slots: int


def read_operations(steps: Sequence[LogitsOperation], num_slots: int) -> Operations:
    """The form and the tensors of recorded operations on the logits of ``num_slots`` slots."""
    operands: list[_Operand] = []
    form = []
    for step in steps:
        name = getattr(step.function, "__name__", str(step.function))
        if name in CASTS:
            continue
        values = (*step.args, *sorted(step.kwargs.items()))
        tensors: list[Tensor] = []
        form.append((name, *(_form(value, num_slots, tensors) for value in values)))
        operands += [_Operand(name, tensor) for tensor in tensors]
    return Operations(form=tuple(form), operands=tuple(operands), num_slots=num_slots)


def _form(value: Any, num_slots: int, tensors: list[Tensor]) -> Any:
    if value is HERE:
        return "logits"
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return "tensor"
    if isinstance(value, torch.dtype | torch.device):
        return None
    if isinstance(value, slice):
        value = ("slice", value.start, value.stop, value.step)
    if isinstance(value, tuple | list):
        return tuple(_form(part, num_slots, tensors) for part in value)
    if type(value) is int and value > 1 and num_slots > 1 and value % num_slots == 0:
        return _Size(value // num_slots)
    return value


class LearnedOperations:
    """The operations of one call for the longest whole sequence so far."""

    def __init__(
        self,
        operations: Operations,
        *,
        before: "LearnedOperations | None",
        last: "LearnedOperations | None",
        most_numbers: int,
    ) -> None:
        """``before``: those of the call before, with which layers may share tensors; ``last``: of this call, for a
        shorter sequence; ``most_numbers``: in a table.
        """
        self.form, self.length = operations.form, operations.num_slots
        self.operands: list[PositionTable | Tensor | None]
        self.samples: list[IndexSamples]
        others = [] if before is None or before.length != self.length else before.operands
        self.operands = [
            _table_of(operand, self.length, others[number] if number < len(others) else None, most_numbers)
            for number, operand in enumerate(operations.operands)
        ]
        has_samples = last is not None and len(last.samples) == len(self.operands)
        self.samples = last.samples if has_samples and last is not None else [IndexSamples() for _ in self.operands]

    def difference(self, operations: Operations, shard: PackShard) -> str:
        """What is other in the operations of a pack, and both values; an empty string if nothing is."""
        if operations.form != self.form:
            pairs = [pair for pair in zip(operations.form, self.form) if pair[0] != pair[1]]
            if not pairs:
                return f"does {len(operations.form)} operations to its logits, where it did {len(self.form)}"
            return f"does {_step_text(pairs[0][0])} to its logits, where it did {_step_text(pairs[0][1])}"
        for operand, learned, samples in zip(operations.operands, self.operands, self.samples):
            if other := _other_operand(operand, learned, samples, shard):
                return f"does {operand.function} {other}"
        return ""


def _other_operand(
    operand: "_Operand", learned: "PositionTable | Tensor | None", samples: IndexSamples, shard: PackShard
) -> str:
    value = operand.value
    if isinstance(learned, Tensor):
        is_same = learned.shape == value.shape and torch.equal(learned.to(value.dtype), value)
        return "" if is_same else f"to its logits with {_told(value)}, where it was {_told(learned)}"
    if learned is None or (values := _over_slots(value, shard.num_slots)) is None:
        return f"to its logits with a tensor {tuple(value.shape)}, which cannot be compared"
    difference = TableComparison(values, learned, shard).difference(samples)
    if difference is not None and operand.function in _ADDING and values.is_floating_point():
        difference = TableComparison(values, learned, shard, is_relative=True).difference(samples)
    return "" if difference is None else f"to its logits with {difference}"


def _table_of(operand: _Operand, length: int, other: Any, most_numbers: int) -> "PositionTable | Tensor | None":
    """What a tensor was for a whole sequence, or the tensor itself where it is none over slots; None: too large."""
    values = operand.value
    if values.dim() == 0 or not any(size == length for size in values.shape[-2:]) or length == 1:
        return values.clone()
    over = _over_slots(values, length)
    if over is None:
        return None
    if over.shape[1] == over.shape[2] and (windowed := _as_band(over)) is not None:
        return windowed
    if isinstance(other, PositionTable) and other.values is not None:
        shared = other.values
        if shared.shape == over.shape and torch.equal(shared, over):
            return other
    return None if over.numel() > most_numbers else PositionTable(length=length, values=over.clone())


def _as_band(values: Tensor) -> PositionTable | None:
    """A tensor of two values, one of them where a slot is within a window, as that; None: it is none."""
    length, inside = values.shape[-1], values[0, 0, 0]
    seen = values == inside
    outside = values.take((~seen).to(torch.uint8).argmax())  # the first that is hidden, or inside if none is
    if not bool((seen | (values == outside)).all()):
        return None
    before, after = (int(seen[0, -1].sum()) - 1, int(seen[0, 0].sum()) - 1)
    before, after = (OPEN if size == length - 1 else size for size in (before, after))
    table = PositionTable(length=length, before=before, after=after, inside=inside.item(), outside=outside.item())
    positions = torch.arange(length, device=values.device)
    return table if bool((table.at(positions, positions) == values).all()) else None


def _over_slots(values: Tensor, num_slots: int) -> Tensor | None:
    """A tensor as [1 or heads, queries, keys]; a table that has fewer slots stays it. None: its rows differ."""
    values = values[(None,) * max(0, 3 - values.dim())]
    if any(size > num_slots for size in values.shape[-2:]):
        return None
    leading = values.shape[:-3]
    first = values[(slice(0, 1),) * len(leading)]
    if any(size != 1 for size in leading) and not torch.equal(values, first.expand_as(values)):
        return None
    values = values[(0,) * len(leading)]
    queries, keys = values.shape[1:]
    return None if 1 not in (queries, keys) and queries != keys else values


def _step_text(step: tuple[Any, ...]) -> str:
    name, *values = step
    numbers = [f"{value:.6g}" for value in values if isinstance(value, int | float)]
    return name + (f" with {', '.join(numbers)}" if numbers else "")


def _told(values: Tensor) -> str:
    return f"{values.item():.6g}" if values.numel() == 1 else f"other values {tuple(values.shape)}"
