"""What a loop changes of a model after ``prepare`` has compared packs with it: hooks, and forwards that are replaced or
compiled.

Hooks that only look are let through. One that changes what a module takes or gives, which might mix the tokens of a
pack, and one on gradients that is not linear, which is called with a part of a step's gradient, are refused; so is one
on gradients of a module that mixes tokens.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.compiled_modules import is_compiled
from lengthwise.runtime.wrap.forward_patch import defined_forward
from lengthwise.runtime.wrap.gradient_changes import has_hook_after_accumulation, is_ours

Hook = Callable[..., Any]
MOST_TRIED = 1 << 26
"""Numbers of the largest gradients on which it is tried whether a hook is linear."""
ROUNDINGS = 64
"""Units in the last place of the largest number by which a linear hook's results may differ."""


class LateChanges:
    """Knows hooks and forwards of a model from when it was made, and refuses others."""

    def __init__(self, model: nn.Module, *, is_plain: Callable[[], bool], own_state: Collection[str] = ()) -> None:
        """``is_plain``: whether the model computes as its user's own at the moment, with whatever hooks; ``own_state``:
        what its forwards change themselves, among it modules that they put in the place of others.
        """
        self._model, self._is_plain, self._own_state = model, is_plain, own_state
        every = (*self._hooks(), *self._on_gradients(), *self._on_gradients_of_modules())
        self._compared = {id(hooks[key]): hooks[key] for _, hooks, key in every}
        """Hooks that packs were compared with; they are kept, so that no other gets their id."""
        self._forwards = {name: _forwards_of(module) for name, module in model.named_modules()}
        self._compiled = {part for part, _ in _compiled_parts(model)}
        self._num_registered, self._step = RemovableHandle.next_id, -1
        self._is_muted = False

    @contextmanager
    def muted(self, step: int) -> Iterator[None]:
        """Within, new hooks are not called: the model is compared, and what they count or record is of training alone.

        Raises:
            InputError: a forward was replaced or compiled.
        """
        self.check(step)
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def check(self, step: int) -> None:
        """Watch what new hooks return; once a step, raise ``InputError`` if a forward was replaced or compiled."""
        if step != self._step:
            self._step = step
            self._check_compiled()
            self._check_forwards()
        if RemovableHandle.next_id != self._num_registered:
            self._num_registered = RemovableHandle.next_id
            self._check_after_accumulation()
            for watched, every in (
                (self._watched, self._hooks),
                (self._watched_gradient, self._on_gradients),
                (self._watched_gradients, self._on_gradients_of_modules),
            ):
                for name, hooks, key in list(every()):
                    if id(hooks[key]) not in self._compared and not is_ours(hooks[key]):
                        hooks[key] = watched(name, hooks[key])

    def _hooks(self) -> Iterator[tuple[str, dict[int, Hook], int]]:
        """Hooks on forwards: the module's name, and where the hook is."""
        for name, module in self._model.named_modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                        yield name or type(module).__name__, hooks, key

    def _watched(self, name: str, hook: Hook) -> Hook:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_muted:
                return None
            result = hook(*args, **kwargs)
            if result is None or _is_given(result, args) or self._is_plain():
                return result
            raise InputError(
                f"a forward hook on {name}, registered after prepare, changes what the module takes or gives, and "
                "packs were compared with the model without it; register it before prepare, or let it return None"
            )

        return watched

    def _check_compiled(self) -> None:
        for part, name in _compiled_parts(self._model):
            if part not in self._compiled:
                raise InputError(
                    f"{name} was compiled after prepare, and compiled code does not ask which tokens of a pack belong "
                    "together; leave torch.compile out, and let prepare(..., compile=True) compile the layers"
                )

    def _check_forwards(self) -> None:
        for name, module in self._model.named_modules():
            before, now = self._forwards.get(name), _forwards_of(module)
            if f"{name}.__class__" in self._own_state:
                continue
            if before is not None and any(_is_replaced(a, b) for a, b in zip(before, now)):
                raise InputError(
                    f"the forward of {name or type(module).__name__} was replaced after prepare, and packs were "
                    "compared with the model as it was; replace it before prepare, or prepare again"
                )

    def _check_after_accumulation(self) -> None:
        for name, parameter in self._model.named_parameters():
            if has_hook_after_accumulation(parameter):
                raise InputError(
                    f"{name} has a hook that runs after its gradient was accumulated, registered after prepare, and "
                    "here that is once for each micro-batch, on a part of the step's gradient; remove it "
                    "(register_post_accumulate_grad_hook)"
                )

    def _on_gradients(self) -> Iterator[tuple[str, dict[int, Hook], int]]:
        """Hooks on gradients: the parameter's name, and where the hook is."""
        for name, parameter in self._model.named_parameters():
            hooks = parameter._backward_hooks or {}
            for key in hooks:
                yield name, hooks, key

    def _on_gradients_of_modules(self) -> Iterator[tuple[str, dict[int, Hook], int]]:
        """Hooks on gradients of what modules take or give: the module's name, and where the hook is."""
        for name, module in self._model.named_modules():
            for hooks in (module._backward_pre_hooks, module._backward_hooks):
                for key in hooks:
                    yield name or type(module).__name__, hooks, key

    def _watched_gradients(self, name: str, hook: Hook) -> Hook:
        is_of_tokens = False

        def watched(module: nn.Module, *gradients: Any) -> Any:
            nonlocal is_of_tokens
            result = None if self._is_muted else hook(module, *gradients)
            if result is None or is_of_tokens or self._is_plain() or _is_one_of(result, gradients):
                return result
            if not (is_of_tokens := _is_of_tokens(partial(hook, module), gradients)):
                raise InputError(
                    f"a backward hook on {name}, registered after prepare, changes gradients by more than a factor for "
                    "each token, and packs were compared with the model without it; register it before prepare, or let "
                    "it return None"
                )
            return result

        return watched

    def _watched_gradient(self, name: str, hook: Hook) -> Hook:
        is_linear = False

        def watched(gradient: Tensor) -> Tensor | None:
            nonlocal is_linear
            result = None if self._is_muted else hook(gradient)
            if result is None or result is gradient or is_linear:
                return result
            if not (is_linear := _is_linear(hook, gradient)):
                raise InputError(
                    f"a hook on the gradient of {name}, registered after prepare, is not linear, and it is called with "
                    "a part of a step's gradient; change gradients once a step, in the optimizer, or clip their norm "
                    "by clip_norm"
                )
            return result

        return watched


