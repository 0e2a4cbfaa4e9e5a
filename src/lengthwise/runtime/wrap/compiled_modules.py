"""torch.compile of the layers of a third-party model, or of those modules in them that can be compiled exactly.

Compiled code is met by no function mode, so a module can be compiled if its forward makes no call that is answered for
the pack instead of the shard: attention of torch, noise, positions. Attention through the registry of transformers is
a break in the graph: what lies before and after it is compiled. Numbers of tokens are dynamic sizes, and weights are
inputs, so that layers of one kind share one graph for micro-batches of any size.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from lengthwise.core.errors import InputError
from lengthwise.runtime.compile.graphs import GraphCount, allow_shapes
from lengthwise.runtime.state.pending_parameter import wait_for
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.exchange_script import SlotGather
from lengthwise.runtime.wrap.forward_patch import Forward, PreparedForward
from lengthwise.runtime.wrap.structure import ModelStructure
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls

VARIANTS = 8
"""Graphs of one function that are expected at most: with and without autocast, for one token and for more, for each
kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Modes:
    """How a model computes at the moment."""

    is_plain: bool
    """Whether it computes as before it was prepared."""
    intercept: InterceptCalls | None
    """The mode that answers calls of its forward."""
    compared: Any
    """The mode in which it is compared with itself, which must see every call; None: it is not."""


@dataclass(eq=False)
class _Part:
    """A layer or a module in one, and what its calls were like so far."""

    name: str
    module: nn.Module
    prepared: PreparedForward
    is_layer: bool
    is_called: bool = False
    problem: str = ""
    """Why it cannot be compiled."""
    compiled: Forward | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether somebody watches its modules, which compiled code would not tell."""
        return any(
            part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
            for part in self.module.modules()
            if part is not self.module
        )


class CompiledModules:
    """Compiles modules of a model's layers, until :meth:`release`.

    Between the start and :meth:`choose`, forwards of micro-batches show which modules can be compiled.
    """

    def __init__(
        self,
        structure: ModelStructure,
        backend: str,
        modes: Callable[[], Modes],
    ) -> None:
        """``backend``: of torch.compile, for parts that are compiled already as well, until they are released."""
        self.backend, self._modes, self._restore = backend, modes, _uncompile(structure.model)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What compiled code runs in: hooks of torch on all modules are part of what a graph is for."""
        self._is_chosen, self._is_off = False, False
        self._parts: list[_Part] = []
        self._count: GraphCount | None = None
        seen = set[int]()
        for number, layer in enumerate(structure.layers):
            for name, module in layer.named_modules(prefix=f"layers.{number}"):
                if _has_code(module) and id(module) not in seen:
                    seen.add(id(module))
                    part = _Part(name, module, PreparedForward(module, _unanswered), is_layer=module is layer)
                    part.prepared._answer = partial(self._forward, part)
                    self._parts.append(part)

    @classmethod
    def of(cls, structure: ModelStructure, backend: str | None, modes: Callable[[], Modes]) -> "CompiledModules | None":
        """Compile the layers of a model by ``backend``; None: compile nothing."""
        return None if backend is None else cls(structure, backend, modes)

    @property
    def names(self) -> list[str]:
        """The modules that are compiled, once they were chosen."""
        return [part.name for part in self._parts if part.compiled is not None]

    def choose(self, model: str) -> None:
        """Compile the outermost modules that can be, when they are next called, and restore the others.

        Raises:
            InputError: there is none.
        """
        observing, chosen = {id(part.prepared) for part in self._parts}, list[_Part]()
        for part in self._parts:
            if any(part.name.startswith(f"{outer.name}.") for outer in chosen):
                continue
            patched = next((sub for sub in part.module.modules() if _is_patched(sub, observing)), None)
            if patched is not None and patched is not part.module:
                part.problem = part.problem or f"{part.name} has a {type(patched).__name__} that is computed by shards"
            if part.is_called and not part.problem and not part.has_hooks:
                chosen.append(part)
        if not chosen:
            reasons = sorted({part.problem for part in self._parts if part.problem})
            raise InputError(
                f"compile=True: no module in the layers of {model} has several operations and neither attention nor "
                f"noise{': ' if reasons else ''}{'; '.join(reasons[:3])}; leave compile out"
            )
        for part in reversed(self._parts):
            if part in chosen:
                part.compiled = torch.compile(part.prepared.original, dynamic=True, backend=self.backend)
            elif not part.is_layer:  # what patched a layer later goes through here
                part.prepared.release()
        self._parts = [part for part in self._parts if part.is_layer or part in chosen]
        self._is_chosen = True
        allow_shapes(VARIANTS)
        self._count = GraphCount()

    def release(self) -> None:
        """Restore the modules' own forwards."""
        for part in reversed(self._parts):
            part.prepared.release()
        for restore in self._restore:
            restore()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, modules are computed as they are."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def recompiles(self) -> int:
        """Graphs that this process compiled since this was last asked."""
        return 0 if self._count is None else self._count.new()

    def _forward(self, part: _Part, *args: Any, **kwargs: Any) -> Any:
        forward, modes = part.prepared.original, self._modes()
        if modes.is_plain or self._is_off or not shards.is_active():
            return forward(*args, **kwargs)
        if not self._is_chosen:
            return _observe(part, modes.intercept, args, kwargs)
        is_compiled = modes.compared is None and torch.is_grad_enabled() and not part.has_hooks
        if part.compiled is None or not is_compiled:
            return forward(*args, **kwargs)
        if modes.intercept is not None and _get_current_function_mode() is not modes.intercept:
            return forward(*args, **kwargs)  # the model's code has a mode of its own
        wait_for(part.module.parameters())
        # The module makes no call that the mode would answer.
        with self.around(), nullcontext() if modes.intercept is None else _pop_mode_temporarily():
            return part.compiled(*args, **kwargs)


