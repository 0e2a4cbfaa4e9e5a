"""Hooks that a loop registers within layers after ``prepare``, which stages of a pipeline were not compared with.

The forward of a stage ends within its last layer, so that a hook on this layer's gradient is not called there; and what
a hook collects of a forward is there on one stage alone, while a loss on the last one may read it.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules import module as hooks_of_all

from lengthwise.core.errors import InputError, Setting
from lengthwise.runtime.wrap.gradient_changes import is_ours


class LateHooks:
    """Knows the hooks within some layers from when it was made, and refuses others."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = {f"layer {number} ({type(layer).__name__})": layer for number, layer in enumerate(layers)}
        self._known = {key for key, _ in self._keys()}

    def check(self) -> None:
        """Raise ``InputError`` if a layer, a module in one, or torch for all modules has got a hook since."""
        late = next((where for key, where in self._keys() if key not in self._known), None)
        if late is not None:
            raise InputError(
                f"{late} has a hook that was registered after prepare, and stages of a pipeline were compared with the "
                "whole model without it; register it before, remove it for the forwards of a step, or plan with one "
                f"stage ({Setting.MAX_STAGES}=1)"
            )

    def _keys(self) -> Iterator[tuple[int, str]]:
        """The key of each hook, which torch gives no other one, and where it is."""
        for name, layer in self._layers.items():
            for key in layer._backward_hooks:  # of a module within a layer they are called as usual
                yield key, name
            for module in layer.modules():
                for key, hook in module._forward_hooks.items():
                    if not _is_of_transformers(hook):
                        yield key, name
        for hooks in (hooks_of_all._global_backward_hooks, hooks_of_all._global_forward_hooks):
            for key, hook in hooks.items():
                if not is_ours(hook):
                    yield key, "every module"


def _is_of_transformers(hook: object) -> bool:
    """Whether transformers registered a hook: for good, once a forward was asked for hidden states or attentions."""
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")
