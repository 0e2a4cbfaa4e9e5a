"""First weights of a model, each drawn or read when a rank takes its share of it: no rank holds the whole model."""

from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.base import FirstWeights, Transformer
from lengthwise.runtime.models.registry import empty_model, initial_value


class DrawnWeights:
    """Random weights, as :func:`~lengthwise.runtime.models.registry.build_model` draws them."""

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        self._num_layers, self._seed = spec.num_layers, seed
        self._shapes = {name: tuple(weight.shape) for name, weight in empty_model(spec).named_parameters()}

    def value(self, name: str) -> Tensor:
        """The weight called ``name``, in float32."""
        return initial_value(name, self._shapes[name], num_layers=self._num_layers, seed=self._seed)

    def identity(self) -> dict[str, Any]:
        """The seed: the values follow from it."""
        return {"seed": self._seed}


def model_to_fill(
    spec: ModelSpec, weights: FirstWeights, *, dtype: torch.dtype, device: torch.device | str
) -> Transformer:
    """Build the model of ``spec`` on ``device`` without memory for its weights, which read as NaN.

    :class:`~lengthwise.runtime.state.sharded.ShardedState` takes each rank's share from ``weights``.

    Raises:
        InputError: no model of this family, or sizes that its family cannot have.
    """
    model = empty_model(spec, dtype=dtype)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            absent = torch.full((), torch.nan, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(absent.expand(weight.shape)))
    model.first_weights = weights
    return model
