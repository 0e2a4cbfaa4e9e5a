"""A torch function mode that answers attention, position and RNG calls of a forward for the pack, not for the shard.

Attention, positions (``torch.arange`` over the slots, the first rows of a table) and noise. Everything else in a
Transformer acts on each token by itself. The model's code is untouched: calls are met where torch lets them be
overridden, while the model's own forward runs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap import flash_kernels as kernels
from lengthwise.runtime.wrap.attention_calls import slots_first
from lengthwise.runtime.wrap.call_rules import CallRule, CallRules, ForwardCall, ForwardCalls
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.counter_rng import (
    ONE_NUMBER,
    attend_rows_dropping,
    keep_like,
    normal_like,
    one_number,
    uniform_like,
)
from lengthwise.runtime.wrap.custom_masks import ON_PACKS, MaskTables
from lengthwise.runtime.wrap.manual_attention import ADDED_PRODUCTS, PRODUCTS, find_scores
from lengthwise.runtime.wrap.position_calls import PositionCalls
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from lengthwise.runtime.wrap.unusable import attention_weights

_OTHER_NOISE = (
    F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.bernoulli, torch.normal,
    torch.multinomial, torch.rand, torch.randn, torch.randint, torch.randperm, torch.randint_like, Tensor.bernoulli_,
    Tensor.bernoulli, Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_, Tensor.multinomial,
    F.gumbel_softmax, torch.rrelu, torch.rrelu_,
)  # fmt: skip
_GROWS = {
    "attention": "",
    "positions": ", nor on tables that grow with the longest call: make them in __init__, or call the model before "
    "prepare once with as many tokens as a pack may have",
    "noise": ", such as a dropout of 0 that grows: prepare the model with a small one, or as it will be",
}
"""What may change the number of calls of a kind, and what to do about it."""
LOCAL = 1 << 21
"""Offset of the numbers of attention calls within slots, for their random draws."""


class InterceptCalls(PositionCalls, TorchFunctionMode):
    """Records a forward's calls in ``calls`` or, if there are ``rules``, answers them by those.

    With ``calls``, ``rules`` and ``masks``, the masks of one whole sequence are noted, and nothing attends.
    """

    def __init__(
        self,
        constants: Iterable[Tensor],
        *,
        imported: kernels.ImportedKernels | None = None,
        calls: ForwardCalls | None = None,
        rules: CallRules | None = None,
        masks: MaskTables | None = None,
    ) -> None:
        PositionCalls.__init__(self, constants, calls, rules, masks)
        TorchFunctionMode.__init__(self)
        self._imported = imported
        self._checked_ends: tuple[Tensor | None, int, PackShard | None] = (None, 0, None)
        self._answers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.multi_head_attention_forward: self._multi_head_attention,
            F.dropout: self._dropout,
            torch.dropout: self._plain_dropout,
            F.rrelu: self._rrelu,
            **self._position_answers,
            torch.randn_like: self._randn_like,
            torch.rand_like: self._rand_like,
            **dict.fromkeys(_OTHER_NOISE, self._other_noise),
            **dict.fromkeys((*PRODUCTS, *ADDED_PRODUCTS), self._product),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self._has_scores and find_scores((*args, *(kwargs or {}).values())) is not None:
            return self._of_scores(func, args, kwargs or {})
        answer = self._answers.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        return answer(func, *args, **(kwargs or {}))

    @property
    def _draws(self) -> bool:
        """Whether noise is drawn, rather than the identity."""
        return self.shard is None or self.shard.has_noise

    @property
    def num_scalars(self) -> int:
        """Single numbers that the forward drew while it was recorded."""
        return 0 if self._calls is None else self._calls.scalars

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Within, calls are intercepted, those of imported kernels too."""
        with self:
            if self._imported is None:
                yield
            else:
                with self._imported.answered(self._kernel):
                    yield

    @contextmanager
    def letting_through(self) -> Iterator[None]:
        """Within, calls are not intercepted."""
        answers, self._answers = self._answers, {}
        try:
            yield
        finally:
            self._answers = answers

    def check_complete(self) -> None:
        """Raise ``CheckError`` unless the forward made as many calls as when it was prepared."""
        if self._rules is None or self.shard is None:
            return
        for name in ("attention", "positions", "noise"):
            made, expected = getattr(self.shard.counts, name), len(getattr(self._rules, name))
            if made != expected:
                raise CheckError(
                    f"the forward made {made} calls of {name}, where it made {expected} when it was prepared; what it "
                    "computes must not depend on the data, on the mode it is in, or on a setting that changes later"
                    f"{_GROWS[name]}"
                )

    def skip(self, layer: int) -> None:
        """Count the calls of a skipped layer, so that later calls keep their numbers."""
        if self._rules is None or self.shard is None:
            return
        for name in ("attention", "positions", "noise"):
            left_out = sum(rule.layer == layer for rule in getattr(self._rules, name))
            setattr(self.shard.counts, name, getattr(self.shard.counts, name) + left_out)
        self.shard.counts.products += sum(product.layer == layer for product in self._rules.products)

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        note = "masked" if attn_mask is not None else "causal" if is_causal else ""
        call = ForwardCall(kind="attention", shape=tuple(query.shape), note=note, layer=self.layer, mask=attn_mask)
        call = replace(call, scale=scale, num_keys=key.shape[-2])
        rule = self._rule("attention", call)
        if self._is_dry(query):
            return self._note_mask(query, (*query.shape[:-1], value.shape[-1]), call)
        if rule is None:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        assert self.shard is not None, "rules come with a micro-batch"
        number = self.shard.counts.attention - 1
        dropout_p = dropout_p if self.shard.has_noise else 0.0
        if not rule.is_over_slots:  # within slots, each of which this rank has whole
            if not dropout_p:
                return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
            if rule.dim is None:
                raise InputError(f"attention call {number} drops weights, but has no axis of slots to draw them by")
            return attend_rows_dropping(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                rule.dim,
                self.shard.counts.in_micro_batch(LOCAL + number),
                self.shard,
            )
        self._check_mask(number, rule, given=attn_mask is not None, causal=is_causal)
        sees: dict[str, Any] = {"causal": rule.note == "causal"}
        if rule.note == "masked":
            assert self._masks is not None, "masks come with rules"
            sees = self._masks.kind(number, attn_mask, self.shard)
        elif attn_mask is not None:
            assert self._masks is not None, "masks come with rules"
            self._masks.check_band(number, attn_mask, self.shard, causal=rule.note == "causal")
        self._check_scale(number, rule.scale, scale)
        drawn = self.shard.counts.in_micro_batch(number)
        kind = AttentionRequest(scale=scale, dropout=dropout_p, call=drawn, **sees)
        q, k, v = (slots_first(x) for x in (query, key, value))
        out = attend_shard(q, k, v, kind, self.shard)
        num_heads = query.shape[-3] if query.dim() > 2 else 1
        return out.unflatten(1, (-1, num_heads)).permute(1, 2, 0, 3).reshape(*query.shape[:-1], value.shape[-1])

    def _kernel(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Answer a call of a flash-attention kernel."""
        call = kernels.read_call(func, args, kwargs)
        query, note = call.query, call.refused
        if self._calls is not None:
            note = note or kernels.ends_note(call) or ("causal" if call.causal else "")
        recorded = ForwardCall(kind="flash", shape=tuple(query.shape), note=note, layer=self.layer)
        rule = self._rule("attention", recorded)
        if self._is_dry(query):
            return self._note_mask(query, (*query.shape[:-1], call.value.shape[-1]), recorded)
        if rule is None or not rule.is_over_slots:
            if rule is not None and call.dropout:
                raise InputError(f"{func.__name__} drops weights within slots; draw with dropout outside of attention")
            out: Tensor = func(*args, **kwargs)
            return out
        assert self.shard is not None, "rules come with a micro-batch"
        number = self.shard.counts.attention - 1
        if self._calls is None and (other := call.refused or self._other_ends(call.ends)):
            raise InputError(
                f"attention call {number} ({func.__name__}) is another than when it was prepared, "
                f"{other.removeprefix('refused: ')}; {ON_PACKS}"
            )
        kind = AttentionRequest(
            causal=call.causal,
            scale=call.scale,
            window=call.window,
            dropout=call.dropout,
            call=self.shard.counts.in_micro_batch(number),
        )
        q, k, v = (x.movedim(call.slot_dim, 0).flatten(1, -2) for x in (query, call.key, call.value))
        out_tNH = attend_shard(q, k, v, kind, self.shard)
        shape = (*query.movedim(call.slot_dim, 0).shape[:-1], call.value.shape[-1])
        return out_tNH.reshape(shape).movedim(0, call.slot_dim)

    def _other_ends(self, ends: Tensor | None) -> str:
        """What is wrong with the ends of sequences that a kernel is given; an empty string: nothing."""
        assert self.shard is not None, "rules come with a micro-batch"
        checked = (ends, 0 if ends is None else ends._version, self.shard)
        if ends is None or all(a is b or (type(a) is int and a == b) for a, b in zip(checked, self._checked_ends)):
            return ""
        if wrong := kernels.ends_within(ends, self.shard):
            return f"its sequences end at slots {wrong} within sequences of the micro-batch"
        self._checked_ends = checked
        return ""

    def _multi_head_attention(self, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Answer ``nn.MultiheadAttention``, without attention weights, which no shard has."""
        weights = attention_weights() if kwargs.get("need_weights", True) else None
        kwargs["need_weights"] = False
        with _patched(F, "scaled_dot_product_attention", self._attention):
            return func(*args, **kwargs)[0], weights

    def _plain_dropout(self, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        return self._dropout(F.dropout, input, p, train)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if p == 0.0:
            return input
        rule = self._rule("noise", ForwardCall(kind="dropout", shape=tuple(input.shape), layer=self.layer))
        if not training or not self._draws:
            return input
        if rule is None:
            return func(input, p, training, inplace)
        shard, dim = self._slots_of(rule, "dropout")
        keep = keep_like(input, dim, p, shard.counts.in_micro_batch(shard.counts.noise - 1), shard)
        factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return input.mul_(keep).mul_(factor) if inplace else (input * keep) * factor  # booleans are kept, no numbers

    def _rrelu(
        self,
        func: Any,
        input: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        if not training or lower == upper:
            return func(input, lower, upper, False, inplace)
        rule = self._rule("noise", ForwardCall(kind="rrelu", shape=tuple(input.shape), layer=self.layer))
        if not self._draws or rule is None:
            return func(input, lower, upper, self._draws, inplace)
        shard, dim = self._slots_of(rule, "rrelu")
        drawn = uniform_like(input.detach(), dim, shard.counts.in_micro_batch(shard.counts.noise - 1), shard)
        slopes = torch.where(input > 0, 1.0, lower + (upper - lower) * drawn)
        return input.mul_(slopes) if inplace else input * slopes

    def _randn_like(self, func: Any, input: Tensor, **options: Any) -> Tensor:
        return self._noise_like(func, normal_like, input, options)

    def _rand_like(self, func: Any, input: Tensor, **options: Any) -> Tensor:
        return self._noise_like(func, uniform_like, input, options)

    def _noise_like(self, func: Any, draw: Callable[..., Tensor], input: Tensor, options: dict[str, Any]) -> Tensor:
        rule = self._rule("noise", ForwardCall(kind=func.__name__, shape=tuple(input.shape), layer=self.layer))
        if not self._draws:
            neutral = 0.0 if func is torch.randn_like else 0.5
            return torch.full_like(input, neutral, **options)
        if rule is None:
            return func(input, **options)
        shard, dim = self._slots_of(rule, func.__name__)
        like = torch.empty_like(input, dtype=options.get("dtype") or input.dtype)
        call = shard.counts.in_micro_batch(shard.counts.noise - 1)
        return draw(like, dim, call, shard).requires_grad_(options.get("requires_grad", False))

    def _other_noise(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is torch.rand and args in ONE_NUMBER:  # one number: to skip layers by
            assert self.shard is not None, "a micro-batch is computed"
            if self._calls is not None:
                self._calls.scalars += 1
                self._calls.drawn_in += _calling_module()
            return one_number(self.shard.scalar, *args, **kwargs)
        if kwargs.get("training", True) is False or (func in _SWITCHED and len(args) > 2 and args[2] is False):
            return func(*args, **kwargs)
        raise InputError(
            f"the model's forward calls {func.__name__}, whose draws would differ between ranks that share a sequence; "
            "draw with dropout, torch.randn_like or torch.rand_like inside the model, or micro_batch.normal outside"
        )

    def _slots_of(self, rule: CallRule, what: str) -> tuple[PackShard, int]:
        assert self.shard is not None, "rules come with a micro-batch"
        if rule.dim is None:
            raise InputError(
                f"{what} of {rule.shape} has no axis of slots, so its draws cannot be the same at every degree; apply "
                "it to the tokens"
            )
        return self.shard, rule.dim


_SWITCHED = (F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)
"""Functions whose third argument says whether they draw."""


@contextmanager
def _patched(module: Any, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Within, calls of ``module.name`` go to ``answer``; those that it makes itself do not."""
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(module, name, original)
        try:
            return answer(original, *args, **kwargs)
        finally:
            setattr(module, name, call)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, original)


def _calling_module() -> list[nn.Module]:
    """The module whose code runs, or none if there is no such."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return [module]
        frame = frame.f_back  # type: ignore[assignment]
    return []
