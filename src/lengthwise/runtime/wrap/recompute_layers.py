"""Activation checkpointing of layers, full or selective, and ``recompute`` for models that call layers themselves."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from lengthwise.core.errors import CheckError
from lengthwise.runtime.comm.activation_offload import OffloadedLayer
from lengthwise.runtime.models.kept_attention import is_attention
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.handed_out import version_of
from lengthwise.runtime.wrap.offload_layers import KeepOnHost, ReplayFromHost, by_position, saving


def selective_contexts(layer: OffloadedLayer | None = None) -> Callable[[], Any]:
    """Make a ``context`` for recomputed layers that saves what attention gave and computes everything else again.

    ``layer``: one whose attention is kept on the host.
    """
    return partial(create_selective_checkpoint_contexts, _policy) if layer is None else partial(_on_host, layer)


def _on_host(layer: OffloadedLayer) -> tuple[KeepOnHost, ReplayFromHost]:
    saved = deque[Any]()
    return KeepOnHost(saved, layer, is_attention), ReplayFromHost(saved, is_attention)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``layer(*args, **kwargs)``, computed again in the backward if the micro-batch of the moment says so.

    For models that call their layers in a way of their own. A layer of a prepared model knows its number; of other
    callables, the first called in a forward is layer 0, the next layer 1. Outside of a micro-batch it is a plain call.
    """
    if not shards.is_active() or _is_prepared(layer):
        return layer(*args, **kwargs)
    shard = shards.current()
    number = shard.counts.layers
    shard.counts.layers += 1
    if not torch.is_grad_enabled():
        return layer(*args, **kwargs)
    with saving(shard.offload, number, layer, args, kwargs):
        if number >= len(shard.recompute) or not shard.is_recomputed(number):
            return layer(*args, **kwargs)
        call = by_position(layer, tuple(kwargs))
        return checkpoint_layer(call, call, shard, None, (*args, *kwargs.values()), {}, layer=(number, layer))


class _NamedArguments:
    """The keyword arguments of a layer that are tensors, which a loop may change in place before the backward."""

    def __init__(self, shard: PackShard, kwargs: dict[str, Any]) -> None:
        self._tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        self._shard, self._versions, self._is_as_given = shard, dict[str, int](), dict[str, bool]()

    def note(self) -> None:
        """Note what they are in the first forward."""
        for name, tensor in self._tensors.items():
            self._versions[name], self._is_as_given[name] = version_of(tensor), self._given(tensor) is tensor

    def as_noted(self) -> dict[str, Tensor]:
        """What they were in the first forward.

        Raises:
            CheckError: one was changed since, and what it was is not known.
        """
        noted = {name: self._given(x) if self._is_as_given[name] else x for name, x in self._tensors.items()}
        for name, tensor in self._tensors.items():
            if noted[name] is tensor and version_of(tensor) != self._versions[name]:
                raise CheckError(
                    f"the argument {name} of a layer was changed in place after the forward, and the layer is computed "
                    "again in the backward; change a copy"
                )
        return noted

    def _given(self, tensor: Tensor) -> Tensor:
        micro_batch = self._shard.micro_batch
        value: Tensor = tensor if micro_batch is None else micro_batch.handed_out.as_given(tensor)
        return value


def _is_prepared(layer: Any) -> bool:
    """Whether a layer's forward was replaced and decides about recompute by itself."""
    return getattr(getattr(layer, "__dict__", {}).get("forward"), "is_prepared", False)


def checkpoint_layer(
    first: Callable[..., Any],
    second: Callable[..., Any],
    shard: PackShard,
    context: Callable[[], Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    layer: tuple[int, Any],
) -> Any:
    """Compute ``first`` under activation checkpointing; the backward calls ``second`` with the same arguments.

    The second runs whole, so that every rank issues the same collectives, and counts calls from where the first did.
    ``layer``: its number, and itself.
    """
    flags = _flags_of(layer[1])
    begun, around, is_second = shard.counts.copy(), shard.around_second_forward, False
    named = _NamedArguments(shard, kwargs)  # torch looks at those by position

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_second
        if not is_second:
            is_second = True
            output = first(*args, **kwargs)
            named.note()
            return output
        kwargs = kwargs | named.as_noted()
        _last.describe = partial(_described, *layer, flags)
        after, shard.counts = shard.counts, begun.copy()
        try:
            with shards.active(shard), around():
                return second(*args, **kwargs)
        finally:
            shard.counts = after

    options: dict[str, Any] = {} if context is None else {"context_fn": context}
    with set_checkpoint_early_stop(False):
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=shard.preserves_rng, determinism_check="default",
            **options, **kwargs,
        )  # fmt: skip


class _LastRecomputed:
    """The layer that a backward computed again last, whichever thread that was in."""

    describe: Callable[[], str] | None = None
    """Says how it differs from its forward."""


_last = _LastRecomputed()
_Weakly = list[tuple[str, Any]]
_flagged = WeakKeyDictionary[nn.Module, tuple[_Weakly, _Weakly]]()
"""Parameters and modules of each layer by name, which are not searched for at every call: experts may be hundreds."""


@contextmanager
def naming_recomputed() -> Iterator[None]:
    """Within a backward, name the layer that keeps other tensors when it is computed again than in its forward.

    Raises:
        CheckError: there is one.
    """
    try:
        yield
    except CheckpointError as error:
        if _last.describe is None:
            raise
        raise CheckError(
            f"{_last.describe()}; leave what a layer computes with as it is from its forward to the end of "
            "step.backward(...), or use recompute='none' in prepare(...)"
        ) from error
    finally:
        _last.describe = None


def _flags_of(layer: Any) -> dict[str, bool]:
    """What commonly changes between a forward and its backward, by name: which weights are trained, training modes."""
    if not isinstance(layer, nn.Module):
        return {}
    if (flagged := _flagged.get(layer)) is None:
        trained = [(f"{name}.requires_grad", ref(parameter)) for name, parameter in layer.named_parameters()]
        modes = [(f"{name}.training".lstrip("."), ref(module)) for name, module in layer.named_modules()]
        flagged = _flagged[layer] = (trained, modes)
    trained, modes = flagged
    there = {name: parameter.requires_grad for name, reference in trained if (parameter := reference()) is not None}
    return there | {name: module.training for name, reference in modes if (module := reference()) is not None}


def _described(number: int, layer: Any, before: dict[str, bool]) -> str:
    """What differs between two forwards of a layer, in words; ``before``: its flags in the first."""
    what = f"layer {number}" + (f" ({type(layer).__name__})" if isinstance(layer, nn.Module) else "")
    now = _flags_of(layer)
    changed = [f"its {name} was {flag} and is {now[name]}" for name, flag in before.items() if now.get(name) != flag]
    more = f", and {len(changed) - 1} further flags have changed" if len(changed) > 1 else ""
    why = changed[0] + more if changed else "something that it computes with has changed, such as a flag or a global"
    return f"{what} does not compute in the backward, where it is recomputed, what it computed in its forward: {why}"
