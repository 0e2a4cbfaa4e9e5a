"""Per-layer timing and activation-memory probes for third-party models.

Bytes are those of distinct storages that the forward leaves for the backward, on any device; on a GPU the allocator
knows better, and is asked.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.models.kept_attention import is_attention
from lengthwise.runtime.wrap.layer_hooks import Forward, LayerWatch
from lengthwise.runtime.wrap.offload_layers import hidden_states_of
from lengthwise.runtime.wrap.tensors_in import tensors_in


def _hook_first(tree: Any, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` called with the gradient of the first tensor of a layer's arguments or outputs that has one."""
    first = next((tensor for tensor in tensors_in(tree) if tensor.requires_grad), None)
    if first is not None:
        first.register_hook(hook)


def storages(tree: Any) -> dict[int, int]:
    """Sizes in bytes of the distinct storages of the tensors in a tree, by the storage's identity."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(tree)}


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

    def __init__(
        self,
        existing: Iterable[Any],
        recompute: tuple[bool, ...] = (),
        peaks: "AllocatorPeaks | None" = None,
        *,
        keep_attention: bool = False,
    ) -> None:
        """``existing``: tensors that are not counted, such as weights; ``peaks``: asked instead of hooks, on a GPU.

        ``keep_attention``: recomputed layers keep what kernels of attention give, which hooks do not see.
        """
        self._known = set().union(*(storages(tree) for tree in existing))
        self._recompute, self._peaks, self._keep_attention = recompute, peaks, keep_attention
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []  # an address must not be used twice while we count
        self._given: dict[int, dict[int, int]] = {}
        self.kept_bytes: dict[int, int] = {}
        """Bytes first saved in the forward of each layer, by layer."""
        self.attention_bytes: dict[int, int] = {}
        """Bytes that kernels of attention gave in the forward of each layer, where layers keep them, by layer."""
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
        here = {place: size for place, size in storages(arguments).items() if place not in self._known}
        self._given.setdefault(layer, {}).update(here)
        if self._keep_attention:
            forward = kernels = AttentionOutputs(forward)
        if self._peaks is not None:
            outputs, kept_bytes = self._peaks.computes(layer, forward, args, kwargs)
            if not (self._recompute and self._recompute[layer]):
                hidden_states = storages(hidden_states_of(args, kwargs))  # gone after the layer, unless it saved them
                kept_bytes -= sum(size for place, size in hidden_states.items() if place not in self._sizes)
        else:
            self._alive.append(arguments)
            before_it = self._given.get(layer - 1, {})
            self._sizes |= {place: size for place, size in here.items() if place in before_it}
            before = self.num_bytes
            if self._recompute and self._recompute[layer]:
                self._sizes |= here
            outputs = forward(*args, **kwargs)
            kept_bytes = self.num_bytes - before
        self.kept_bytes[layer] = self.kept_bytes.get(layer, 0) + kept_bytes  # sequences may be computed one by one
        if self._keep_attention:
            self.attention_bytes[layer] = self.attention_bytes.get(layer, 0) + kernels.num_bytes
        return outputs

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._sizes[storage._cdata] = storage.nbytes()
            if self._peaks is None:
                self._alive.append(tensor)
        return tensor


class AttentionOutputs(TorchDispatchMode):
    """Counts the bytes that kernels of attention give in a forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward
        self.num_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward."""
        with self:
            return self._forward(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        if is_attention(func):
            self.num_bytes += sum(storages(outputs).values())
        return outputs


class AllocatorPeaks:
    """The most bytes that a GPU's allocator had given out in each part of a forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        self.first_bytes = 0
        """In the forward to the end of the first layer: what a model makes before its layers, as masks, may be most."""
        self.loss_bytes = 0
        """In the last layer of the forward, and after it."""
        self.loss_backward_bytes = 0
        """In the backward until the last layer gets its gradient."""
        self.layers: dict[int, int] = {}
        """In the backward of each layer, by its number."""
        self._first: int | None = None
        self._last = self._last_forward_bytes = 0
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Compute a layer; its outputs, and the bytes that are allocated since."""
        before = torch.cuda.memory_allocated(self._device)
        _hook_first((args, kwargs), lambda gradient: self._end_backward(layer))
        outputs, self._last = forward(*args, **kwargs), layer
        _hook_first(outputs, lambda gradient: self._begin_backward(layer))
        self._last_forward_bytes = self.take()
        self._first = layer if self._first is None else self._first
        if layer == self._first:  # once for every sequence, where these are computed one by one
            self.first_bytes = max(self.first_bytes, self._last_forward_bytes)
        return outputs, torch.cuda.memory_allocated(self._device) - before

    def end_forward(self) -> None:
        """Note the peak in the last layer and after it."""
        self.loss_bytes = max(self._last_forward_bytes, self.take())

    def take(self) -> int:
        """The peak since the last call, over what was allocated at first."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def _begin_backward(self, layer: int) -> None:
        if layer == self._last:  # the outputs of others are inputs of the next, whose backward ends there
            self.loss_backward_bytes = max(self.loss_backward_bytes, self.take())

    def _end_backward(self, layer: int) -> None:
        self.layers[layer] = max(self.layers.get(layer, 0), self.take())


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
