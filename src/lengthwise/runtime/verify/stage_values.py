"""What a forward gives beside its loss, on the last stage of a pipeline and in the whole model.

A loop's loss may read more than the logits: hidden states that the forward returns, or a term that layers leave on
themselves. On the last stage both are whole only if its own layers make them. So all that is returned is compared by
value. What modules keep with a graph has to be made anew by the last stage, with the same values; objects that modules
hold, what their hooks hold on to, and lists beside their classes are looked through for it.
"""

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
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
_OWN = {"_parameters", "_buffers", "_modules", "forward"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
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
    """Tensors with a graph that the modules of a model hold, their hooks, and lists beside their classes."""
    look = _Look()
    for name, module in model.named_modules():
        of_weights = _names_of_weights(module)
        for key, value in vars(module).items():
            if key in _OWN or key in of_weights:
                continue
            if key in _HOOKS:
                value = [member for hook in value.values() for member in _held_by(hook)]
            yield from _with_graph(f"{name}.{key}" if name else key, value, look, opens=_is_plain_object)
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if not f"{kind.__module__}.".startswith(_UNREAD):
            yield from _with_graph(kind.__qualname__, dict(vars(kind)), look, opens=is_dataclass)
    for source in {type(module).__module__ for module in model.modules()}:
        if not f"{source}.".startswith(_UNREAD) and source in sys.modules:
            yield from _with_graph(source, dict(vars(sys.modules[source])), look, opens=is_dataclass)


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


def _held_by(hook: Any) -> list[Any]:
    """What a hook holds on to: cells of its closure, arguments, and the object that it is a method of."""
    if isinstance(hook, partial):
        return [*_held_by(hook.func), *hook.args, *hook.keywords.values()]
    if isinstance(hook, MethodType):
        return [hook.__self__, *_held_by(hook.__func__)]
    if isinstance(hook, FunctionType):
        return [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
    return [vars(hook)] if hasattr(hook, "__dict__") else []


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
