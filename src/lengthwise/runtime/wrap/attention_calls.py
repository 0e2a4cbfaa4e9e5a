"""Record or answer the attention calls of a forward, among them attention written out with matmul and softmax.

See :class:`~lengthwise.runtime.wrap.torch_function_mode.InterceptCalls`, which meets them.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.call_rules import CallRule, CallRules, ForwardCall, ForwardCalls, Product, same_scale
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.custom_masks import MaskTables
from lengthwise.runtime.wrap.manual_attention import (
    PRODUCTS,
    Scores,
    begin_scores,
    begin_scores_with_bias,
    record_operation,
)
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard

BY_HAND_CHECKS = 3
"""Micro-batches in which the mask of an attention by hand is compared with that of the positions."""
MOST_CHECKED_SLOTS = 2048
"""Most slots of a rank in those, as of the packs that are compared before a run: it takes memory of their square."""


class AllAttendedError(Exception):
    """Stops a traced forward after its last attention call."""


class AttentionCalls:
    """Records calls in ``calls`` or answers them by ``rules``; with both, records the masks of one whole sequence."""

    def __init__(self, calls: ForwardCalls | None, rules: CallRules | None, masks: MaskTables | None) -> None:
        self._calls, self._rules, self._masks = calls, rules, masks
        self._has_scores = False
        self._num_checked: Counter[int] = Counter()
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

    def _check_scale(self, number: int, rule: CallRule, scale: float | None) -> None:
        if not same_scale(scale, rule.scale):
            raise InputError(
                f"attention call {number} scales its logits by {scale}, where it was {rule.scale} when it was "
                "prepared; a scale that depends on the length cannot be honoured on packs"
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
            return record_operation(func, args, kwargs, is_known=self._calls is None)
        assert self.shard is not None, "a micro-batch is computed"
        self.shard.counts.products += 1
        if self._rules is None:
            assert self._calls is not None, "there are calls to note, or rules to follow"
            self._calls.products.append(Product(is_scores=False, layer=self.layer))
        return self._attend_by_hand(args[0], args[1])

    def _attend_by_hand(self, scores: Scores, value: Tensor) -> Tensor:
        assert self.shard is not None, "a micro-batch is computed"
        attended, number = scores.attended, self.shard.counts.attention
        query, scale, bias = attended.query, None, None
        leading = torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
        shape = (*leading, scores.shape[-2], value.shape[-1])
        is_checked = self._num_checked[number] >= BY_HAND_CHECKS or attended.is_beyond
        is_checked |= query.shape[-2] > MOST_CHECKED_SLOTS
        if self._calls is not None or not is_checked:
            scale, bias = attended.scale_and_bias()
        call = ForwardCall(
            kind="by hand", shape=tuple(query.shape), note="masked", layer=self.layer, mask=bias, scale=scale
        )  # fmt: skip
        rule = self._rule("attention", call)
        if self._is_dry(query):
            assert self._rules is not None
            self._check_scale(number, self._rules.attention[number], scale)
            return self._note_mask(query, shape, bias).to(value.dtype)
        if rule is None:
            return attended.of(value)
        assert self._masks is not None, "masks come with rules"
        if bias is not None:
            self._num_checked[number] += 1
            self._check_scale(number, rule, scale)
        sees = self._masks.kind(number, bias, self.shard)
        kind = AttentionRequest(scale=rule.scale, dropout=attended.dropout, call=number, **sees)
        # some models take logits in float32 and weights in the dtype of the values
        q, k, v = (slots_first(x) for x in (query, attended.key, value.to(query.dtype)))
        out = attend_shard(q, k, v, kind, self.shard)
        return out.movedim(0, -2).reshape(shape).to(value.dtype)

    def _is_dry(self, query: Tensor) -> bool:
        """Whether masks of a whole sequence are being recorded, and this call attends over its slots."""
        if self._calls is None or self._rules is None or self.shard is None:
            return False
        number = self.shard.counts.attention - 1
        return number < len(self._rules.attention) and self._rules.attention[number].is_over_slots

    def _note_mask(self, query: Tensor, shape: tuple[int, ...], mask: Tensor | None) -> Tensor:
        """Record the mask of a call, and return zeros of ``shape`` as its output."""
        assert self.shard is not None and self._rules is not None and self._masks is not None
        number = self.shard.counts.attention - 1
        if self._rules.attention[number].note == "masked" and mask is not None:
            self._masks.note(number, mask, tuple(query.shape))
        if number == len(self._rules.attention) - 1:
            raise AllAttendedError
        return query.new_zeros(shape)


def slots_first(x: Tensor) -> Tensor:
    """Move slots to the front: [..., heads, t, H] to [t, rows * heads, H]."""
    return x.movedim(-2, 0).flatten(1, -2) if x.dim() > 2 else x[:, None]