def _is_given(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether a hook returns what it was given: inputs, with keyword arguments or without, or outputs."""
    returned = pytree.tree_leaves(result)
    for values in (args[-1], args[-2:]):
        leaves = pytree.tree_leaves(values)
        if len(leaves) == len(returned) and all(a is b for a, b in zip(leaves, returned)):
            return True
    return False


def _forwards_of(module: nn.Module) -> tuple[Any, Any]:
    return vars(module).get("forward"), defined_forward(type(module))


def _compiled_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What torch.compile gave for modules and their methods: a name of each, and what an error calls it."""
    for path, module in model.named_modules():
        name = path or type(module).__name__
        if is_compiled(module) or module._compiled_call_impl is not None:
            yield f"{path}.", name
        for key, value in vars(module).items():
            if isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value):
                yield f"{path}.{key}", f"{key} of {name}"


def _is_replaced(before: Any, now: Any) -> bool:
    """Whether a user put another forward in the place of one, and not this library, which also takes its own away."""
    is_back = is_ours(before) and (now is None or now is getattr(before, "original", None))
    return before is not now and not is_ours(now) and not is_back


def _is_linear(hook: Hook, gradient: Tensor) -> bool:
    """Whether a hook changes a sum as it changes its terms, tried on random numbers like a gradient."""
    if gradient.numel() > MOST_TRIED:
        return True
    generator = torch.Generator(gradient.device).manual_seed(0)
    first, second = (
        torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype, device=gradient.device) for _ in range(2)
    )

    def changed(given: Tensor) -> Tensor:
        result = hook(given.clone())
        return given if result is None else result

    with torch.no_grad():
        try:
            of_sum, *of_terms = changed(first + second), changed(first), changed(second)
            difference, largest = of_sum - sum(of_terms), max(float(made.abs().max()) for made in of_terms)
        except Exception:  # whatever other people's functions raise
            return False
    return bool(difference.abs().max() <= ROUNDINGS * torch.finfo(gradient.dtype).eps * largest)


def _is_of_tokens(hook: Hook, gradients: tuple[Any, ...]) -> bool:
    """Whether a hook on a module changes a sum of gradients as its terms, and each token's by itself.

    Tried on random numbers like the gradients, [1, t, ...] or [t, ...].
    """
    leaves = [leaf for leaf in pytree.tree_leaves(gradients) if _is_gradient(leaf)]
    if not leaves or sum(leaf.numel() for leaf in leaves) > MOST_TRIED:
        return True
    generator = torch.Generator(leaves[0].device).manual_seed(0)

    def drawn() -> Any:
        def like(leaf: Any) -> Any:
            if not _is_gradient(leaf):
                return leaf
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device=leaf.device)

        return pytree.tree_map(like, gradients)

    def of_first_half(leaf: Any) -> Any:
        if not _is_gradient(leaf) or not leaf.dim():  # that of a loss belongs to no token
            return leaf
        axis = 1 if leaf.dim() > 1 and len(leaf) == 1 else 0
        places = torch.arange(leaf.shape[axis], device=leaf.device).view(-1, *[1] * (leaf.dim() - axis - 1))
        return leaf * (2 * places < leaf.shape[axis])

    def changed(values: Any) -> list[Tensor]:
        result = hook(*pytree.tree_map_only(Tensor, torch.clone, values))
        return [leaf for leaf in pytree.tree_leaves(result) if _is_gradient(leaf)]

    first, second = drawn(), drawn()
    both = pytree.tree_map(lambda a, b: a + b if _is_gradient(a) else a, first, second)
    with torch.no_grad():
        try:
            of_sum, of_first, of_second = changed(both), changed(first), changed(second)
            of_half = changed(pytree.tree_map(of_first_half, first))
            return all(
                _is_near(total, a + b, a) and _is_near(half, of_first_half(a), a)
                for total, a, b, half in zip(of_sum, of_first, of_second, of_half, strict=True)
            )
        except Exception:  # whatever other people's functions raise
            return False


def _is_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_one_of(result: Any, gradients: tuple[Any, ...]) -> bool:
    """Whether a hook returns the gradients of what a module takes, or gives, as they are."""
    returned = pytree.tree_leaves(result)
    return any(
        len(leaves) == len(returned) and all(a is b for a, b in zip(leaves, returned))
        for leaves in map(pytree.tree_leaves, gradients)
    )


def _is_near(value: Tensor, expected: Tensor, like: Tensor) -> bool:
    """Whether two results differ by rounding of numbers ``like`` these."""
    limit = ROUNDINGS * torch.finfo(like.dtype).eps * float(like.abs().max())
    return bool((value - expected).abs().max() <= limit)
