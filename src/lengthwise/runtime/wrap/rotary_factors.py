"""Rotary factors that depend on the sequence length, computed for each sequence of a pack as if it were alone.

Dynamic NTK and longrope scale their frequencies by the longest position that they are given, and keep them for the next
call. In a pack that would be the longest sequence of all, on a rank that holds a part of a sequence the last of its own
slots. So such a module is asked for the factors of whole sequences, each in the state in which the model came. After
every call it is restored to that state, also where the model is computed sequence by sequence or as before.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls

_POSITIONS = "position_ids"
_STATIC = frozenset({"default", "linear", "llama3", "yarn", "proportional", "mrope"})
"""Kinds of rotary factors of transformers that are functions of the position alone."""
_PROBES = (5, 8)
"""Lengths that tell where in its outputs a module puts the slots."""


class LengthwiseRotary:
    """Replaces the forwards of rotary modules whose factors depend on the length, until :meth:`release`."""

    def __init__(self, model: nn.Module, *, is_plain: Callable[[], bool]) -> None:
        """``is_plain``: whether the model is now called on single sequences, as before it was prepared."""
        self._modules = [_Rotary(module, is_plain) for module in model.modules() if _depends_on_length(module)]

    def release(self) -> None:
        """Restore the modules."""
        for module in self._modules:
            module.release()


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    if kinds is None or _POSITIONS not in signature(module.forward).parameters:
        return False
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind is not None and kind not in _STATIC for kind in named)


class _Rotary:
    """One rotary module, its own forward, and its original state."""

    def __init__(self, module: nn.Module, is_plain: Callable[[], bool]) -> None:
        self._module, self._forward, self._is_plain = module, module.forward, is_plain
        _to_original(module)
        self._attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self._buffers = {name: value.clone() for name, value in module._buffers.items() if value is not None}
        self._axes: dict[Any, list[int]] = {}
        self._prepared = PreparedForward(module, self._of_pack)

    def release(self) -> None:
        """Restore the module's forward and state."""
        self._prepared.release()
        self._restore()

    def _restore(self) -> None:
        """Restore the module's original state, without what an earlier call left."""
        module = self._module
        for name, buffer in module._buffers.items():
            if buffer is not None and name in self._buffers:
                module._buffers[name] = self._buffers[name].to(buffer, copy=True)
        for name in set(vars(module)) - set(self._attributes):
            if not name.startswith("_") and name != "forward":
                del module.__dict__[name]
        module.__dict__.update({name: value for name, value in self._attributes.items() if name != "forward"})

    def _of_pack(self, *args: Any, **kwargs: Any) -> Any:
        if not shards.is_active() or self._is_plain():
            self._restore()  # of a sequence before, the stock module would know how long it was
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._restore()
        with _let_through():  # calls of torch inside are not about this rank's slots
            return self._of_shard(shards.current(), *args, **kwargs)

    def _of_shard(self, shard: PackShard, *args: Any, **kwargs: Any) -> Any:
        if shard.tree is not None:
            raise InputError(
                f"share_prefixes=True: {type(self._module).__name__} scales its rotary factors by the length of a "
                "sequence, and shared tokens are in sequences of several lengths; leave share_prefixes out"
            )
        bound = signature(self._forward).bind(*args, **kwargs)
        position_ids = bound.arguments[_POSITIONS]
        if not bool((position_ids == shard.positions).all()):
            raise InputError(
                f"{type(self._module).__name__} scales its rotary factors by the length of a sequence, which cannot be "
                "known from position_ids other than 0, 1, 2, ... in each; give micro_batch.positions"
            )
        others = {name: value for name, value in bound.arguments.items() if name not in (_POSITIONS, "x")}
        key = tuple(sorted((name, str(value)) for name, value in others.items()))
        if key not in self._axes:
            first, second = (self._of_length(length, bound.arguments) for length in _PROBES)
            self._axes[key] = [_axis(shorter, longer) for shorter, longer in zip(first, second)]
        axes = self._axes[key]
        by_length: dict[int, list[Tensor]] = {}
        parts = []
        for length, positions in _own_parts(shard):
            if length not in by_length:
                by_length[length] = list(self._of_length(length, bound.arguments))
            parts.append([x.index_select(axis, positions) for x, axis in zip(by_length[length], axes)])
        joined = tuple(torch.cat(column, dim=axis) for column, axis in zip(zip(*parts), axes))
        self._restore()
        return joined if self._is_tuple else joined[0]

    def _of_length(self, length: int, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        """The module's outputs for a single whole sequence of this length."""
        self._restore()
        changed, position_ids = dict(arguments), arguments[_POSITIONS]
        num_slots = position_ids.shape[-1]
        positions = torch.arange(length, device=position_ids.device, dtype=position_ids.dtype)
        changed[_POSITIONS] = positions.expand(*position_ids.shape[:-1], length)
        x = changed.get("x")
        if isinstance(x, Tensor):  # it is asked for its dtype and device, sometimes for its shape
            axes = [axis for axis in (1, x.dim() - 2) if 0 < axis < x.dim() and x.shape[axis] == num_slots]
            if axes:
                changed["x"] = (
                    x.detach()
                    .narrow(axes[0], 0, 1)
                    .expand(*(length if axis == axes[0] else size for axis, size in enumerate(x.shape)))
                )
        out = self._forward(**changed)
        self._is_tuple = not isinstance(out, Tensor)
        return tuple(out) if self._is_tuple else (out,)


@contextmanager
def _let_through() -> Iterator[None]:
    """Within, calls of torch are not intercepted; the mode in which a model is compared sees them all the same."""
    with ExitStack() as stack:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, InterceptCalls):
                stack.enter_context(mode.letting_through())
        yield


def _to_original(module: nn.Module) -> None:
    """Undo what longer sequences left before the model was prepared, where the module stores its original state."""
    prefixes = [""] + [f"{kind}_" for kind in module.rope_type] if isinstance(module.rope_type, dict) else [""]
    for prefix in prefixes:
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if isinstance(original, Tensor) and isinstance(getattr(module, f"{prefix}inv_freq", None), Tensor):
            module._buffers[f"{prefix}inv_freq"] = original.to(getattr(module, f"{prefix}inv_freq").device).clone()
        if hasattr(module, f"{prefix}max_seq_len_cached") and hasattr(module, "original_max_seq_len"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _own_parts(shard: PackShard) -> list[tuple[int, Tensor]]:
    """The length of each sequence of which this rank has slots, in order, and the positions of these slots."""
    places = torch.from_numpy(shard.places)
    starts = torch.tensor(shard.cu_seqlens)
    numbers = torch.bucketize(places, starts, right=True) - 1
    lengths = [end - start for start, end in pairwise(shard.cu_seqlens)]
    numbered, counts = torch.unique_consecutive(numbers, return_counts=True)
    parts = shard.positions.split(counts.tolist())
    return [(lengths[number], positions) for number, positions in zip(numbered.tolist(), parts)]


def _axis(shorter: Tensor, longer: Tensor) -> int:
    changed = [axis for axis, sizes in enumerate(zip(shorter.shape, longer.shape)) if sizes == _PROBES]
    if len(changed) != 1:
        raise InputError(
            f"a rotary embedding returns {tuple(shorter.shape)} for {_PROBES[0]} slots and {tuple(longer.shape)} for "
            f"{_PROBES[1]}, so where its slots lie is not known"
        )
    return changed[0]
