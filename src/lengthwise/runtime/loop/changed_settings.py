"""Settings of a model that a loop changes after ``prepare`` has compared packs with it, such as a weight that grows.

What is zero when packs are compared may mix their tokens later. So where something that a model holds changes (numbers,
flags and words of modules, their classes and configs, containers and objects of such, buffers, frozen weights,
modules), the comparison is made again: at its first three changes, and then at the 4th, 8th, 16th and so on, as a loop
may change a setting at every step.
"""

import reprlib
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.wrap.state_between_calls import WORDS, Values, is_same, leaves_of, values_of

ALWAYS = 3
"""Changes of a setting after each of which packs are compared."""
OF_OTHERS = frozenset({"builtins", "torch", "transformers", "typing", "abc"})
"""Packages whose classes no loop changes."""
_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""What is switched off again by whoever compares, and changes nothing that is computed."""
_GONE = object()


class ChangedSettings:
    """Knows the settings of a model from when it was compared, and says which have changed since."""

    def __init__(self, model: nn.Module, own_state: Collection[str] = ()) -> None:
        """``own_state``: what the model's forwards change themselves, by name; no settings."""
        self._model, self._own_state, self._before = model, own_state, _settings_of(model)
        self._num_changes: Counter[str] = Counter()

    def changes(self) -> dict[str, str]:
        """What settings have changed to, in words, by name, where packs are to be compared; to be called once a step.

        They are changes until :meth:`note` is called.
        """
        now, changes = _settings_of(self._model), dict[str, str]()
        for name in {**self._before, **now}:
            before, value = self._before.get(name, _GONE), now.get(name, _GONE)
            if before is value or (before is not _GONE and value is not _GONE and is_same(before, value)):
                continue
            if name in self._own_state or name.endswith(_CHECKPOINTING):
                continue
            if _is_compared(self._num_changes[name] + 1):
                changes[name] = _in_words(value)
                continue
            self._num_changes[name] += 1
            if value is _GONE:
                del self._before[name]
            else:
                self._before[name] = value
        return changes

    def note(self, changed: Collection[str] = ()) -> None:
        """Take the settings for compared as they are, of which those of ``changed`` were others before."""
        self._num_changes.update([*changed])
        self._before = _settings_of(self._model)


def _is_compared(number: int) -> bool:
    """Whether packs are compared after so many changes of a setting."""
    return number <= ALWAYS or number & (number - 1) == 0


def _in_words(value: Any) -> str:
    if value is _GONE:
        return "is gone"
    try:
        return f"became {reprlib.repr(value)}" if isinstance(value, WORDS) else "has changed"
    except ValueError:  # a number of thousands of digits
        return "has changed"


def _settings_of(model: nn.Module) -> Values:
    """What modules and their configs hold, the buffers, the frozen parameters and the users' classes, by name."""
    values = values_of(model)
    classes = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    for kind in classes:
        if kind.__module__.partition(".")[0] not in OF_OTHERS:
            for name, value in vars(kind).items():
                values |= leaves_of(f"{kind.__qualname__}.{name}", value)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not isinstance(parameter, AbsentParameter):
            values |= leaves_of(name, parameter)
    return values
