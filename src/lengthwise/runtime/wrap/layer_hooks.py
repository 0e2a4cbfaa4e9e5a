"""Hooks on the layers of a third-party model: recompute, watch or skip them as the micro-batch says."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.activation_offload import OffloadedLayer
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.state.update_overlap import UpdateOverlap
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.runtime.wrap.late_hooks import LateHooks
from lengthwise.runtime.wrap.layer_lists import Layers
from lengthwise.runtime.wrap.offload_layers import (
    by_position,
    hidden_states_key,
    hidden_states_of,
    saving,
)
from lengthwise.runtime.wrap.recompute_layers import checkpoint_layer, selective_contexts
from lengthwise.runtime.wrap.stage_pass import StagedForward, hidden_states_in
from lengthwise.runtime.wrap.structure import ModelStructure
from lengthwise.runtime.wrap.tensors_in import tensors_in
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls

Forward = Callable[..., Any]


class LayersError(InputError):
    """Other modules are to be taken for the layers of a model."""

    def __init__(self, message: str, *, taken: str) -> None:
        super().__init__(message)
        self.taken = taken
        """The paths of the lists that were taken."""


class LayersNotCalledError(LayersError):
    """The forward calls none of a model's layers, but maybe their parts."""


class NoAttentionError(LayersError):
    """Layers are computed without a call of attention that is known."""


class OtherOrderError(LayersError):
    """The layers of several lists are called in another order than the one that was guessed."""

    def __init__(self, message: str, *, taken: str, in_order: str) -> None:
        super().__init__(message, taken=taken)
        self.in_order = in_order
        """The paths of those that are called, in the order of their first calls."""


class LayerReachedError(Exception):
    """Stops a traced forward before its first layer."""


