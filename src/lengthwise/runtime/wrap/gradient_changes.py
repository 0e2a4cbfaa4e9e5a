"""What may make a backward more than linear: hooks on gradients, and autograd functions of users.

Losses of micro-batches are weighed by the targets of the step. Where labels leave out some that nobody has counted
yet, the weights are off by one factor, which the update corrects; a gradient that was clamped on the way is then
another one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.overrides import TorchFunctionMode

LINEAR = ("torch.", "lengthwise.")
"""Packages whose functions have linear backwards."""


def hooks_on_gradients(model: nn.Module) -> set[str]:
    """Hooks on gradients of a model's modules and parameters, by the name of what has them."""
    hooks = set[str]()
    if hooks_of_all._global_backward_hooks or hooks_of_all._global_backward_pre_hooks:
        hooks.add("a hook on the gradients of all modules")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            hooks.add(f"a hook on the gradients of {name or type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            hooks.add(f"a hook on the gradient of {name}")
    return hooks


def is_ours(hook: Callable[..., object]) -> bool:
    """Whether this library registered a hook."""
    function = hook.func if isinstance(hook, partial) else hook
    return (getattr(function, "__module__", None) or "").startswith("lengthwise.")


def has_hook_after_accumulation(parameter: Tensor, *, of_library: bool = False) -> bool:
    """Whether a hook of others, or of this library, runs when the gradient of a parameter has been added up."""
    with torch._C.DisableTorchFunctionSubclass():  # weights that are elsewhere have hooks, too
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(is_ours(hook) is of_library for hook in hooks.values())


def graph_of(tensor: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph that made a tensor, each once."""
    seen, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that get gradients of their own in the backward of a tensor."""
    for node in graph_of(tensor):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


class ObserveGradientChanges(TorchFunctionMode):
    """Within, notes the hooks that a forward registers on gradients of tensors, and its own autograd functions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        """What may be more than linear, by name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Note a hook, and call the function."""
        if func is Tensor.register_hook and not is_ours(args[1]):
            self.found.add("a hook on the gradient of a tensor")
        return func(*args, **(kwargs or {}))

    def of(self, loss: Tensor) -> set[str]:
        """All that was noted, with the autograd functions of a loss that are neither torch's nor this library's."""
        for node in graph_of(loss):
            function = getattr(type(node), "_forward_cls", None)
            if function is not None and not f"{function.__module__}.".startswith(LINEAR):
                self.found.add(f"the autograd function {function.__qualname__}")
        return self.found
