"""Tables of positions that a model's forward makes again, longer, where they are too short for the slots of a call.

Rotary factors of many models are such a table. In a pack it would be made of the positions of its sequences, so before
a pack that has more slots than any before, the forward is called as its user calls it, on as many slots, without
gradients and without attention. Then the pack's own forward only cuts the table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.wrap.call_rules import ForwardCalls
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.flash_kernels import ImportedKernels, read_call
from lengthwise.runtime.wrap.manual_attention import Scores
from lengthwise.runtime.wrap.position_calls import INDICES
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls

_ROUNDING = 1e-5
"""The difference between rows of a table of two lengths that rounding may make."""


class LayersDoneError(Exception):
    """Stops a forward after its last layer."""


class GrowingTables:
    """The tables of a model that its forwards may make longer."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._model, self._layers = model, tuple(layers)
        self._others = set[str]()
        """Tensors that every forward makes anew, such as values that a layer keeps."""
        self._first = self._before_last = self._known = _versions_of(self._tables)
        """The tables that there were first, before the last traced forward, and those whose length is known."""
        self._enough: int | None = None
        """Slots of a call for which all tables are long enough; None: there are none."""
        self._is_fixed = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        """Whether no rank calls it by itself: FSDP2 would gather its weights from all, or a longer call failed."""
        self.has_grown = False
        """Whether a forward has made a table."""

    def note_forward(self) -> None:
        """Note what a traced forward has left."""
        self._before_last, self._known = self._known, _versions_of(self._tables)

    def note_traced(self, num_slots: int) -> bool:
        """Note what two forwards have made, the first of ``num_slots`` slots, the second of fewer; returns whether a
        table is among it.
        """
        self._others |= {name for name, version in self._known.items() if self._before_last.get(name) != version}
        tables = self._tables
        self._known = _versions_of(tables)
        self.has_grown = any(self._first.get(name) != version for name, version in self._known.items())
        self._enough = num_slots if self.has_grown else _num_rows(tables)
        return self.has_grown

    @property
    def _tables(self) -> dict[str, Tensor]:
        return {name: table for name, table in _tables_of(self._model).items() if name not in self._others}

    def may_grow(self, num_slots: int = 0) -> bool:
        """Whether there is a table that forwards may make longer; for ``num_slots`` slots, if any."""
        if self._is_fixed or self._enough is None:
            return False
        tables = self._tables
        if (versions := _versions_of(tables)) != self._known:  # restored after a comparison, or made by another call
            self._known, self._enough = versions, 0 if self.has_grown else _num_rows(tables)
        return self._enough is not None and not 0 < num_slots <= self._enough

    def grow(
        self, shard: PackShard, imported: ImportedKernels, forward: Callable[["WithoutAttention", int], Any]
    ) -> set[str]:
        """Make tables long enough for a pack, of which this rank has slots; ``forward`` calls the model with so many.

        Returns the names of attributes that changed.

        Raises:
            InputError: rows that a table had before are others now.
        """
        num_slots = max(shard.num_slots, shard.longest)
        if not shard.num_slots or not self.may_grow(num_slots):
            return set()
        before, state, counts = self._tables, StateBetweenCalls(self._model), shard.counts.copy()
        devices = [shard.device] if shard.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), _ending_with(self._layers[-1]):
                forward(WithoutAttention((*before.values(), *self._model.parameters()), imported, shard), num_slots)
        except LayersDoneError:
            pass
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._is_fixed = True  # the table is one that no call may exceed
            return set()
        finally:
            shard.counts = counts
        tables, versions = self._tables, self._known
        self._known, self._enough = _versions_of(tables), num_slots
        self.has_grown = self.has_grown or self._known != versions
        for name, table in tables.items():
            _check_rows(type(self._model).__name__, name, before.get(name), table)
        return state.names()


class WithoutAttention(InterceptCalls):
    """Lets a forward compute as its user's, of which attention gives zeros."""

    def __init__(self, constants: Iterable[Tensor], imported: ImportedKernels, shard: PackShard) -> None:
        super().__init__(constants, imported=imported, calls=ForwardCalls())
        self.shard = shard
        self._answers |= {
            F.embedding: self._row_of_each,
            Tensor.__getitem__: self._within,
            **dict.fromkeys((torch.index_select, Tensor.index_select, torch.gather, Tensor.gather), self._gathered),
        }

    def _attention(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))

    def _kernel(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        call = read_call(func, args, kwargs)
        return call.query.new_zeros((*call.query.shape[:-1], call.value.shape[-1]))

    def _attend_by_hand(self, scores: Scores, value: Tensor) -> Tensor:
        leading = torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
        return value.new_zeros((*leading, scores.shape[-2], value.shape[-1]))

    def _row_of_each(self, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embed what may be further positions than there are rows, which on a GPU would be no ordinary error."""
        return func(input.clamp(max=len(weight) - 1), weight, *args, **kwargs)

    def _within(self, func: Any, table: Tensor, index: Any) -> Any:
        if not self._is_table(table):
            return func(table, index)
        parts = index if isinstance(index, tuple) else (index,)
        places = [part for part in parts if isinstance(part, Tensor) and part.dtype in INDICES]
        if any(part.numel() and int(part.max()) >= max(table.shape, default=0) for part in places):
            raise IndexError(f"a table {tuple(table.shape)} has fewer rows")
        return self._item(func, table, index)

    def _gathered(self, func: Any, input: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
        if index.numel() and int(index.max()) >= input.shape[dim]:
            raise IndexError(f"a table {tuple(input.shape)} has fewer rows")
        return func(input, dim, index, **kwargs)


def _tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Tensors with rows that modules keep, by name, but for parameters."""
    tables = {}
    for prefix, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dim() > 1:
                tables[f"{prefix}.{name}" if prefix else name] = value
    return tables


def _versions_of(tables: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """What tells that a table was exchanged or written, by name."""
    return {name: (id(table), -1 if table.is_inference() else table._version) for name, table in tables.items()}


def _num_rows(tables: Mapping[str, Tensor]) -> int | None:
    """Rows of the shortest table; None: there is none."""
    return min((max(table.shape) for table in tables.values()), default=None)


def _check_rows(model: str, name: str, before: Tensor | None, now: Tensor) -> None:
    """Raise ``InputError`` unless a longer table begins with the rows of the one before."""
    if before is None or before is now or before.dim() != now.dim():
        return
    grown = [axis for axis, (old, new) in enumerate(zip(before.shape, now.shape)) if new > old]
    if len(grown) != 1:
        return
    first = now.narrow(grown[0], 0, before.shape[grown[0]])
    if first.shape != before.shape or torch.allclose(first.to(before), before, rtol=_ROUNDING, atol=_ROUNDING):
        return
    raise InputError(
        f"{model} makes its table {name} again for {now.shape[grown[0]]:,} slots, and the first rows are others "
        "than before, so they depend on the length of a call, which of a pack is that of many sequences: "
        "make the table in __init__ for the longest sequence, or let packing='never' compute sequence by sequence"
    )


@contextmanager
def _ending_with(layer: nn.Module) -> Iterator[None]:
    """Within, a forward ends with this layer, by an error."""

    def end(*_: Any) -> None:
        raise LayersDoneError

    handle = layer.register_forward_hook(end)
    try:
        yield
    finally:
        handle.remove()
