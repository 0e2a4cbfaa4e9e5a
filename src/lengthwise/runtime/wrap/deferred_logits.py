"""Logits of a language-model head that are computed chunk by chunk when a loss is made of them.

T tokens, D hidden size, V vocabulary. A [T, V] matrix of logits in float32 takes 67 GB at 131,072 tokens of a Llama 3.
The head of a prepared model returns :class:`DeferredLogits` instead, which remember the hidden states and what is done
to each number afterwards (a cast, a scale, a soft cap). A cross-entropy or a reduction over the vocabulary is computed
on chunks of tokens; every other operation gets the whole matrix, so that any code works as it did.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.chunked_loss import chunk_tokens, chunked_cross_entropy
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.deferred_loss import METADATA, QUERIES, DeferredLoss
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.runtime.wrap.handed_out import version_of
from lengthwise.runtime.wrap.loss_guard import HasStep
from lengthwise.runtime.wrap.model_accessors import output_embeddings
from lengthwise.runtime.wrap.oom_recovery import autocast_dtype

Call = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""A function that acts on each number by itself, and its further arguments."""

_METADATA = METADATA | {"requires_grad", "grad_fn", "is_leaf"}
_CASTS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to}
_SCALES = {
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div, Tensor.tanh,
    torch.tanh,
}  # fmt: skip
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}
_REDUCTIONS = {torch.logsumexp, Tensor.logsumexp, torch.argmax, Tensor.argmax}


