"""Intercept flash-attention kernels that a model calls directly, where its code imported them.

These are ordinary functions, which torch does not let be overridden. So while the model's forward runs, their names in
the modules where its classes are written stand for ours.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lengthwise.runtime.wrap.context import PackShard

HOMES = {
    "torch.nn.attention.varlen": ("varlen_attn",),
    "flash_attn": ("flash_attn_varlen_func", "flash_attn_func"),
    "flash_attn.flash_attn_interface": ("flash_attn_varlen_func", "flash_attn_func"),
}
"""Functions that are known, and where they are defined or offered."""
_OPEN = 1 << 62
"""A window's side that is open."""
_NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "scale": ("scale", "softmax_scale"),
    "causal": ("causal", "is_causal"),
    "ends": ("cu_seq_q", "cu_seqlens_q"),
    "window": ("window_size",),
    "dropout": ("dropout_p",),
}
_REFUSED = {
    "softcap": "soft-capped logits",
    "alibi_slopes": "a bias by position",
    "block_table": "paged keys",
    "seqused_k": "keys left out",
    "return_aux": "more than outputs",
    "return_attn_probs": "the weights of attention",
}


@dataclass(frozen=True, kw_only=True)
class FlashKernel:
    """A call of a flash-attention kernel: queries, keys, values ``[t, heads, H]`` or ``[rows, t, heads, H]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    dropout: float
    refused: str
    """Why it cannot be sharded; nothing if it can."""
    ends: Tensor | None = field(repr=False)
    """The ends of sequences that the call gives."""

    @property
    def slot_dim(self) -> int:
        """The axis of slots."""
        return self.query.dim() - 3


def read_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlashKernel:
    """Parse the arguments of a call of one of the known kernels."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    values: dict[str, Any] = {
        name: next((arguments[alias] for alias in names if alias in arguments), None) for name, names in _NAMES.items()
    }
    before, after = values["window"] or (-1, -1)
    causal = bool(values["causal"]) or after == 0
    window = (before if before >= 0 else _OPEN, 0 if causal else after if after >= 0 else _OPEN)
    refused = [words for name, words in _REFUSED.items() if _is_set(arguments.get(name))]
    return FlashKernel(
        query=values["query"],
        key=values["key"],
        value=values["value"],
        causal=causal,
        scale=values["scale"],
        window=None if window in ((_OPEN, _OPEN), (_OPEN, 0)) else window,
        dropout=values["dropout"] or 0.0,
        refused=f"refused: it asks for {' and '.join(refused)}" if refused else "",
        ends=values["ends"],
    )


def _is_set(option: Any) -> bool:
    """Whether an option is given and not off."""
    return isinstance(option, Tensor) or (option is not None and option != 0)


def ends_note(kernel: FlashKernel) -> str:
    """Explain why a call's sequence ends cannot be replaced by those of the pack; an empty string if they can."""
    num_slots = kernel.query.shape[kernel.slot_dim]
    if kernel.ends is None or kernel.ends.tolist() == [0, num_slots]:
        return ""
    return f"refused: its sequences end at {kernel.ends.tolist()} where one sequence of {num_slots} was given"


def ends_within(ends: Tensor, shard: PackShard) -> str:
    """The first ends of sequences that lie within sequences of a micro-batch; an empty string if none does."""
    numbers = np.searchsorted(np.asarray(shard.cu_seqlens[1:]), shard.places, side="right")
    parted = (np.diff(numbers) != 0) | (np.diff(shard.places) != 1)
    allowed = {0, shard.num_slots, *(1 + np.flatnonzero(parted)).tolist()}
    return ", ".join([str(end) for end in ends.tolist() if end not in allowed][:5])


class ImportedKernels:
    """The known kernels, in the namespaces that a model's code calls them from."""

    def __init__(self, model: nn.Module) -> None:
        kernels: dict[int, Any] = {}
        for home, names in HOMES.items():
            module = sys.modules.get(home)
            kernels |= {id(kernel): kernel for name in names if (kernel := getattr(module, name, None)) is not None}
        written_in = {type(module).__module__ for module in model.modules()}
        spaces = [sys.modules[name] for name in sorted({*written_in, *HOMES}) if name in sys.modules]
        self._found: list[tuple[ModuleType, str, Callable[..., Any]]] = [
            (space, name, value) for space in spaces for name, value in vars(space).items() if id(value) in kernels
        ]
        self._is_answering = False

    @contextmanager
    def answered(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Within, kernel calls go to ``answer(function, *args, **kwargs)``; those that it makes itself do not."""
        with ExitStack() as stack:
            for space, name, function in self._found:
                setattr(space, name, self._answering(function, answer))
                stack.callback(setattr, space, name, function)
            yield

    def _answering(self, function: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_answering:
                return function(*args, **kwargs)
            self._is_answering = True
            try:
                with torch._C.DisableTorchFunction():
                    return answer(function, *args, **kwargs)
            finally:
                self._is_answering = False

        return call