def _observe(part: _Part, intercept: InterceptCalls | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module while the model is learned, and note why it cannot be compiled, if so."""
    before = _num_calls(intercept)
    output = part.prepared.original(*args, **kwargs)
    if _num_calls(intercept) != before:
        part.problem = f"{part.name} attends by a call of torch, draws numbers or looks positions up"
    part.is_called = True
    return output


def _num_calls(intercept: InterceptCalls | None) -> tuple[Any, ...]:
    """How many calls were answered so far, but for those of registered attention."""
    shard = shards.current()
    gathers = sum(isinstance(exchange, SlotGather) for exchange in shard.attended)
    return replace(shard.counts, registered=0), gathers, 0 if intercept is None else intercept.num_scalars


def _has_code(module: nn.Module) -> bool:
    """Whether a module may have several operations that one kernel can do: not a kernel of torch, nor a projection."""
    if is_compiled(module):
        return False  # it stands for the module in it
    if next(module.children(), None) is not None:
        return True
    num_matrices = sum(parameter.dim() > 1 for parameter in module.parameters())
    return num_matrices != 1 and not type(module).__module__.startswith("torch.")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` gave for another, its ``_orig_mod``."""
    return type(module).__name__ == "OptimizedModule"


def _uncompile(model: nn.Module) -> list[Callable[[], None]]:
    """Let parts of a model that their user compiled compute as they are; what makes them compiled again."""
    restore: list[Callable[[], None]] = []
    for module in model.modules():
        if (code := module._compiled_call_impl) is not None:
            restore.append(partial(setattr, module, "_compiled_call_impl", code))
            module._compiled_call_impl = None
        if is_compiled(module):
            restore.append(partial(setattr, module, "forward", module.forward))
            module.forward = cast(nn.Module, module._orig_mod).__call__
    return restore


def _is_patched(module: nn.Module, observing: set[int]) -> bool:
    """Whether another answers for a module than those ``observing``, by identity."""
    forward = vars(module).get("forward")
    return isinstance(forward, PreparedForward) and id(forward) not in observing


def _unanswered(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("every module gets an answer of its own")
