"""What a forward gives beside its loss, on the last stage of a pipeline and in the whole model.

A loop's loss may read more than the logits: hidden states that the forward returns, or a term that layers leave on
themselves. On the last stage both are whole only if its own layers make them. So all that is returned is compared by
value. What modules keep with a graph has to be made anew by the last stage, with the same values; objects that modules
hold, lists beside their classes, and what their hooks and methods can reach are looked through for it.
"""

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lengthwise.core.errors import CheckError, Setting
from lengthwise.runtime.wrap.deferred_logits import DeferredLogits
from lengthwise.runtime.wrap.deferred_loss import DeferredLoss

MOST, DEEPEST = 4096, 4
"""Members of a container that are looked at, and containers within each other."""
MOST_OF_ALL = 50_000
"""Members of all containers that are looked at: a script may hold a corpus."""
_PLAIN = (int, float, str, bytes, type(None))
"""Kinds of values in lists that hold nothing else."""
_OWN = {"_parameters", "_buffers", "_modules"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = FunctionType, MethodType, partial
_METHODS = FunctionType, staticmethod, classmethod, property
_UNREAD = ("torch.", "lengthwise.", "transformers.")
"""Packages whose lists and classes hold nothing of a forward."""


@dataclass(kw_only=True, eq=False)
class ForwardValues:
    """What a forward returned, and what it left on modules with a graph; by where each is found."""

    returned: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    left: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@contextmanager
def values_of_forward(model: nn.Module, values: ForwardValues) -> Iterator[None]:
    """Within, the model's forward is called, and maybe its backward; ``values`` gets what it gave."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        values.returned = dict(_returned(output))

    before = {id(tensor): tensor for _, tensor in _left_on_modules(model)}
    hook = model.register_forward_hook(keep)
    try:
        yield
        values.left = {place: tensor for place, tensor in _left_on_modules(model) if id(tensor) not in before}
    finally:
        hook.remove()


def check_last_stage(model: nn.Module, stage: ForwardValues, whole: ForwardValues, relative: float) -> None:
    """Raise ``CheckError`` if the last stage gives something else than the whole model, by more than ``relative``."""
    name, way_out = type(model).__name__, f"plan with one stage ({Setting.MAX_STAGES}=1)"
    for place, expected in whole.returned.items():
        if not _is_close(stage.returned.get(place), expected, relative):
            raise CheckError(
                f"{name} returns what its earlier layers made (output{place}), and the last stage of a pipeline has "
                f"its own layers alone, where a loss may read it; {way_out}"
            )
    for place, expected in whole.left.items():
        if not _is_close(stage.left.get(place), expected, relative):
            raise CheckError(
                f"{place} of {name} keeps what a layer made, and each layer is computed on one stage of a pipeline "
                f"alone, while a loss on the last one may read it (values that are kept detached do not count); "
                f"{way_out}"
            )


def _returned(output: Any) -> Iterator[tuple[str, Tensor]]:
    """All numbers in an output, computed."""
    with torch.no_grad():
        for place, value in _tensors(output, _Look(), opens=is_dataclass):
            if isinstance(value, DeferredLoss):
                continue  # it is compared by itself
            value = value.detach()  # logits that are computed later stay so for the loss
            yield place, value.whole() if isinstance(value, DeferredLogits) else value.clone()


def _left_on_modules(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors with a graph that the modules of a model hold or reach by hooks and methods, or lists beside classes."""
    look = _Look()
    for name, module in model.named_modules():
        of_weights = _names_of_weights(module)
        for key, value in vars(module).items():
            if key in _OWN or key in of_weights:
                continue
            if key in _HOOKS:
                value = _held_by(value.values())
            elif key == "forward":
                value = _held_by([getattr(value, "original", value)])
            yield from _with_graph(f"{name}.{key}" if name else key, value, look, opens=_is_plain_object)
    every = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    kinds = [kind for kind in every if not f"{kind.__module__}.".startswith(_UNREAD)]
    for kind in kinds:
        yield from _with_graph(kind.__qualname__, dict(vars(kind)), look, opens=is_dataclass)
    for source in {type(module).__module__ for module in model.modules()}:
        if not f"{source}.".startswith(_UNREAD) and source in sys.modules:
            yield from _with_graph(source, dict(vars(sys.modules[source])), look, opens=is_dataclass)
    for kind in kinds:
        reached = _held_by(value for value in vars(kind).values() if isinstance(value, _METHODS))
        yield from _with_graph(f"methods of {kind.__qualname__}", reached, look, opens=_is_plain_object)


def _names_of_weights(module: nn.Module) -> set[str]:
    """Attributes of a module that its hooks make of its weights alone: weight norm, pruning."""
    names = (getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in module._forward_pre_hooks.values())
    made = {name for name in names if isinstance(name, str)}
    return made | (set(getattr(module, "parametrizations", ())) if is_parametrized(module) else set())


class _Look:
    """What was looked through so far: each container once, until ``MOST_OF_ALL`` members were looked at."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._num_left = MOST_OF_ALL

    def members(self, value: Any, *, opens: Callable[[Any], bool]) -> list[tuple[str, Any]]:
        """The members of a container, or of an object that ``opens`` says yes to, with their places in it."""
        if id(value) in self._seen or self._num_left <= 0:
            return []
        self._seen[id(value)] = value
        limit, members = min(MOST, self._num_left), list[tuple[str, Any]]()
        if isinstance(value, dict):
            members = [(f"[{key!r}]", member) for key, member in islice(value.items(), limit)]
        elif isinstance(value, list | tuple | set | deque):
            first = next(iter(value), None)
            if not isinstance(first, _PLAIN):
                members = [(f"[{number}]", member) for number, member in enumerate(islice(value, limit))]
        elif is_dataclass(value) and opens(value):
            members = [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
        elif opens(value):
            members = [(f".{key}", member) for key, member in islice(vars(value).items(), limit)]
        self._num_left -= len(members)
        return members


def _with_graph(place: str, value: Any, look: _Look, *, opens: Callable[[Any], bool]) -> Iterator[tuple[str, Tensor]]:
    for inner, tensor in _tensors(value, look, opens=opens):
        if tensor.grad_fn is not None:
            yield f"{place}{inner}", tensor


def _tensors(value: Any, look: _Look, *, opens: Callable[[Any], bool], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors in containers, and in objects that ``opens`` says yes to, with their places."""
    if isinstance(value, Tensor):
        yield "", value
    elif depth < DEEPEST and not isinstance(value, (type, nn.Module, *_PLAIN)):
        for inner, member in look.members(value, opens=opens):
            for place, tensor in _tensors(member, look, opens=opens, depth=depth + 1):
                yield f"{inner}{place}", tensor


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's own, whose attributes may hold tensors."""
    return hasattr(value, "__dict__") and not f"{type(value).__module__}.".startswith(_UNREAD)


def _held_by(hooks: Iterable[Any]) -> dict[str, Any]:
    """What hooks or methods hold on to, by name: what their functions and the functions among these reach, arguments,
    and the objects that they are methods of.
    """
    members, left, seen = dict[str, Any](), list(hooks), set[int]()
    while left:
        hook = left.pop(0)
        if id(hook) in seen:
            continue
        seen.add(id(hook))
        reached = list(_reached_by(hook))
        left += [value for _, value in reached if isinstance(value, _FUNCTIONS)]
        for name, value in reached:
            if not isinstance(value, (ModuleType, type, *_FUNCTIONS)):
                members[name if name not in members else f"{name} {len(members)}"] = value
    return members


def _reached_by(hook: Any) -> Iterator[tuple[str, Any]]:
    """What a function reaches by its closure or global names in its code, and what another kind of hook holds."""
    if isinstance(hook, partial):
        yield from (
            ("func", hook.func),
            *((str(number), value) for number, value in enumerate(hook.args)),
            *hook.keywords.items(),
        )
    elif isinstance(hook, MethodType):
        yield from (("self", hook.__self__), ("func", hook.__func__))
    elif isinstance(hook, staticmethod | classmethod | property):
        yield "func", hook.fget if isinstance(hook, property) else hook.__func__
    elif isinstance(hook, FunctionType):
        if f"{hook.__module__}.".startswith(_UNREAD):
            return
        for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or ()):
            if _is_filled(cell):
                yield name, cell.cell_contents
        names = dict.fromkeys(_names_in(hook.__code__))
        yield from ((name, hook.__globals__[name]) for name in names if name in hook.__globals__)
    elif _is_plain_object(hook):
        yield "self", hook


def _names_in(code: CodeType) -> Iterator[str]:
    """Names that a function's code, and that of functions within it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


@torch.no_grad()
def _is_close(found: Tensor | None, expected: Tensor, relative: float) -> bool:
    """Whether a tensor has the values of another, but for rounding."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return True
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(is_same, 0, found.double() - expected.double())
    size = torch.where(expected.isfinite(), expected.double(), 0).norm()
    return bool(difference.norm() <= relative * size)
