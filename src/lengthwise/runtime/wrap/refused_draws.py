"""Refuse random numbers that a user's function draws for a micro-batch from generators of the process.

Ranks that share a micro-batch call such a function each, with generators in states of their own, and what they drew
would be other numbers for one sequence. So ``inputs=`` and ``loss=`` draw none from torch, NumPy's or Python's global
generators; those of the micro-batch belong to its sequences.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.core.errors import InputError

_DRAWS = frozenset((
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial,
    torch.poisson, torch.rand_like, torch.randn_like, torch.randint_like, Tensor.normal_, Tensor.uniform_,
    Tensor.random_, Tensor.bernoulli, Tensor.bernoulli_, Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_,
    Tensor.geometric_, Tensor.multinomial, F.gumbel_softmax,
))  # fmt: skip
_DROPOUTS = frozenset((F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout))


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that may be drawn from unnoticed, by name; equal if none was."""
    drawn = np.random.get_state(legacy=False)
    keys = {
        name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in drawn.pop("state").items()
    }
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(), "numpy.random": (keys, drawn),
        "Python's random": random.getstate(),
    }  # fmt: skip
    if device.type == "cuda":
        states["torch.cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


class _Watch:
    """One call of a user's function, and the states in which it is to leave the generators."""

    def __init__(self, function: str, device: torch.device) -> None:
        self.function, self.device = function, device
        self._states = random_states(device)
        self._passed: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ``InputError`` if a generator was drawn from."""
        states = random_states(self.device)
        drawn = [name for name, state in states.items() if state != self._states[name]]
        if drawn:
            raise _refusal(self.function, " and ".join(drawn))

    def begin_item(self) -> None:
        """Let what reads an item draw as it likes."""
        self.check()
        self._passed = self._states

    def end_item(self) -> None:
        """Watch the generators again, in the states in which they are."""
        self._states, self._passed = random_states(self.device), None

    @property
    def is_reading(self) -> bool:
        """Whether an item is being read."""
        return self._passed is not None


_watches: list[_Watch] = []


class _RefuseDraws(TorchFunctionMode):
    """Refuses functions of torch that draw from its global generators, by name."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        draws = func in _DRAWS and kwargs.get("generator") is None
        draws = draws or (func in _DROPOUTS and _drops(*args, **kwargs))
        if draws and not self._watch.is_reading:
            raise _refusal(
                self._watch.function, f"{'torch' if hasattr(torch, func.__name__) else 'Tensor'}.{func.__name__}"
            )
        return func(*args, **kwargs)


def _drops(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0.0


@contextmanager
def draws_refused(function: str, device: torch.device) -> Iterator[None]:
    """Within, a user's ``function``, such as ``inputs=``, is called, which draws from no global generator.

    Raises:
        InputError: it did.
    """
    watch = _Watch(function, device)
    _watches.append(watch)
    try:
        with _RefuseDraws(watch):
            yield
        watch.check()
    finally:
        _watches.remove(watch)


@contextmanager
def item_read() -> Iterator[None]:
    """Within, an item of a corpus is read, whose own draws, such as those of a seeded augmentation, are not refused."""
    watches = [watch for watch in _watches if not watch.is_reading]
    for watch in watches:
        watch.begin_item()
    try:
        yield
    finally:
        for watch in watches:
            watch.end_item()


def _refusal(function: str, draw: str) -> InputError:
    return InputError(
        f"{function} of prepare draws from {draw}, and ranks that share a sequence would draw different numbers for "
        "it; draw with micro_batch.normal(*shape), for each token, or micro_batch.uniform_of_sequences(), for each "
        "sequence: they are the same on every rank and in every plan (call= tells several draws apart)"
    )
