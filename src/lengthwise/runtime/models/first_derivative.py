"""Backwards that have no derivative of their own, and say so to a loop that asks for it by ``create_graph=True``."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lengthwise.config.setting_names import as_option
from lengthwise.core.errors import InputError, Setting, errors_spelt

Backward = Callable[..., Any]

SHARED = f"let each rank compute whole sequences: {Setting.MAX_DEGREE}=1, without share_prefixes or slices"
"""What to do where ranks, or slices, share the attention of a sequence."""
OWN_MODEL = "take a model of torch or transformers, to which prepare leaves its own operations"
"""What to do where a model of this library is differentiated."""


def first_derivative_only(what: str, instead: str = OWN_MODEL) -> Callable[[Backward], Backward]:
    """Decorate the backward of a ``torch.autograd.Function`` for ``what`` that cannot be differentiated again.

    torch's ``once_differentiable`` refuses in the second backward; this refuses when its graph would be made, so that
    all ranks that share a sequence refuse at the same place. ``instead``: what works.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def refusing(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                with errors_spelt(as_option):
                    raise InputError(
                        f"create_graph=True asks for second derivatives of {what}, which has first ones alone; leave "
                        f"it out where the gradient is not differentiated again, or {instead}"
                    )
            return backward(ctx, *gradients)

        refusing.refuses_create_graph = True  # type: ignore[attr-defined]
        return refusing

    return decorate
