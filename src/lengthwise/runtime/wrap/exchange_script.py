"""The script of the collectives that a prepared model's forward and backward issue, as they were observed.

Every attention over slots trades tokens for heads and back: two exchanges in its forward. Its backward issues two more,
but only where gradients flow through it: not below the first trained parameter, nor where adapters sit behind the
attention alone. A recomputed layer issues those of its forward again, if its backward runs at all. None of this is
assumed: a forward and a backward on one rank are watched, once with no layer recomputed and once with all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

Event = tuple[Literal["forward", "backward"], int]
"""Forward or backward of an attention, and its number."""


@dataclass(frozen=True, kw_only=True)
class AttentionExchange:
    """Sizes of one call of attention, and the layer that made it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class SlotGather:
    """A gather of ``width`` numbers of every slot from all ranks: one exchange, and one in its backward."""

    width: int
    dtype: torch.dtype
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A sum over all ranks of numbers of every sequence: one exchange of whether all ranks have them, one of them.

    A rank that has none says so in the first, and there is no second. In its backward one of their gradients.
    """

    count: int = 0
    """Numbers of this rank that the others wait for; 0 until all ranks have some."""
    dtype: torch.dtype = torch.float32
    layer: int | None = None


Calls = dict[int, AttentionExchange | SlotGather | Summed]
"""Exchanges of a forward, by number."""


@dataclass(frozen=True, kw_only=True)
class ExchangeScript:
    """The attention calls of one forward, by number, and what happens to them in the backward, in order."""

    calls: Calls
    without_recompute: tuple[Event, ...] = ()
    """Events of the backward if no layer is recomputed."""
    with_recompute: tuple[Event, ...] = ()
    """Events of the backward if all layers are recomputed."""

    @classmethod
    def complete(cls, calls: Sequence[AttentionExchange | SlotGather]) -> "ExchangeScript":
        """The script of a model in which gradients flow through every attention."""
        numbered: Calls = dict(enumerate(calls))
        without_recompute, with_recompute = list[Event](), list[Event]()
        for layer, group in _by_layer([("backward", number) for number in reversed(numbered)], numbered):
            if layer is not None:
                with_recompute += [("forward", number) for _, number in reversed(group)]
            without_recompute, with_recompute = without_recompute + group, with_recompute + group
        return cls(calls=numbered, without_recompute=tuple(without_recompute), with_recompute=tuple(with_recompute))

    def forward(self) -> Iterator[Event]:
        """Events of the forward."""
        return (("forward", number) for number in self.calls)

    def backward(self, is_recomputed: Callable[[int], bool]) -> Iterator[Event]:
        """Events of the backward where some layers are recomputed."""
        by_layer = dict(_by_layer(self.without_recompute, self.calls))
        for layer, events in _by_layer(self.with_recompute, self.calls):
            yield from events if layer is not None and is_recomputed(layer) else by_layer.get(layer, [])


def _by_layer(events: Sequence[Event], calls: Calls) -> list[tuple[int | None, list[Event]]]:
    """Group consecutive events by layer."""
    return [(layer, list(group)) for layer, group in groupby(events, lambda event: calls[event[1]].layer)]
