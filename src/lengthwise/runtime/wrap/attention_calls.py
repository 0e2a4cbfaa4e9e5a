"""Record or answer the attention calls of a forward, among them attention written out with matmul and softmax.

See :class:`~lengthwise.runtime.wrap.torch_function_mode.InterceptCalls`, which meets them.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.call_rules import CallRule, CallRules, ForwardCall, ForwardCalls, Product, same_scale
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.custom_masks import ON_PACKS, MaskTables
from lengthwise.runtime.wrap.manual_attention import (
    PRODUCTS,
    ManualAttention,
    Scores,
    begin_scores,
    begin_scores_with_bias,
    record_operation,
)
from lengthwise.runtime.wrap.recorded_operations import Operations, read_operations
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from lengthwise.runtime.wrap.written_softmax import part_of_softmax

MOST_COMPUTED_SLOTS = 2048
"""Most slots of a rank for which operations on logits that are others than before are computed, in memory of their
square, to see whether they become the same scale and mask."""


class AllAttendedError(Exception):
    """Stops a traced forward after its last attention call."""


class AttentionCalls:
    """Records calls in ``calls`` or answers them by ``rules``; with both, records the masks of one whole sequence."""

    def __init__(self, calls: ForwardCalls | None, rules: CallRules | None, masks: MaskTables | None) -> None:
        self._calls, self._rules, self._masks = calls, rules, masks
        self._has_scores = False
        self.shard: PackShard | None = None
        self.layer: int | None = None
        """The layer that is being computed."""

    def _rule(self, name: str, call: ForwardCall) -> CallRule | None:
        """Record the call and return None, or return the rule for it."""
        assert self.shard is not None, "a micro-batch is computed"
        number = getattr(self.shard.counts, name)
        setattr(self.shard.counts, name, number + 1)
        if self._calls is not None:
            getattr(self._calls, name).append(call)
            return None
        assert self._rules is not None, "there are calls to note, or rules to follow"
        rules = getattr(self._rules, name)
        return rules[number] if number < len(rules) else CallRule(dim=None)

    def _check_scale(self, number: int, expected: float | None, scale: float | None) -> None:
        if not same_scale(scale, expected):
            raise InputError(
                f"attention call {number} scales its logits by {scale}, where it was {expected} when it was "
                f"prepared; {ON_PACKS}"
            )

    def _check_mask(self, number: int, rule: CallRule, *, given: bool, causal: bool) -> None:
        """Check that an attention over slots is causal, or has a mask, where it was and had; ``given``: it has one now.

        Raises:
            InputError: it is another attention than when it was prepared.
        """
        if rule.note == "masked":
            assert self._masks is not None, "masks come with rules"
            if not given:
                self._masks.check_left_out(number, causal=causal)
        elif not given and causal is not (rule.note == "causal"):
            raise InputError(
                f"attention call {number} has is_causal={causal}, where it was is_causal={rule.note == 'causal'} when "
                f"it was prepared; {ON_PACKS}"
            )

    def _product(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Defer the product of queries and keys of a manual attention; compute any other product."""
        factors = [*args, *(kwargs[name] for name in ("mat2", "other", "batch1", "batch2") if name in kwargs)]
        first, second = factors[-2:] if len(factors) > 1 else (None, None)
        is_product = isinstance(first, Tensor) and isinstance(second, Tensor) and min(first.dim(), second.dim()) > 2
        if not is_product or self.shard is None:
            return func(*args, **kwargs)
        number, t = self.shard.counts.products, self.shard.num_slots
        self.shard.counts.products += 1
        if self._rules is None:
            assert first is not None and second is not None, "there are two factors"
            is_scores = first.shape[-2] == second.shape[-1] == t and first.shape[-1] == second.shape[-2] != t
            assert self._calls is not None, "there are calls to note, or rules to follow"
            self._calls.products.append(Product(is_scores=is_scores, layer=self.layer))
        else:
            products = self._rules.products
            is_scores = number < len(products) and products[number].is_scores
        if not is_scores:
            return func(*args, **kwargs)
        self._has_scores = True
        begin = begin_scores if func in PRODUCTS else begin_scores_with_bias
        return begin(*args, **kwargs)

    def _of_scores(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_product = func in PRODUCTS and isinstance(args[0], Scores) and args[0].attended.is_weights
        if not is_product or not isinstance(args[1], Tensor):
            part = part_of_softmax(func, args, kwargs)
            return part if part is not None else record_operation(func, args, kwargs, is_known=self._calls is None)
        assert self.shard is not None, "a micro-batch is computed"
        self.shard.counts.products += 1
        if self._rules is None:
            assert self._calls is not None, "there are calls to note, or rules to follow"
            self._calls.products.append(Product(is_scores=False, layer=self.layer))
        return self._attend_by_hand(args[0], args[1])

    def _attend_by_hand(self, scores: Scores, value: Tensor) -> Tensor:
        assert self.shard is not None, "a micro-batch is computed"
        attended, number = scores.attended, self.shard.counts.attention
        query = attended.query
        leading = torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
        shape = (*leading, scores.shape[-2], value.shape[-1])
        operations = read_operations(attended.steps, query.shape[-2])
        call = ForwardCall(
            kind="by hand", shape=tuple(query.shape), note="masked", layer=self.layer, operations=operations
        )  # fmt: skip
        if self._calls is not None:
            scale, bias = attended.scale_and_bias()
            call = replace(call, mask=bias, scale=scale)
        rule = self._rule("attention", call)
        if self._is_dry(query):
            assert self._rules is not None and self._masks is not None
            self._check_scale(number, self._masks.scale(number, call.scale), call.scale)
            return self._note_mask(query, shape, call).to(value.dtype)
        if rule is None:
            return attended.of(value)
        self._check_mask(number, rule, given=True, causal=False)
        assert self._masks is not None, "masks come with rules"
        sees = self._masks.kind(number, self._other_bias(number, rule, attended, operations), self.shard)
        drawn = self.shard.counts.in_micro_batch(number)
        learned_scale = self._masks.scale(number, rule.scale)
        kind = AttentionRequest(scale=learned_scale, dropout=attended.dropout, call=drawn, **sees)
        # some models take logits in float32 and weights in the dtype of the values
        q, k, v = (slots_first(x) for x in (query, attended.key, value.to(query.dtype)))
        out = attend_shard(q, k, v, kind, self.shard)
        return out.movedim(0, -2).reshape(shape).to(value.dtype)

    def _other_bias(
        self, number: int, rule: CallRule, attended: ManualAttention, operations: Operations
    ) -> Tensor | None:
        """None where operations on logits are those that were learned; else what they become, if that is affordable.

        Raises:
            InputError: they have another scale, or cannot be compared.
        """
        assert self._masks is not None and self.shard is not None, "masks come with rules"
        if not (other := self._masks.other_operations(number, operations, self.shard)):
            return None
        refused = InputError(f"attention call {number} is another than when it was prepared, it {other}; {ON_PACKS}")
        if attended.is_beyond or operations.num_slots > MOST_COMPUTED_SLOTS:
            raise refused
        try:
            scale, bias = attended.scale_and_bias()
        except InputError:
            raise refused from None
        self._check_scale(number, self._masks.scale(number, rule.scale), scale)
        return bias

    def _is_dry(self, query: Tensor) -> bool:
        """Whether masks of a whole sequence are being recorded, and this call attends over its slots."""
        if self._calls is None or self._rules is None or self.shard is None:
            return False
        number = self.shard.counts.attention - 1
        return number < len(self._rules.attention) and self._rules.attention[number].is_over_slots

    def _note_mask(self, query: Tensor, shape: tuple[int, ...], call: ForwardCall) -> Tensor:
        """Record the mask of a call, and return zeros of ``shape`` as its output."""
        assert self.shard is not None and self._rules is not None and self._masks is not None
        number = self.shard.counts.attention - 1
        if self._rules.attention[number].note == "masked" and call.mask is not None:
            self._masks.note(number, call.mask, tuple(query.shape))
            if call.operations is not None:
                self._masks.note_operations(number, call.operations, call.scale)
        if number == len(self._rules.attention) - 1:
            raise AllAttendedError
        return query.new_zeros(shape)


def slots_first(x: Tensor) -> Tensor:
    """Move slots to the front: [..., heads, t, H] to [t, rows * heads, H]."""
    return x.movedim(-2, 0).flatten(1, -2) if x.dim() > 2 else x[:, None]