class DeferredLogits(Tensor):
    """[..., V] logits that exist as [..., D] hidden states and the weights of a linear head until they are needed."""

    _hidden: Tensor
    _weights: tuple[Tensor, Tensor | None]
    _calls: tuple[Call, ...]
    _whole: Tensor | None
    _views: list["ref[DeferredLogits]"]
    _versions: list[int]
    _is_past: Callable[[], bool] | None
    """Whether the weights are those of a later step."""

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        calls: tuple[Call, ...] = (),
        is_past: Callable[[], bool] | None = None,
    ) -> "DeferredLogits":
        """``calls`` are made one after another on the product of the head; ``is_past``: whether its weights are those
        of a later step, None: they stay.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            example = _apply(calls, F.linear(hidden.flatten(0, -2)[:0], weight_VD, bias_V))
        logits: DeferredLogits = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], len(weight_VD)),
            dtype=example.dtype,
            device=example.device,
            requires_grad=torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad),
        )
        logits._hidden, logits._weights, logits._calls = hidden, (weight_VD, bias_V), calls
        logits._is_past = is_past
        logits._whole, logits._views, logits._versions = None, [ref(logits)], logits._present_versions()
        return logits

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Defer casts, scales and views, reduce by chunks, and compute the whole matrix for anything else."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in QUERIES or (name == "__get__" and func.__self__.__name__ in _METADATA):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args else None
        if isinstance(logits, cls):
            logits._check_not_aliased(name)
            answer = logits._answer(func, args[1:], kwargs) if logits._whole is None else NotImplemented
            if answer is not NotImplemented:
                return answer
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        """Refuse operations below autograd, whose gradients would not reach the head."""
        raise InputError(f"{func} got logits that are not computed yet; give it logits.whole()")

    def whole(self) -> Tensor:
        """The [..., V] logits, computed once."""
        if self._whole is None:
            self._check_unchanged()
            with torch._C.DisableTorchFunction():
                self._whole = _apply(self._calls, F.linear(self._hidden, *self._weights))
        return self._whole

    def _present_versions(self) -> list[int]:
        return [version_of(x) for x in (self._hidden, *self._weights) if x is not None]

    def _check_unchanged(self) -> None:
        """Raise ``InputError`` if what the logits are made of was changed after their forward."""
        if self._present_versions() != self._versions or (self._is_past is not None and self._is_past()):
            raise InputError(
                "logits are first used when the hidden states or weights that they are made of have changed, such as "
                "by step.update(); use them before, or keep logits.whole()"
            )

    def _check_not_aliased(self, name: str) -> None:
        """Raise ``InputError`` before logits change in place of which a view would not change."""
        is_in_place = name == "__setitem__" or name.startswith("__i")
        is_in_place = is_in_place or (name.endswith("_") and not name.endswith("__"))
        if is_in_place and any((view := alive()) is not None and view is not self for alive in self._views):
            raise InputError(
                f"{name} changes logits in place after a view of them was made; make new ones instead, as in "
                "logits = logits * scale"
            )

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(self, *args, **kwargs)`` without the whole matrix; ``NotImplemented`` if it needs it."""
        if func in (Tensor.contiguous, Tensor.cpu) and self.device.type == "cpu":
            return self
        if func in _CASTS or (func in _SCALES and all(map(_is_constant, (*args, *kwargs.values())))):
            return self._then(func, args, kwargs)
        if func in _RESHAPES:
            return self._reshaped(args, kwargs)
        if func in (Tensor.flatten, torch.flatten):
            return self._flattened(*args, **kwargs)
        if func is Tensor.__getitem__:
            return self._of(self._hidden[args[0]]) if _keeps_last_axis(args[0], self.dim()) else NotImplemented
        if func in (Tensor.unbind, torch.unbind) and args in ((), (0,)) and not kwargs and self.dim() > 1:
            return tuple(self._of(hidden) for hidden in self._hidden.unbind())
        if func is Tensor.detach:
            weight_VD, bias_V = self._weights
            return DeferredLogits(
                self._hidden.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach(), self._calls,
                self._is_past,
            )  # fmt: skip
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func in _REDUCTIONS:
            dims = [*args, *(kwargs[name] for name in ("dim",) if name in kwargs)]
            if dims[:1] in ([-1], [self.dim() - 1]) and not {*kwargs} - {"dim"} and len(dims) == 1:
                return self._by_chunks(lambda logits_CV: func(logits_CV, -1))
        if func in (torch.gather, Tensor.gather):
            return self._gathered(*args, **kwargs)
        return NotImplemented

    def _then(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "DeferredLogits":
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # a loop may change them in place
        calls = (*self._calls, (func, args, kwargs))
        after = DeferredLogits(self._hidden, *self._weights, calls=calls, is_past=self._is_past)
        if func in _CASTS and (after.dtype, after.device) == (self.dtype, self.device):
            return self
        return after

    def _of(self, hidden: Tensor) -> "DeferredLogits":
        """A view of these logits: those of other hidden states."""
        view = DeferredLogits(hidden, *self._weights, calls=self._calls, is_past=self._is_past)
        self._views.append(ref(view))
        view._views = self._views
        return view

    def _reshaped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
        if kwargs or not all(isinstance(size, int) for size in shape):
            return NotImplemented
        shape = torch.empty(self.shape, device="meta").reshape(shape).shape
        if not shape or shape[-1] != self.shape[-1]:
            return NotImplemented
        return self._of(self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]))

    def _flattened(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = self.dim() - 1
        if end_dim % self.dim() == last:
            return NotImplemented
        return self._of(self._hidden.flatten(start_dim % self.dim(), end_dim % self.dim()))

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if (
            self.dim() != 2 or target.shape != self.shape[:1] or target.is_floating_point() or weight is not None
            or size_average is not None or reduce is not None
        ):  # fmt: skip
            return NotImplemented
        is_plain = all(func in _CASTS for func, _, _ in self._calls) and not label_smoothing
        if reduction in ("mean", "sum") and is_plain and self.dtype == _wide(self._hidden.dtype):
            target = target.clone()  # a loop may change it in place
            inputs = [self._hidden, target, *(x for x in self._weights if x is not None)]
            compute = partial(self._fused_cross_entropy, target, ignore_index, reduction)
            return DeferredLoss(compute, inputs=inputs, dtype=self.dtype)
        loss = self._by_chunks(
            lambda logits_CV, target_C: F.cross_entropy(
                logits_CV, target_C, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
            ),
            target,
        )
        loss = loss if reduction == "none" else loss.sum()
        return _mean(loss, target, ignore_index) if reduction == "mean" else loss

    def _fused_cross_entropy(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """The mean or sum over targets, whose gradients are made with it."""
        self._check_unchanged()
        targets = target.masked_fill(target == ignore_index, IGNORE)
        with torch._C.DisableTorchFunction():
            loss = chunked_cross_entropy(
                self._hidden, self._weights[0], targets, chunk_tokens=self._chunk, bias_V=self._weights[1]
            )
        return _mean(loss, target, ignore_index) if reduction == "mean" else loss

    def _gathered(self, dim: int, index: Tensor) -> Any:
        if dim not in (-1, self.dim() - 1) or index.shape[:-1] != self.shape[:-1]:
            return NotImplemented
        return self._by_chunks(lambda logits_CV, index_CK: logits_CV.gather(-1, index_CK), index)

    @property
    def _chunk(self) -> int:
        return chunk_tokens(self.shape[-1], self.device)

    def _by_chunks(self, reduce: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """[..., *rest] what ``reduce`` makes of [C, V] logits and C rows of ``others``.

        The logits of a chunk are computed again in the backward.
        """
        self._check_unchanged()
        rows = self._hidden.flatten(0, -2)
        rows_of_others = [other.reshape(len(rows), *other.shape[self.dim() - 1 :]) for other in others]

        def compute(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *others_C: Tensor) -> Tensor:
            return reduce(_apply(self._calls, F.linear(hidden_CD, weight_VD, bias_V)), *others_C)

        with torch._C.DisableTorchFunction():
            chunks = zip(rows.split(self._chunk), *(other.split(self._chunk) for other in rows_of_others))
            results = [
                checkpoint(compute, hidden_CD, *self._weights, *others_C, use_reentrant=False, preserve_rng_state=False)
                for hidden_CD, *others_C in chunks
            ]
            joined = torch.cat(results)
            return joined.reshape(*self._hidden.shape[:-1], *joined.shape[1:])


def _mean(loss: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The mean of a sum over targets; of none no number, and no gradient, as in torch."""
    count = (target != ignore_index).sum()
    return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)


def _apply(calls: tuple[Call, ...], logits: Tensor) -> Tensor:
    for func, args, kwargs in calls:
        logits = func(logits, *args, **kwargs)
    return logits


def _is_constant(argument: Any) -> bool:
    """Whether a factor is one number that nothing learns."""
    return isinstance(argument, int | float) or (
        isinstance(argument, Tensor) and not argument.dim() and not argument.requires_grad
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _keeps_last_axis(index: Any, num_axes: int) -> bool:
    """Whether an index leaves the last axis of a tensor of ``num_axes`` as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or isinstance(part, bool | list) for part in parts):
        return False
    taken = [part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts]
    is_open = [part is Ellipsis for part in parts]
    if not any(is_open) and sum(taken) < num_axes:
        return True
    return (is_open and is_open[-1]) or (isinstance(parts[-1], slice) and parts[-1] == slice(None))


def _has_hooks(head: nn.Module) -> bool:
    """Whether hooks of anybody get logits or their gradient: what is deferred is no tensor of a graph."""
    of_all = hooks_of_all._global_forward_hooks, hooks_of_all._global_backward_hooks
    return bool(
        head._forward_hooks or head._backward_hooks or head._backward_pre_hooks or any(of_all)
        or hooks_of_all._global_backward_pre_hooks
    )  # fmt: skip


class DeferredHead:
    """Makes the head of a transformers model return :class:`DeferredLogits`, until it is released."""

    def __init__(self, model: nn.Module, *, is_plain: Callable[[], bool], of: HasStep | None = None) -> None:
        """``is_plain``: whether the head computes as before it was prepared; ``of``: the prepared model."""
        self._forward: PreparedForward | None = None
        self.parameters: list[nn.Parameter] = []
        """Those that logits are made of after the forward."""
        head = output_embeddings(model)
        if type(head) is not nn.Linear or isinstance(head.weight, DTensor):
            return  # an adapter's head, say, or one whose weights are gathered for the forward alone

        def answer(hidden: Tensor) -> Tensor:
            if is_plain() or _has_hooks(head) or hidden.dim() < 2:
                return stock(hidden)
            dtype = autocast_dtype(hidden.device)
            weight: Tensor = head.weight
            bias_V: Tensor | None = head.bias
            if not torch.is_grad_enabled():  # nor when logits are computed
                weight, bias_V = weight.detach(), None if bias_V is None else bias_V.detach()
            if dtype is None or hidden.dtype is torch.float64:  # which autocast leaves as it is
                return DeferredLogits(hidden, weight, bias_V, is_past=past())
            cast = weight.to(dtype), None if bias_V is None else bias_V.to(dtype)
            return DeferredLogits(hidden.to(dtype), *cast, is_past=past() if cast[0] is weight else None)

        def past() -> Callable[[], bool] | None:
            begun = 0 if of is None else of.next_step
            return None if of is None else lambda: of.next_step != begun

        stock, self.parameters = head.forward, list(head.parameters())
        self._forward = PreparedForward(head, answer)

    def release(self) -> None:
        """Restore the head's own forward."""
        if self._forward is not None:
            self._forward.release()
