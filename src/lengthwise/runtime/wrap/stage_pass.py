"""A micro-batch on one stage of a pipeline: the model's stock forward runs, but only the stage's layers compute.

Layers before the stage pass their input on, and the last of them returns what the stage before sent, so that code
between layers computes with it. After the stage's last layer the forward ends, except on the last stage. A loss that
reads what a layer of an earlier stage passed on is refused in its backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.setting_names import as_option
from lengthwise.core.errors import InputError, Setting, errors_spelt

OF_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments of models of transformers, and fields of their configs, that ask for what each layer gives."""


class StageEndError(Exception):
    """Ends a forward after the last layer of its stage."""


@dataclass(eq=False, kw_only=True)
class StagedForward:
    """One micro-batch on this rank's stage, from its forward to its backward."""

    layers: range
    """The layers of the stage."""
    num_layers: int
    """Of the whole model."""
    receive: Callable[[Tensor], Tensor]
    """Gives what the stage before sent, in the shape of a tensor; called once."""
    input: Tensor | None = None
    """What the stage before sent, a leaf of autograd; None on the first stage, or before it was received."""
    output: Tensor | None = None
    """The hidden states after the stage; None on the last one, or before they were computed."""
    differentiate: Callable[[], None] | None = None
    """On the last stage, runs the backward of the loop's loss."""
    has_gradient: bool = False
    """Whether the gradient of the output was received from the next stage, whatever became of the backward."""
    is_begun: bool = False
    is_received: bool = False
    is_sent: bool = False
    """Whether the forward is over and its output on the way."""

    @property
    def is_first(self) -> bool:
        """Whether no stage is before this one."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.layers.stop == self.num_layers

    @property
    def is_only(self) -> bool:
        """Whether there is no other stage."""
        return self.is_first and self.is_last

    def begin(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Begin a forward of ``model``, called with ``arguments``.

        Raises:
            InputError: there was one before in this micro-batch, or what layers of other stages give is asked for.
        """
        config = getattr(model, "config", None)
        asked = next((name for name in OF_LAYERS if arguments.get(name, getattr(config, name, None))), None)
        if asked and not self.is_only:
            raise InputError(
                f"{asked}=True asks {type(model).__name__} for what each layer gives, and in a pipeline of several "
                f"stages other ranks compute some of them; plan with one stage ({Setting.MAX_STAGES}=1), or set it in "
                "the model's config before prepare"
            )
        if self.is_begun:
            raise InputError(
                "the model was called twice in a micro-batch of a pipeline with several stages, which send each other "
                f"the hidden states of one call; plan with one stage ({Setting.MAX_STAGES}=1)"
            )
        self.is_begun = True

    def skipped(self, layer: int, hidden_states: Tensor) -> Tensor:
        """What a layer before the stage returns: its input, without a way back to it."""
        if not (hidden_states.is_floating_point() and torch.is_grad_enabled()):
            return hidden_states
        passed_on: Tensor = _ElsewhereComputed.apply(hidden_states.detach().requires_grad_(), layer)
        return passed_on

    def received(self, like: Tensor) -> Tensor:
        """Receive the stage's input, in the shape and dtype of ``like``, as a leaf that requires a gradient."""
        self.input = self.receive(like.detach()).requires_grad_(torch.is_grad_enabled())
        return self.input

    def end(self, output: Any) -> None:
        """Raise :class:`StageEndError` with the output of the stage's last layer, except on the last stage."""
        if not self.is_last:
            self.output = hidden_states_in(output)
            raise StageEndError


class _ElsewhereComputed(torch.autograd.Function):
    """What a layer of another stage returns, whose gradient has no way to it."""

    @staticmethod
    def forward(ctx: Any, passed_on: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return passed_on.clone()

    @staticmethod
    @errors_spelt(as_option)
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(
            f"the loss reads what layer {ctx.layer} returned, which another rank computes in a pipeline of several "
            f"stages; plan with one stage ({Setting.MAX_STAGES}=1)"
        )


def hidden_states_in(output: Any) -> Tensor:
    """The hidden states in the output of a layer.

    Raises:
        InputError: it has other tensors beside them, which later layers or the head may use.
    """
    tensors = [value for value in (output if isinstance(output, tuple) else (output,)) if value is not None]
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return tensors[0]
    returned = f"{len(tensors)} values" if isinstance(output, tuple) else f"a {type(output).__name__}"
    raise InputError(
        f"a layer returns {returned}, and stages of a pipeline send each other hidden states alone; plan with one "
        f"stage ({Setting.MAX_STAGES}=1)"
    )
