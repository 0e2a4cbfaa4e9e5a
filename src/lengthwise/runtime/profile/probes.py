"""Per-layer timing and activation-memory probes for third-party models.

Bytes are those of distinct storages that the forward leaves for the backward, on any device; on a GPU the allocator
knows better, and is asked.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.wrap.layer_hooks import Forward, LayerWatch
from lengthwise.runtime.wrap.tensors_in import tensors_in


def _hook_first(tree: Any, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` called with the gradient of the first tensor of a layer's arguments or outputs that has one."""
    first = next((tensor for tensor in tensors_in(tree) if tensor.requires_grad), None)
    if first is not None:
        first.register_hook(hook)


def storages(tree: Any) -> dict[int, int]:
    """Sizes in bytes of the distinct storages of the tensors in a tree, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(tree)}


class Stopwatch(LayerWatch):
    """Measures the forward and backward seconds of every layer; synchronizes the device around each."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.forward_s: dict[int, float] = {}
        self._backwards: dict[int, list[dict[str, float]]] = {}
        """When each backward began and ended, by layer and call."""

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Time the layer's forward, and its backward when that runs."""
        moments = dict[str, float]()
        self._backwards.setdefault(layer, []).append(moments)
        _hook_first((args, kwargs), self._noting(moments, "ended"))
        self._wait()
        start_s = time.perf_counter()
        outputs = forward(*args, **kwargs)
        self._wait()
        self.forward_s[layer] = self.forward_s.get(layer, 0.0) + time.perf_counter() - start_s
        _hook_first(outputs, self._noting(moments, "begun"))
        return outputs

    def backward_s(self, layer: int) -> float | None:
        """Backward seconds of a layer; None where its input or output has no gradient that can be observed."""
        if layer not in self._backwards:
            return 0.0  # it was not called
        calls = [moments for moments in self._backwards[layer] if {"begun", "ended"} <= moments.keys()]
        return sum(moments["ended"] - moments["begun"] for moments in calls) if calls else None

    def _noting(self, moments: dict[str, float], which: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._wait()
            moments[which] = time.perf_counter()

        return note


class SavedTensorCounter(LayerWatch):
    """Counts the bytes saved for the backward, in total and by layer. Use as a context around the forward."""

    def __init__(self, existing: Iterable[Any], device: torch.device, recompute: tuple[bool, ...] = ()) -> None:
        """``existing``: tensors that are not counted, such as weights."""
        self._known = set().union(*(storages(tree) for tree in existing))
        self._device, self._recompute = device, recompute
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []  # an address must not be used twice while we count
        self._given: dict[int, dict[int, int]] = {}
        self.kept_bytes: dict[int, int] = {}
        """Bytes first saved in the forward of each layer, by layer."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> "SavedTensorCounter":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._alive.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes saved for the backward in total."""
        return sum(self._sizes.values())

    def input_bytes(self, layer: int) -> int:
        """Bytes of a layer's arguments, without those that the layer before had as well."""
        before = self._given.get(layer - 1, {})
        return sum(size for place, size in self._given.get(layer, {}).items() if place not in before)

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count what a layer saves; a recomputed layer saves its arguments, which hooks may not see.

        Arguments that all layers get are there until the forward is over, whoever keeps them.
        """
        arguments = (args, kwargs)
        self._alive.append(arguments)
        here = {place: size for place, size in storages(arguments).items() if place not in self._known}
        self._given.setdefault(layer, {}).update(here)
        before_it = self._given.get(layer - 1, {})
        self._sizes |= {place: size for place, size in here.items() if place in before_it}
        before, allocated = self.num_bytes, self._allocated()
        if self._recompute and self._recompute[layer]:
            self._sizes |= here
        outputs = forward(*args, **kwargs)
        kept_bytes = self.num_bytes - before if allocated is None else self._allocated() - allocated
        self.kept_bytes[layer] = self.kept_bytes.get(layer, 0) + kept_bytes  # sequences may be computed one by one
        return outputs

    def _allocated(self) -> Any:
        """Bytes allocated on the device; None on a CPU, where they are not counted."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._sizes[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


class LoopbackGroup(Group):
    """A process group whose collectives send nothing and return zeros at once.

    A rank needs the same memory in it as in the group itself, and may fail without leaving others waiting.
    """

    def gather(self, x: Tensor, sizes: Any) -> AsyncResult:
        """Return zeros in place of an all-gather's rows."""
        rows = x.new_zeros(sum(sizes), *x.shape[1:])
        return AsyncResult(lambda: rows)

    def reduce_scatter(self, x: Tensor, sizes: Any) -> AsyncResult:
        """Return zeros in place of this rank's rows of a reduce-scatter."""
        rows = x.new_zeros(sizes[self.rank], *x.shape[1:])
        return AsyncResult(lambda: rows)

    def all_to_all(self, x: Tensor, send: Any, receive: Any) -> Tensor:
        """Return zeros in place of an all-to-all's result; counted as an exchange."""
        self.sent.calls["all_to_all"] += 1
        return x.new_zeros(sum(receive), *x.shape[1:])

    def ring_shift(self, x: Tensor, shape: Any, *, tag: int = 0) -> AsyncResult:
        """Return zeros in place of a ring shift's result; counted as an exchange."""
        self.sent.calls["ring"] += 1
        received = x.new_zeros(tuple(shape))
        return AsyncResult(lambda: received)

    def broadcast(self, x: Tensor, owner: int) -> AsyncResult:
        """Return ``x`` in place of a broadcast's result."""
        return AsyncResult(lambda: x)

    reduce = broadcast

    def send(self, x: Tensor, to: int, *, tag: int = 0) -> AsyncResult:
        """Do nothing in place of a send."""
        return AsyncResult(lambda: x)

    def receive(self, x: Tensor, source: int, *, tag: int = 0) -> AsyncResult:
        """Return ``x`` in place of a received tensor."""
        return AsyncResult(lambda: x)

    def all_reduce(self, x: Tensor, operation: Any) -> Tensor:
        """Return ``x`` in place of an all-reduce's result."""
        return x
