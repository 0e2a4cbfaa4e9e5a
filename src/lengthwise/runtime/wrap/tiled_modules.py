"""Feed-forward modules of layers, computed over some tokens at a time: what they have inside is never there for all.

A feed-forward module widens each token several times, and of long sequences that is most of what a layer has at once
(tiled computation: Arctic Long Sequence Training, Bekman et al. 2025, section 3.1). In tiles it keeps its input alone;
the backward computes each tile again. t slots of this rank, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.forward_patch import Forward, PreparedForward
from lengthwise.runtime.wrap.layer_lists import Layers


@dataclass(eq=False)
class _Observed:
    """One module that may be tiled, and what its calls were like so far."""

    name: str
    prepared: PreparedForward
    widest: int
    """The largest side of its matrices."""
    is_called: bool = False
    problem: str = ""
    """Why it cannot be tiled."""


@dataclass(eq=False)
class TiledModules:
    """The feed-forward modules of a model's layers, which compute ``tile`` slots at a time, or what a plan says.

    Between the start and :meth:`choose`, forwards of micro-batches show which modules can: those that map one tensor
    [1, t, H] to another without attention or noise.
    """

    layers: Layers
    tile: int
    """Slots that are computed at once in micro-batches whose plan says nothing about it; 0: all."""
    is_plain: Callable[[], bool]
    """Whether the model computes as before it was prepared."""
    _observed: list[_Observed] = field(default_factory=list, init=False)
    _is_chosen: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            for name, module in layer.named_modules():
                if name and _may_be_tiled(module):
                    widest = max(max(parameter.shape) for parameter in module.parameters())
                    observed = _Observed(f"layers.{number}.{name}", PreparedForward(module, _unanswered), widest)
                    observed.prepared._answer = partial(self._forward, observed)
                    self._observed.append(observed)

    @property
    def names(self) -> list[str]:
        """The modules that are tiled, once they were chosen."""
        return [observed.name for observed in self._observed]

    def choose(self, model: str) -> None:
        """Keep the outermost modules whose calls can be cut into tiles, and restore the others.

        Raises:
            InputError: there is none.
        """
        chosen: list[_Observed] = []
        for observed in self._observed:
            is_inside = any(observed.name.startswith(f"{outer.name}.") for outer in chosen)
            if observed.is_called and not observed.problem and not is_inside:
                chosen.append(observed)
            else:
                observed.prepared.release()
        if not chosen:
            reasons = sorted({observed.problem for observed in self._observed if observed.problem})
            asked = f"feed_forward_tile={self.tile}: " if self.tile else ""
            raise InputError(
                f"{asked}no module in the layers of {model} maps each token by itself with two matrices or more and "
                f"without dropout{': ' if reasons else ''}{'; '.join(reasons)}; leave it out"
            )
        self._observed, self._is_chosen = chosen, True

    def release(self) -> None:
        """Restore the modules' own forwards."""
        for observed in self._observed:
            observed.prepared.release()

    def _forward(self, observed: _Observed, *args: Any, **kwargs: Any) -> Any:
        forward = observed.prepared.original
        if self.is_plain() or not shards.is_active():
            return forward(*args, **kwargs)
        if not self._is_chosen:
            return _observe(observed, forward, args, kwargs)
        (x,), planned = args, shards.current().tile_tokens
        tile = self.tile if planned is None else planned
        if not tile or x.shape[1] <= tile:
            return forward(x)
        parts = x.split(tile, dim=1)
        if not torch.is_grad_enabled():
            return torch.cat([forward(part) for part in parts], dim=1)
        outs = [checkpoint(forward, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.cat(outs, dim=1)


@contextmanager
def short_tiles(tiles: TiledModules | None, size: int = 3) -> Iterator[None]:
    """Within, tiles have no more than ``size`` slots, so that short sequences are cut as well."""
    if tiles is None:
        yield
        return
    before, tiles.tile = tiles.tile, min(size, tiles.tile or size)
    try:
        yield
    finally:
        tiles.tile = before


def _observe(observed: _Observed, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module while the model is learned, and note why it cannot be tiled, if so."""
    shard = shards.current()
    before = shard.counts.copy()
    output = forward(*args, **kwargs)
    shape = [1, shard.num_slots]
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or list(args[0].shape[:-1]) != shape:
        observed.problem = f"{observed.name} takes something else than one tensor [1, t, H]"
    elif not isinstance(output, Tensor) or output.shape != args[0].shape:
        observed.problem = f"{observed.name} returns something else than one tensor [1, t, H]"
    elif observed.widest <= output.shape[-1]:
        observed.problem = f"{observed.name} is inside no wider than its input"
    elif shard.counts != before:
        observed.problem = f"{observed.name} attends, or draws numbers"
    observed.is_called = True
    return output


def _unanswered(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("every module gets an answer of its own")


def _may_be_tiled(module: nn.Module) -> bool:
    """Whether a module has two matrices or more, none of experts, and no dropout."""
    dims = [parameter.dim() for parameter in module.parameters()]
    drops = any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules())
    return dims.count(2) >= 2 and max(dims) == 2 and not drops
