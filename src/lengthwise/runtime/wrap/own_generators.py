"""Find the random generators that a model's own code holds, beside those of torch, NumPy and Python for all."""

import random
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

MOST = 64
"""Members of a list or dictionary that is looked into."""


def generator_states(model: nn.Module) -> dict[str, Any]:
    """The states of the generators that modules have as attributes, alone or in lists and dictionaries, or that their
    methods know by a global name; by what an error calls them.
    """
    return {name: _state_of(generator) for name, generator in _generators(model)}


def _generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kinds = dict[type[nn.Module], None]()
    for path, module in model.named_modules():
        kinds |= dict.fromkeys(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))
        for name, value in vars(module).items():
            for inner in _members(value):
                yield f"{path}.{name}".lstrip(".") + _kind_of(inner), inner
    for kind in kinds:
        for function in vars(kind).values():
            if not isinstance(function, FunctionType):
                continue
            for name in function.__code__.co_names:
                for inner in _members(function.__globals__.get(name)):
                    yield f"{name} of {function.__module__}{_kind_of(inner)}", inner


def _members(value: Any) -> list[Any]:
    """A generator, or those in a list or dictionary."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [inner for inner in values if isinstance(inner, _KINDS)] if len(values) <= MOST else []


def _kind_of(generator: Any) -> str:
    kind = type(generator)
    return f" ({kind.__module__.partition('.')[0]}'s {kind.__name__})"


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.SystemRandom):
        return None  # it has none
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_legacy = isinstance(generator, np.random.RandomState)
    with np.printoptions(threshold=sys.maxsize):
        return repr(generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state)
