"""Base of the Transformers: embedding, layers, final norm and loss over one pack.

T tokens of the pack, t of them on this rank, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.activation_recompute import recomputed
from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.execution import KEEP_ALL, ActivationPlan, Execution, OneDevice
from lengthwise.runtime.models.operators import Operators, Tables


class RunLayer(Protocol):
    """Runs one layer: eagerly, or by compiled code."""

    def __call__(self, layer: nn.Module, x_tD: Tensor, /, operators: Operators) -> Tensor:
        """Compute the layer's output ``[t, D]``."""
        ...


def run_eagerly(layer: nn.Module, x_tD: Tensor, /, operators: Operators) -> Tensor:
    """Run a layer as it is, not compiled."""
    out_tD: Tensor = layer(x_tD, operators)
    return out_tD


class FirstWeights(Protocol):
    """The weights that a model starts with, by name."""

    def value(self, name: str) -> Tensor:
        """One whole weight, in host memory."""
        ...

    def identity(self) -> dict[str, Any]:
        """What is the same on ranks that start with the same weights."""
        ...


class Transformer(nn.Module, ABC):
    """Embedding, layers, norm, head. Calling it gives the *sum* of the losses of a pack.

    A model knows nothing of devices: what needs more than this rank's tokens and weights it asks of an
    :class:`~lengthwise.runtime.models.execution.Execution`.
    """

    layers: nn.ModuleList
    inputs: frozenset[str] = frozenset({"embedding"})
    """Weights that come before the first layer."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        self.run_layer: RunLayer = run_eagerly
        self.first_weights: FirstWeights | None = None
        """Where weights come from; None: the parameters have them."""

    @abstractmethod
    def views(self, cu_seqlens: tuple[int, ...]) -> tuple[AttentionView, ...]:
        """The views of a pack that layers attend in, in turn."""

    @abstractmethod
    def tables(self, offsets: np.ndarray) -> Tables | None:
        """Rotary tables of tokens at ``offsets`` [t] of their sequences; None if it needs none."""

    @abstractmethod
    def embed(self, execution: Execution) -> Tensor:
        """Input of the first layer, ``[t, D]``."""

    @abstractmethod
    def norm(self, x_tD: Tensor) -> Tensor:
        """Final norm: the last layer's output to the input of the head, ``[t, D]``."""

    @property
    @abstractmethod
    def output(self) -> tuple[Tensor, Tensor | None]:
        """Weights of the output head, ``[V, D]``, and its bias ``[V]`` or None: logits = norm @ head^T + bias."""

    @property
    def num_units(self) -> int:
        """Number of units, whose weights are gathered and freed together: the input, each layer, the output."""
        return len(self.layers) + 2

    def unit_of(self, name: str) -> int:
        """The unit, counted from 0, of the weight called ``name``."""
        if name.startswith("layers."):
            return int(name.split(".")[1]) + 1
        return 0 if name in self.inputs else self.num_units - 1

    def forward(
        self,
        tokens_T: Tensor,
        cu_seqlens: tuple[int, ...],
        targets_T: Tensor,
        *,
        recompute: tuple[bool, ...] | None = None,
    ) -> Tensor:
        """Sum over the targets of the pack of their cross-entropy: a scalar.

        Args:
            tokens_T: int64 token ids.
            cu_seqlens: offsets of the sequence boundaries, from 0 to T.
            targets_T: see :mod:`lengthwise.runtime.models.targets`.
            recompute: one flag per layer; True keeps only the layer's input and computes it again in the backward.
        """
        activations = ActivationPlan(recompute=recompute or ())
        return self.run(self.on_one_device(tokens_T, cu_seqlens, targets_T, activations=activations))

    def hidden(
        self, tokens_T: Tensor, cu_seqlens: tuple[int, ...], *, recompute: tuple[bool, ...] | None = None
    ) -> Tensor:
        """Output of the last layer, before the final norm: ``[T, D]``."""
        activations = ActivationPlan(recompute=recompute or ())
        return self.run_layers(self.on_one_device(tokens_T, cu_seqlens, None, activations=activations))

    def logits(self, tokens_T: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
        """Logits ``[T, V]``, all at once, for evaluation and tests."""
        head_VD, bias_V = self.output
        logits_TV = self.norm(self.hidden(tokens_T, cu_seqlens)) @ head_VD.T
        return logits_TV if bias_V is None else logits_TV + bias_V

    def run(self, execution: Execution, x_tD: Tensor | None = None) -> Tensor:
        """Run the layers of ``execution``, from ``x_tD`` or, with the first layer among them, from this rank's tokens.

        Returns:
            The last layer's output ``[t, D]``; after the last layer of all, the sum of the losses of this rank's
            tokens.
        """
        x_tD = self.run_layers(execution, x_tD)
        if execution.layers.stop < len(self.layers):
            return x_tD
        x_tD = execution.watch.enter(self.num_units - 1, x_tD)
        return execution.cross_entropy(self.norm(x_tD), *self.output)

    def run_layers(self, execution: Execution, x_tD: Tensor | None = None) -> Tensor:
        """Output of the last of the layers of ``execution`` for the tokens of this rank: ``[t, D]``."""
        first = execution.layers.start if x_tD is not None else -1
        if x_tD is None:
            execution.watch.need(0)
            x_tD = self.embed(execution)
        for number in execution.layers:
            layer = self.layers[number]
            operators = execution.operators(number)
            run = partial(self.run_layer, layer, operators=operators)
            if number == first:  # nothing of this rank comes after it in the backward
                execution.watch.need(number + 1)
            else:
                x_tD = execution.watch.enter(number + 1, x_tD)
            with execution.saving(number, layer.parameters()):
                x_tD = recomputed(run, x_tD, operators.kept_attention) if execution.is_recomputed(number) else run(x_tD)
        return x_tD

    def on_one_device(
        self,
        tokens_T: Tensor,
        cu_seqlens: tuple[int, ...],
        targets_T: Tensor | None,
        *,
        activations: ActivationPlan = KEEP_ALL,
    ) -> OneDevice:
        """The execution of a whole pack on this rank."""
        num_flags = len(activations.recompute)
        assert num_flags in (0, len(self.layers)), f"{num_flags} recompute flags for {len(self.layers)} layers"
        return OneDevice(
            tokens_T, targets_T, views=self.views(cu_seqlens), tables=self.tables, layers=range(len(self.layers)),
            activations=activations,
        )  # fmt: skip


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Make a weight without values."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
