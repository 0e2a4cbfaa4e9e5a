"""Mask functions of transformers models, evaluated for the positions of each sequence.

A model says what its layers may see by a function of the positions of a query and a key, from which transformers makes
a mask of all pairs. Here it stays a function: of the positions in the sequence, some queries at a time. Causal and open
masks and sliding windows are known by name, for which there are faster ways; others are called.
"""

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.sharded_attention import SequenceMask

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]
"""From numbers of batch row, head, query and key to whether the query sees the key."""
_HOME = "transformers.masking_utils"
_OPEN = 1 << 62
"""A window's side that is open."""


class SymbolicMask(Tensor):
    """A symbolic attention mask: which slots of its own sequence each slot sees. One element, for its shape."""

    causal: bool
    window: tuple[int, int] | None
    function: MaskFunction | None

    @staticmethod
    def of(
        causal: bool, window: tuple[int, int] | None, device: torch.device, function: MaskFunction | None = None
    ) -> "SymbolicMask":
        """Make a mask; if there is a ``function``, it alone says what is seen."""
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(SymbolicMask)
        seen.causal, seen.window, seen.function = causal, window, function
        return seen

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Compute on the mask as on a plain tensor, which is then refused as a mask."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_mask(
    *, mask_function: MaskFunction, attention_mask: Tensor | None = None, device: Any = "cpu", **options: Any
) -> SymbolicMask:
    """Make a symbolic mask; transformers calls this instead of making a mask of all pairs."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError("attention_mask hides tokens; a pack has no padding to hide: leave attention_mask out")
    device = torch.device(device)
    causal_and_windows = _known(mask_function)
    if causal_and_windows is None:
        return SymbolicMask.of(False, None, device, mask_function)
    causal, windows = causal_and_windows
    window = None
    if windows:
        window = min(before for before, _ in windows), 0 if causal else min(after for _, after in windows)
    return SymbolicMask.of(causal, window, device)


def _name(function: Any) -> str:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return name.removeprefix(f"{_HOME}.").split(".<locals>")[0] if name.startswith(_HOME) else name


def _known(function: Any) -> tuple[bool, list[tuple[int, int]]] | None:
    """Parse a mask function into causal or not, and its windows; None if it is none of the known ones."""
    name = _name(function)
    if name == "causal_mask_function":
        return True, []
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        return False, []  # ends of sequences are known better here
    bound = getclosurevars(function).nonlocals if hasattr(function, "__closure__") else {}
    if name == "sliding_window_overlay":
        return False, [(bound["sliding_window"] - 1, _OPEN)]
    if name == "sliding_window_bidirectional_overlay":
        return False, [(bound["sliding_window"],) * 2]
    if name == "remap_positions_for_packed_sequence":
        return _known(bound["mask_function"])
    if name == "and_masks":
        parts = [_known(part) for part in bound["mask_functions"]]
        if any(part is None for part in parts):
            return None
        known_parts = [part for part in parts if part is not None]
        return any(causal for causal, _ in known_parts), [window for _, windows in known_parts for window in windows]
    return None


def sequence_mask(function: MaskFunction, shard: PackShard) -> SequenceMask:
    """Evaluate a mask function for the sequences of a pack, each by its own positions.

    Raises:
        InputError: the function reads values of slots, some of which other ranks have.
    """
    num_slots, is_shared = shard.num_slots, shard.group.size > 1
    functions: dict[int, MaskFunction] = {}

    def of_sequence(number: int) -> MaskFunction:
        if number not in functions:
            bounds = shard.cu_seqlens[number], shard.cu_seqlens[number + 1]
            functions[number] = _within(function, partial(_values_within, *bounds, num_slots, is_shared))
        return functions[number]

    of_sequence(0)  # what is refused is refused at once

    def mask(number: int, heads: range, queries: range, keys: range) -> Tensor:
        zero = torch.zeros((), dtype=torch.long, device=shard.device)
        q_index, k_index = (torch.arange(span.start, span.stop, device=shard.device) for span in (queries, keys))
        sees = of_sequence(number)
        for axes in ((None, None, None, 0), (None, None, 0, None)):
            sees = torch.vmap(sees, in_dims=axes)
        with torch._C.DisableTorchFunctionSubclass(), _indexing_allowed():
            return sees(zero, zero, q_index, k_index)

    return mask


def _indexing_allowed() -> Any:
    """A mode in which tensors may be indexed by the indices of ``vmap``, as transformers allows it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def _within(function: Any, values_within: Callable[[str, Tensor], Tensor]) -> Any:
    """Restrict a mask function to one sequence: cut the tensors that it closes over, drop what it knows of packs."""
    name = _name(function)
    if name == "packed_sequence_mask_function":
        return _sees_all
    if isinstance(function, partial):
        parts = [_held(name, value, values_within) for value in (*function.args, *function.keywords.values())]
        args, options = parts[: len(function.args)], parts[len(function.args) :]
        return partial(_within(function.func, values_within), *args, **dict(zip(function.keywords, options)))
    if not isinstance(function, FunctionType):
        if any(isinstance(value, Tensor) for value in vars(function).values()):
            raise InputError(f"the model asks for a mask by {name}, an object that holds tensors; give it a function")
        return function
    if name == "remap_positions_for_packed_sequence":
        return _within(getclosurevars(function).nonlocals["mask_function"], values_within)
    if not function.__closure__:
        return function
    cells = tuple(CellType(_held(name, cell.cell_contents, values_within)) for cell in function.__closure__)
    bound = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    bound.__kwdefaults__, bound.__qualname__ = function.__kwdefaults__, function.__qualname__
    return bound


def _held(name: str, value: Any, values_within: Callable[[str, Tensor], Tensor]) -> Any:
    """Restrict a value that a mask function closes over to one sequence."""
    if isinstance(value, Tensor):
        return values_within(name, value)
    if isinstance(value, tuple | list):
        return type(value)(_held(name, part, values_within) for part in value)
    is_mask = isinstance(value, FunctionType | partial)
    return _within(value, values_within) if is_mask else value


def _values_within(start: int, end: int, num_slots: int, is_shared: bool, name: str, values: Tensor) -> Tensor:
    """Cut a tensor [rows, slots] to the slots of one sequence; others are left as they are."""
    if values.numel() == 1 or values.shape[-1] != num_slots:
        return values
    if is_shared or values.dim() == 1:
        raise InputError(
            f"the model's mask {name} reads a tensor {tuple(values.shape)} of the slots, which ranks that share a "
            "sequence have parts of; set max_degree=1"
        )
    return values.narrow(-1, start, end - start)


def _sees_all(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    return query >= 0
