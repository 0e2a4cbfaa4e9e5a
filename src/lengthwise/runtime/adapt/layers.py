"""Layers of somebody else's model under our hand: recomputed when the micro-batch says so, watched, or left out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lengthwise.runtime.adapt import shard as shards
from lengthwise.runtime.adapt.intercept import Intercept

Forward = Callable[..., Any]


class LayerWatch:
    """Told of every layer that is computed. Does nothing itself."""

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the layer, and return what it returns."""
        return forward(*args, **kwargs)


class Layers:
    """The layers of a model, whose forwards go through here until :meth:`release`."""

    def __init__(self, layers: nn.ModuleList, *, context: Callable[[], Any] | None = None) -> None:
        """``context``: contexts of a selective recompute, as :func:`torch.utils.checkpoint.checkpoint` takes them."""
        self.intercept: Intercept | None = None
        """That is in force while the model's forward runs."""
        self.watch = LayerWatch()
        self.num_kept: int | None = None
        """Layers that are computed; the others pass on what they get. None: all."""
        self._context = context
        self._modules = list(layers)
        self._forwards: list[Forward] = [layer.forward for layer in layers]
        self._last: Any = None
        for number, layer in enumerate(layers):
            layer.forward = partial(self._forward, number)

    def release(self) -> None:
        """The layers as they were."""
        for layer in self._modules:
            del layer.__dict__["forward"]

    def _forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        if not shards.is_active():
            return self._forwards[number](*args, **kwargs)
        if self.num_kept is not None and number >= self.num_kept:
            if self.intercept is not None:
                self.intercept.skip(number)
            return _passed_on(self._last, args, kwargs)
        is_recomputed = shards.current().is_recomputed(number) and torch.is_grad_enabled()
        compute = partial(self._recomputed, number) if is_recomputed else self._forwards[number]
        if self.intercept is not None:
            self.intercept.layer = number
        self._last = self.watch.computes(number, compute, args, kwargs)
        if self.intercept is not None:
            self.intercept.layer = None
        return self._last

    def _recomputed(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments alone. The second forward runs whole, so that every rank issues the same collectives."""
        shard, intercept = shards.current(), self.intercept
        begun, is_second = shard.counts.copy(), False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_second
            if not is_second:
                is_second = True
                return self._forwards[number](*args, **kwargs)
            after, shard.counts = shard.counts, begun.copy()
            try:
                with intercepted(intercept):
                    return self._forwards[number](*args, **kwargs)
            finally:
                shard.counts = after

        options = {} if self._context is None else {"context_fn": self._context}
        with set_checkpoint_early_stop(False):
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="default", **options,
                **kwargs,
            )  # fmt: skip


def _passed_on(last: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer that changes nothing returns, in the form of what one before it returned."""
    given = args[0] if args else kwargs["hidden_states"]
    if isinstance(last, Tensor):
        return given
    return (given, *last[1:]) if isinstance(last, tuple) else last


@contextmanager
def intercepted(intercept: Intercept | None) -> Iterator[None]:
    """Calls are met; of models whose forward asks for nothing, there is nothing to meet."""
    if intercept is None:
        yield
        return
    with intercept:
        yield
