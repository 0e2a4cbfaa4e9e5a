"""Activation checkpointing of a model's own: plans decide which layers are recomputed instead.

That of transformers is switched off. Where other code asks torch for it, outside of layers, it is left out:
``checkpoint`` is an ordinary function, so while the forward runs its names in the modules where the model's classes are
written, and its home's, stand for ours.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import nn
from torch.utils import checkpoint as home

Forward = Callable[..., Any]
_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
"""Keyword arguments of ``checkpoint`` itself; it passes others on."""


class OwnCheckpointing:
    """Switches off what models of transformers bring, and calls what others' code gives to ``checkpoint`` directly."""

    def __init__(self, model: nn.Module, *parts: nn.Module, is_in_layer: Callable[[], bool]) -> None:
        """``parts``: models of transformers in it; ``is_in_layer``: whether a layer computes, whose calls stay."""
        self.is_used = switch_off_checkpointing(model, *parts)
        """Whether the model had any that is left out, as far as its forward was called."""
        self._is_in_layer = is_in_layer
        self._original: Forward = home.checkpoint
        written_in = {type(module).__module__ for module in model.modules()}
        spaces = [home, *(sys.modules[name] for name in sorted(written_in) if name in sys.modules)]
        self._places = [
            (space, name) for space in spaces for name, value in vars(space).items() if value is self._original
        ]

    def replaced_in(self, forward: Forward) -> Forward:
        """``forward``, in which calls of ``checkpoint`` are replaced."""

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for space, name in self._places:
                    setattr(space, name, self._called)
                    stack.callback(setattr, space, name, self._original)
                return forward(*args, **kwargs)

        return call

    def _called(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_layer():
            return self._original(function, *args, **kwargs)
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
