"""Rules for each attention, position and RNG call of a forward, learned from two forwards of different length.

A shape alone does not say which axis holds the slots: a pack may have as many of them as the model has heads. So the
model computes two sequences of different length on one device; where a size followed the length, slots lie.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType

from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.recorded_operations import Operations

Place = tuple[str, CodeType, int]
"""A kind of call, the code that makes it and where in that code."""


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """One recorded call of a forward."""

    kind: str
    shape: tuple[int, ...]
    note: str = ""
    """What else must be known of it: how it masks, why it cannot be sharded."""
    layer: int | None = None
    mask: Tensor | None = field(default=None, repr=False)
    """The mask that it was given."""
    scale: float | None = None
    """The scale of its logits."""
    operations: Operations | None = field(default=None, repr=False)
    """What an attention by hand does to its logits."""
    num_keys: int | None = None
    """The keys that its queries see; None: as many as there are queries."""

    @property
    def num_other_keys(self) -> int:
        """How many keys it has beyond one for each query."""
        return 0 if self.num_keys is None else self.num_keys - self.shape[-2]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of two tensors, which may be part of an attention written out by hand."""

    is_scores: bool
    """Whether it is one of queries and keys: every slot with every other."""
    layer: int | None = None


@dataclass
class ForwardCalls:
    """The recorded calls of one forward, by kind."""

    attention: list[ForwardCall] = field(default_factory=list)
    positions: list[ForwardCall] = field(default_factory=list)
    noise: list[ForwardCall] = field(default_factory=list)
    scalars: int = 0
    """Draws of a single uniform number, such as those of layer drop."""
    drawn_in: list[nn.Module] = field(default_factory=list)
    """The modules that draw them."""
    products: list[Product] = field(default_factory=list)
    places: dict[Place, int | None] = field(default_factory=dict)
    """What is counted from at places in the code that may make positions; None: not one number for each slot."""

    def note_place(self, place: Place, start: int | None) -> None:
        """Record a call, which counts from ``start`` for each slot; None: it does not."""
        self.places[place] = start if self.places.get(place, start) == start else None


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """What a call of the forward computes, and which axis holds its slots."""

    dim: int | None
    """Where its slots lie; None: the call has nothing to do with them."""
    note: str = ""
    shape: tuple[int, ...] = ()
    """The shape in the first of the two forwards."""
    layer: int | None = None
    kind: str = ""
    scale: float | None = None

    @property
    def is_over_slots(self) -> bool:
        """Whether it is an attention in which slots meet; in others each slot is by itself."""
        return self.dim is not None and self.dim == len(self.shape) - (3 if self.kind == "flash" else 2)


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """The rules for all calls of a forward, by kind and in order."""

    attention: tuple[CallRule, ...] = ()
    positions: tuple[CallRule, ...] = ()
    noise: tuple[CallRule, ...] = ()
    scalars: int = 0
    """Draws of a single uniform number."""
    drawn_in: tuple[nn.Module, ...] = ()
    """The modules that draw them, as far as they are known."""
    products: tuple[Product, ...] = ()
    """Empty where there is no attention by hand."""
    places: Mapping[Place, int] = field(default_factory=dict)
    """What positions are counted from at places in the code that make them."""

    @property
    def is_needed(self) -> bool:
        """Whether any call of the forward is to be met."""
        has_positions = bool(self.places) or any(rule.dim is not None for rule in self.positions)
        return has_positions or bool(self.attention or self.noise or self.scalars)


def compare(first: ForwardCalls, second: ForwardCalls, lengths: tuple[int, int]) -> CallRules:
    """Derive the rules of a forward from its calls for two sequences of ``lengths`` slots.

    Raises:
        InputError: the forwards do not make the same calls, or one cannot be told to be sharded or not.
    """
    rules = {}
    for name in ("attention", "positions", "noise"):
        first_calls, others = getattr(first, name), getattr(second, name)
        if len(first_calls) != len(others):
            raise InputError(
                f"the model makes {len(first_calls)} calls of {name} for {lengths[0]} slots and {len(others)} "
                f"for {lengths[1]}; a forward must not depend on the length of its sequences"
            )
        rules[name] = tuple(
            _rule(name, number, a, b, lengths) for number, (a, b) in enumerate(zip(first_calls, others))
        )
    products = first.products if any(product.is_scores for product in first.products) else []
    if products and first.products != second.products:
        raise InputError(
            f"the model computes an attention by hand for {lengths[0]} slots in another way than for {lengths[1]}; a "
            "forward must not depend on the length of its sequences"
        )
    places = {
        place: start for place, start in first.places.items() if start is not None and second.places.get(place) == start
    }
    return CallRules(
        **rules, scalars=max(first.scalars, second.scalars), drawn_in=tuple(first.drawn_in or second.drawn_in),
        products=tuple(products), places=places,
    )  # fmt: skip


def _rule(name: str, number: int, first: ForwardCall, second: ForwardCall, lengths: tuple[int, int]) -> CallRule:
    where = f"{name} call {number} ({first.kind} of {first.shape})"
    if len(first.shape) != len(second.shape) or first.kind != second.kind:
        raise InputError(f"{where} is another for sequences of {lengths[1]} slots: {second.kind} of {second.shape}")
    changed = [dim for dim, (a, b) in enumerate(zip(first.shape, second.shape)) if a != b]
    if any((first.shape[dim], second.shape[dim]) != lengths for dim in changed) or len(changed) > 1:
        raise InputError(
            f"{where} grows with the sequence otherwise than one axis with its slots ({second.shape} for "
            f"{lengths[1]} of them instead of {lengths[0]}), so how to shard it is not known"
        )
    note = first.note
    if first.num_other_keys or second.num_other_keys:
        note = _note_of_keys(first, second, lengths)
    elif first.note != second.note:
        first_note, second_note = (call.note or "unmasked" for call in (first, second))
        raise InputError(f"{where} is {first_note} for {lengths[0]} slots, {second_note} for {lengths[1]}")
    if not same_scale(first.scale, second.scale):
        raise InputError(
            f"{where} scales its logits by {first.scale} for {lengths[0]} slots and by {second.scale} for "
            f"{lengths[1]}, and by what for others is not known"
        )
    dim = changed[0] if changed else None
    return CallRule(dim=dim, note=note, shape=first.shape, layer=first.layer, kind=first.kind, scale=first.scale)


def _note_of_keys(first: ForwardCall, second: ForwardCall, lengths: tuple[int, int]) -> str:
    """Why an attention cannot be sharded whose keys are not those of its queries' slots."""
    number = first.num_other_keys
    if number > 0 and number == second.num_other_keys:
        return (
            f"refused: it has {number} more key{'s' * (number > 1)} than queries, whatever the length, such as learned "
            "keys or zeros (add_bias_kv=, add_zero_attn= of nn.MultiheadAttention), and in packs each key is that of a "
            "slot; leave them out, or let packing='never' compute the model sequence by sequence"
        )
    counts = [f"{call.shape[-2]} queries and {call.num_keys} keys" for call in (first, second)]
    return f"refused: it has {counts[0]} for {lengths[0]} slots, {counts[1]} for {lengths[1]}"


def same_scale(first: float | None, second: float | None) -> bool:
    """Whether two calls scale their logits equally."""
    return first == second or (first is not None and second is not None and math.isclose(first, second, rel_tol=1e-5))
