"""What one forward and backward of somebody else's model takes, layer by layer: seconds, and bytes kept.

Bytes are those of distinct storages that the forward leaves for the backward, on any device; on a GPU the allocator
knows better, and is asked.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.wrap.layer_hooks import Forward, LayerWatch


def first_tensor(found: Any) -> Tensor:
    """The hidden states in what a layer takes or returns."""
    return next(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))


def storages(found: Any) -> dict[int, int]:
    """Bytes of the distinct storages in a tree of anything, by address."""
    tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


class Stopwatch(LayerWatch):
    """Seconds of every layer, forward and backward. Waits for the device around each."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.forward_s: dict[int, float] = {}
        self._backwards: dict[int, list[dict[str, float]]] = {}
        """By layer and call: when the backward of each began and ended."""

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the time of the layer's forward, and of its backward when its turn comes."""
        given, moments = first_tensor((args, kwargs)), dict[str, float]()
        self._backwards.setdefault(layer, []).append(moments)
        if given.requires_grad:
            given.register_hook(self._noting(moments, "ended"))
        self._wait()
        start_s = time.perf_counter()
        made = forward(*args, **kwargs)
        self._wait()
        self.forward_s[layer] = self.forward_s.get(layer, 0.0) + time.perf_counter() - start_s
        if first_tensor(made).requires_grad:
            first_tensor(made).register_hook(self._noting(moments, "begun"))
        return made

    def backward_s(self, layer: int) -> float | None:
        """None where nothing before the layer is trained, so that its backward has no end to be seen."""
        calls = [moments for moments in self._backwards[layer] if "ended" in moments]
        return sum(moments["ended"] - moments["begun"] for moments in calls) if calls else None

    def _noting(self, moments: dict[str, float], which: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._wait()
            moments[which] = time.perf_counter()

        return note


class SavedTensorCounter(LayerWatch):
    """Bytes that are kept for the backward: in all, and of each layer. Use as a context around the forward."""

    def __init__(self, known: Iterable[Any], device: torch.device, recompute: tuple[bool, ...] = ()) -> None:
        """``known``: tensors that are there anyway."""
        self._known = set().union(*(storages(each) for each in known))
        self._device, self._recompute = device, recompute
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []  # an address must not be used twice while we count
        self._given: dict[int, dict[int, int]] = {}
        self.kept: dict[int, int] = {}
        """By layer: what was first kept in its forward."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> "SavedTensorCounter":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._alive.clear()

    @property
    def num_bytes(self) -> int:
        """In all."""
        return sum(self._sizes.values())

    def input_bytes(self, layer: int) -> int:
        """Of the arguments of a layer, but for those that the one before had as well."""
        before = self._given.get(layer - 1, {})
        return sum(size for place, size in self._given[layer].items() if place not in before)

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count what the layer keeps; one that is recomputed keeps its arguments, which hooks may not see.

        Arguments that all layers get are there until the forward is over, whoever keeps them.
        """
        given = (args, kwargs)
        self._alive.append(given)
        here = {place: size for place, size in storages(given).items() if place not in self._known}
        self._given.setdefault(layer, {}).update(here)
        before_it = self._given.get(layer - 1, {})
        self._sizes |= {place: size for place, size in here.items() if place in before_it}
        before, allocated = self.num_bytes, self._allocated()
        if self._recompute and self._recompute[layer]:
            self._sizes |= here
        made = forward(*args, **kwargs)
        kept = self.num_bytes - before if allocated is None else self._allocated() - allocated
        self.kept[layer] = self.kept.get(layer, 0) + kept  # sequences may be computed one by one
        return made

    def _allocated(self) -> Any:
        """Of the device; None where it does not count."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._sizes[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


class LoopbackGroup(Group):
    """A group as this rank sees it if nobody answers: nothing is sent, zeros come, at once.

    A rank needs the same memory in it as in the group itself, and may fail without leaving others waiting.
    """

    def gather(self, x: Tensor, sizes: Any) -> AsyncResult:
        """Zeros for everyone's rows."""
        whole = x.new_zeros(sum(sizes), *x.shape[1:])
        return AsyncResult(lambda: whole)

    def reduce_scatter(self, x: Tensor, sizes: Any) -> AsyncResult:
        """This rank's own rows."""
        own = x.new_zeros(sizes[self.rank], *x.shape[1:])
        return AsyncResult(lambda: own)

    def all_to_all(self, x: Tensor, send: Any, receive: Any) -> Tensor:
        """Zeros for what would be received; counted as an exchange."""
        self.sent.calls["all_to_all"] += 1
        return x.new_zeros(sum(receive), *x.shape[1:])

    def ring_shift(self, x: Tensor, shape: Any, *, tag: int = 0) -> AsyncResult:
        """Zeros."""
        received = x.new_zeros(tuple(shape))
        return AsyncResult(lambda: received)

    def broadcast(self, x: Tensor, owner: int) -> AsyncResult:
        """``x`` as it is."""
        return AsyncResult(lambda: x)

    reduce = broadcast

    def send(self, x: Tensor, to: int, *, tag: int = 0) -> AsyncResult:
        """Nothing."""
        return AsyncResult(lambda: x)

    def receive(self, x: Tensor, source: int, *, tag: int = 0) -> AsyncResult:
        """``x`` as it is."""
        return AsyncResult(lambda: x)

    def all_reduce(self, x: Tensor, operation: Any) -> Tensor:
        """``x`` as it is."""
        return x
