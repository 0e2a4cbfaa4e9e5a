"""Settings of a model that a loop changes after ``prepare`` has compared packs with it, such as a weight that grows.

What is zero when packs are compared may mix their tokens later. So where a number, flag or word of a module changes for
the first time, or a buffer is written, the comparison is made again.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

_WORDS = (bool, int, float, str)
_MACHINERY = frozenset({"training", "_attn_implementation_internal"})
"""What changes with evaluation, and what a prepared model of transformers has another one of."""


class ChangedSettings:
    """Knows the settings of a model from when it was compared, and says which have changed since."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _settings_of(model)
        self._known: set[str] = set()
        """Those that have changed before: a loop may change one at every step."""

    def note(self, known: Collection[str] = ()) -> None:
        """Take the settings for compared as they are; later changes of those that are ``known`` say nothing new."""
        self._known.update(known)
        self._before = _settings_of(self._model)

    @property
    def changed(self) -> dict[str, str]:
        """What settings have changed to, in words, by name; of each the first change alone."""
        now = _settings_of(self._model)
        new = {name: value for name, value in now.items() if self._before.get(name) != value}
        return {
            name: "was written" if isinstance(value, _Writes) else f"became {value!r}"
            for name, value in new.items()
            if name not in self._known
        }


class _Writes(tuple[int, int]):
    """The identity of a buffer, and how often it was written."""


def _settings_of(model: nn.Module) -> dict[str, Any]:
    """Numbers, flags and words of modules and their configs, and the buffers' writes, by name."""
    settings, seen = dict[str, Any](), set[int]()
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor) and not buffer.is_inference():
                settings[f"{path}{name}"] = _Writes((id(buffer), buffer._version))
        config = vars(module).get("config")
        parts = [(path, module), (f"{path}config.", config)]
        for start, part in parts if id(config) not in seen else parts[:1]:
            for name, value in getattr(part, "__dict__", {}).items():
                if type(value) in _WORDS and name not in _MACHINERY:
                    settings[f"{start}{name}"] = value
        seen.add(id(config))
    return settings