class LayerWatch:
    """An observer of every layer that is computed; this base class only computes them."""

    def computes(self, layer: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the layer, and return what it returns."""
        return forward(*args, **kwargs)


class HookedLayers:
    """Replaces the forwards of a model's layers, until :meth:`release`."""

    def __init__(
        self, layers: Layers, *, context: Callable[[], Any] | None = None, is_plain: Callable[[], bool] | None = None
    ) -> None:
        """``context``: contexts of a selective recompute, as :func:`torch.utils.checkpoint.checkpoint` takes them.

        ``is_plain``: whether the model computes as before it was prepared; None: it never does.
        """
        self._is_plain = is_plain or (lambda: False)
        self.intercept: InterceptCalls | None = None
        """The function mode that is active while the model's forward runs."""
        self.mode: AbstractContextManager[Any] | None = None
        """The mode in which the model computes, which recomputed layers enter again."""
        self.watch = LayerWatch()
        self.computed: frozenset[int] | None = None
        """The layers that are computed, the first among them; the others return their input. None: all."""
        self.gather: LayerGather | None = None
        """Gathers the weights of each layer when it is reached; None: they are whole."""
        self.overlap: UpdateOverlap | None = None
        """Moves whole weights and their gradients beneath forwards and backwards; None: nothing moves there."""
        self.position = 0
        """0 before the layers of a forward, the number of the layer from 1, and one more after them."""
        self.is_between = False
        """Whether code between two layers runs."""
        self.order_problem = ""
        """What was unusual in the order in which the layers were called, if anything was."""
        self.gather_problem = ""
        """Why layers cannot be gathered when they are reached, if they cannot; their order aside."""
        self._is_halted = False
        self.context = context
        self.may_keep_attention = context is not None
        """Whether recomputed layers may keep what attention gave, if plans say so: they were compared so."""
        self.may_split = False
        """Whether plans may split backwards: stages of one layer each were compared that do."""
        self.may_slice = False
        """Whether plans may cut micro-batches into slices: the model was compared that computes some."""
        self._modules = list(layers)
        self.late_hooks = LateHooks(self._modules)
        """Hooks that were registered on layers since."""
        self._forwards: list[Forward] = [layer.forward for layer in layers]
        numbers_of: dict[nn.Module, list[int]] = {}
        for number, layer in enumerate(layers):
            numbers_of.setdefault(layer, []).append(number)
        self._prepared = [
            PreparedForward(layer, partial(self._forward, tuple(numbers))) for layer, numbers in numbers_of.items()
        ]
        self._last: Any = None
        self._hidden_keys: dict[int, int | str | None] = {}
        """Which argument of each layer the hidden states are."""
        self._returned: dict[int, int] = {}
        """How many values the tuple has that each layer returns; 0: it returns something else."""
        self._attends: dict[int, bool] = {}
        self.widths: dict[int, int] = {}
        """Numbers of each slot in the hidden states that a layer returns."""
        self.dtypes: dict[int, torch.dtype] = {}
        """Of the hidden states that a layer returns, which may be more precise than its weights."""
        self._registered: dict[int, int] = {}
        """Attention calls of each layer through the registry of transformers."""

    def release(self) -> None:
        """Restore the layers' own forwards."""
        for prepared in self._prepared:
            prepared.release()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Within, a forward raises :class:`LayerReachedError` when it comes to a layer."""
        self._is_halted = True
        try:
            yield
        finally:
            self._is_halted = False

    def _forward(self, numbers: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        """Compute a layer; ``numbers``: its places in the list, which may have a module several times."""
        if self._is_halted:
            raise LayerReachedError
        number = next((number for number in numbers if number >= self.position), numbers[0])
        if self._is_plain() or not shards.is_active():
            return self._stock(number, args, kwargs)
        shard = shards.current()
        if self.computed is not None and number not in self.computed:
            self._skip(number)
            return _passed_on(self._last, self._hidden_states(number, args, kwargs), self._returned.get(number))
        if self.computed is not None and number == 0:
            args, kwargs = _with_gradient(self._hidden_states(number, args, kwargs), args, kwargs)
        stage = shard.stage_pass
        if stage is not None and number < stage.layers.start:
            return self._skipped(number, stage, args, kwargs)
        is_recomputed = torch.is_grad_enabled() and shard.is_recomputed(number)
        compute = self._forwards[number]
        self._reach(number + 1, args, kwargs)
        before, registered, shard.layer = shard.counts.all_attention, shard.counts.registered, number
        if self.intercept is not None:
            self.intercept.layer = number
        last, key = self._last, self._hidden_keys.get(number)
        with saving(shard.offload, number, self._modules[number], args, kwargs, key=key) as layer:
            if is_recomputed:
                compute = partial(self._recomputed, number, layer)
            self._last = self.watch.computes(number, compute, args, kwargs)
        if self.intercept is not None:
            self.intercept.layer = None
        shard.layer = None
        self._attends[number] = shard.counts.all_attention > before
        self._registered[number] = shard.counts.registered - registered
        if stage is not None and number == stage.layers.stop - 1:
            stage.end(self._last)
        self._note_shapes(number, shard.num_slots, _first_of(last), args, kwargs)
        self._leave(number + 1)
        return self._last

    def _hidden_states(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        return hidden_states_of(args, kwargs, self._hidden_keys.get(number))

    def _stock(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer as before the model was prepared, maybe with gathered weights."""
        if self.gather is None or not self.gather.is_in_round:
            return self._forwards[number](*args, **kwargs)
        self._reach(number + 1, args, kwargs)
        self._last = self._forwards[number](*args, **kwargs)
        self._leave(number + 1)
        return self._last

    def _note_shapes(self, number: int, num_slots: int, before: Any, args: Any, kwargs: Any) -> None:
        """Note the form of a layer's output, and which argument its input is; ``before``: the output before it."""
        output = _first_of(self._last)
        self._returned[number] = len(self._last) if isinstance(self._last, tuple) else 0
        if isinstance(output, Tensor) and num_slots:
            self.widths[number] = output.numel() // num_slots
            self.dtypes.setdefault(number, output.dtype)  # not that of a comparison in another one
        if number not in self._hidden_keys:
            self._hidden_keys[number] = hidden_states_key(args, kwargs, before, output)

    def _skipped(self, number: int, stage: StagedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a layer before the stage: its input, or of the last of them what the stage before sent."""
        self._skip(number)
        hidden_states_in(self._last)
        hidden_states = self._hidden_states(number, args, kwargs)
        if hidden_states is not None:
            is_next = number == stage.layers.start - 1
            hidden_states = stage.received(hidden_states) if is_next else stage.skipped(number, hidden_states)
        return _passed_on(self._last, hidden_states, self._returned.get(number))

    def _skip(self, number: int) -> None:
        """Go on to the layer after one that is not computed."""
        self.position, self.is_between = number + 1, True
        if self.intercept is not None:
            self.intercept.skip(number)
        shards.current().counts.registered += self._registered.get(number, 0)

    def begin(self) -> None:
        """Begin a forward of the model."""
        self._reach(0)

    def end(self) -> None:
        """Note that the forward of a whole model is over."""
        if self.position <= len(self._modules):
            missing = f"{self.position - 1 + self.is_between}" if self.position else "0"
            self.order_problem = self.order_problem or f"layer {missing} is not called"

    def forget_output(self) -> None:
        """Let go of the output of the last layer, whose form alone the next forward may need."""
        parts = self._last if isinstance(self._last, tuple) else (self._last,)
        empty = tuple([torch.empty(0) if isinstance(part, Tensor) else part for part in parts])
        self._last = empty if isinstance(self._last, tuple) else empty[0]

    def _reach(self, position: int, *inputs: Any) -> None:
        """Come to a position of the forward: the weights that it uses are gathered, if they are not whole."""
        if 0 < position <= len(self._modules) and position != self.position + 1:
            self.order_problem = f"layer {position - 1} is not called once, after the layer before it in the list"
        self.position, self.is_between = position, False
        if self.overlap is not None:
            self.overlap.reach_forward(position)
        if self.gather is not None:
            self.gather.reach_forward(position)
        if position == 1:
            self._watch_backward(0, inputs)

    def _leave(self, position: int) -> None:
        self.is_between = position < len(self._modules)
        self._watch_backward(position, self._last)
        if not self.is_between:
            self._reach(position + 1)

    def _watch_backward(self, position: int, outputs: Any) -> None:
        """Gather what a position uses, or push what is final, when gradients of its outputs are there."""
        if self.overlap is not None and shards.is_active():
            self.overlap.watch(shards.current().watched, position, outputs)
        gather = self.gather
        if gather is None or not gather.is_in_round:
            return
        tensors = list(tensors_in(outputs))
        if position and not tensors:
            self.gather_problem = (
                f"layer {position - 1} returns {type(outputs).__name__} without a tensor by which its backward is "
                "noticed"
            )
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: _reach_backward(gather, position))

    @property
    def called(self) -> frozenset[int]:
        """The layers that were called in a micro-batch."""
        return frozenset(self._attends)

    @property
    def last_output(self) -> Any:
        """The output of the layer that was computed last."""
        return self._last

    def check(self, structure: ModelStructure, *, each_attends: bool | None) -> None:
        """Raise ``LayersError`` if others are to be taken for the layers: none was called, or, unless ``each_attends``
        is None, none attended, or not each, or lists that are gone through together are called in another order.
        """
        model, numbers, kind = type(structure.model).__name__, list(self._attends), type(self._modules[0]).__name__
        if not numbers:
            raise LayersNotCalledError(
                f"the forward of {model} calls none of its layers ({structure.layers_name}: {kind}) themselves, so "
                "they cannot be computed again, cut into stages or gathered; give each a forward that computes it, or "
                "name another list, or the parts of its modules: prepare(..., layers='transformer.blocks.*')",
                taken=structure.layers_name,
            )
        silent = [] if each_attends is None else [number for number in numbers if not self._attends[number]]
        if len(silent) == len(numbers) or (each_attends and silent):
            listed = ", ".join(map(str, silent[:5])) + (" ..." if len(silent) > 5 else "")
            raise NoAttentionError(
                f"layers {listed} of {model} ({structure.layers_name}: {type(self._modules[silent[0]]).__name__}) make "
                "no call of attention that is known, so tokens of different ranks would never meet in them: "
                "convolutions, recurrences, scans and Fourier transforms have sequences whole; attention is shared "
                "inside of a layer's forward, by torch.nn.functional.scaled_dot_product_attention, "
                "nn.MultiheadAttention, varlen_attn or flash_attn",
                taken=structure.layers_name,
            )
        if each_attends is not None and structure.is_order_guessed and numbers != list(range(len(self._modules))):
            in_order = ",".join(structure.layers_by_path[number][0] for number in numbers)
            raise OtherOrderError(
                f"{model} calls the layers {structure.layers_name} in the order {in_order}",
                taken=structure.layers_name, in_order=in_order,
            )  # fmt: skip

    def _recomputed(self, number: int, layer: OffloadedLayer | None, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer under activation checkpointing, which saves only its arguments; ``layer``: on the host."""
        mode = self.mode
        intercept, forward, shard = self.intercept, self._forwards[number], shards.current()

        def again(*args: Any, **kwargs: Any) -> Any:
            if intercept is not None:
                intercept.shard = shard
            with mode or nullcontext(), intercepting(intercept):  # a backward is not under the modes of its forward
                return forward(*args, **kwargs)

        context = self.context
        if shard.keep_attention or (context is not None and layer is not None):
            context = selective_contexts(layer)
        which = number, self._modules[number]
        if layer is None:
            return checkpoint_layer(forward, again, shard, context, args, kwargs, layer=which)
        first, second = by_position(forward, tuple(kwargs)), by_position(again, tuple(kwargs))
        return checkpoint_layer(first, second, shard, context, (*args, *kwargs.values()), {}, layer=which)


def _with_gradient(
    hidden_states: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the hidden states among a layer's arguments require a gradient.

    Where some layers stand for all, they are to have a backward, though they themselves or what is before them may be
    frozen: layers above have one.
    """
    if hidden_states is None or hidden_states.requires_grad or not torch.is_grad_enabled():
        return args, kwargs
    trained = hidden_states.detach().requires_grad_()
    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: trained if leaf is hidden_states else leaf, (args, kwargs)
    )
    return changed


def _reach_backward(gather: LayerGather, position: int) -> None:
    """Gather what a backward uses at a position; raise ``InputError`` if it is not that of the step."""
    if gather.is_in_round and not gather.is_backward:
        raise InputError(
            "gradients are differentiated through the model's layers before step.backward(loss), as by "
            "torch.autograd.grad, but weights are gathered by layer and sent on within one backward; use "
            "weights='whole' in prepare(...)"
        )
    gather.reach_backward(position)


def _first_of(output: Any) -> Any:
    """The first value of what a layer returns."""
    return output[0] if isinstance(output, tuple) and output else output


def _passed_on(last: Any, hidden_states: Tensor | None, num_values: int | None) -> Any:
    """The output of a skipped layer: its input, in the form of the output of a layer before it.

    ``num_values``: of the tuple that the layer itself returns, where it is known; 0: it returns something else.
    """
    if num_values and (not isinstance(last, tuple) or len(last) != num_values):
        return (hidden_states, *[None] * (num_values - 1))
    if isinstance(last, Tensor) or (num_values == 0 and isinstance(last, tuple)):
        return hidden_states
    return (hidden_states, *last[1:]) if isinstance(last, tuple) else last


@contextmanager
def intercepting(intercept: InterceptCalls | None) -> Iterator[None]:
    """Within, calls are intercepted, if the model's forward makes any."""
    if intercept is None:
        yield
        return
    with intercept.intercepting():
        yield
