"""Activation checkpointing of a model's own: plans decide which layers are recomputed instead.

That of transformers is switched off. What other code gives to ``torch.utils.checkpoint``, around layers or inside of
one, is called directly: attention that is computed again by torch, in a layer that may be computed again as well, would
make calls that plans know nothing of. ``checkpoint`` is an ordinary function, so while the forward runs, and in the
backward while a layer is computed again, its names in all modules that have imported it stand for ours.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn
from torch.utils import checkpoint as home

Forward = Callable[..., Any]
_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
"""Keyword arguments of ``checkpoint`` itself; it passes others on."""
_NOT_OF_USERS = {"torch", "sympy", "mpmath", "numpy", "scipy", "lengthwise"} | sys.stdlib_module_names
"""Packages whose modules keep the function or never have it, unless a class of the model is written there."""


class OwnCheckpointing:
    """Switches off what models of transformers bring, and calls what others' code gives to ``checkpoint`` directly."""

    def __init__(self, model: nn.Module, *parts: nn.Module) -> None:
        """``parts``: models of transformers in it."""
        self._parts = (model, *parts)
        self.is_used = self.switch_off()
        """Whether the model had any that is left out, as far as its forward was called."""
        self._original: Forward = home.checkpoint
        written_in = {type(module).__module__ for module in model.modules()}
        spaces = {
            id(space): space
            for name, space in list(sys.modules.items())
            if name in written_in or name.partition(".")[0] not in _NOT_OF_USERS
        }
        self._places = [
            (space, name) for space in (home, *spaces.values()) for name in _names_of(self._original, space)
        ]

    def switch_off(self) -> bool:
        """Switch off what models of transformers bring; whether it was on, again if it had been off."""
        return switch_off_checkpointing(*self._parts)

    def replaced_in(self, forward: Forward) -> Forward:
        """``forward``, in which calls of ``checkpoint`` are replaced."""

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.left_out():
                return forward(*args, **kwargs)

        return call

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Within, calls of ``checkpoint`` are replaced."""
        with ExitStack() as stack:
            for space, name in self._places:
                stack.callback(setattr, space, name, getattr(space, name))
                setattr(space, name, self._called)
            yield

    def _called(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        self.is_used = True
        return function(*args, **{name: value for name, value in kwargs.items() if name not in _OPTIONS})


def switch_off_checkpointing(*parts: nn.Module) -> bool:
    """Switch off the activation checkpointing that models of transformers bring; whether it was on in any layer."""
    names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")  # as versions of transformers say
    was_on = any(getattr(module, "gradient_checkpointing", False) for part in parts for module in part.modules())
    for part in parts:
        switches_off = [disable for name in names if (disable := getattr(part, name, None)) is not None]
        for disable in switches_off[:1]:
            disable()
    return was_on


def _names_of(value: Any, space: Any) -> list[str]:
    """Names of ``value`` in a module; most of some thousand have none, which is found out first."""
    names = getattr(space, "__dict__", {})
    if not any(map(is_, list(names.values()), repeat(value))):
        return []
    return [name for name, other in list(names.items()) if other is value]
