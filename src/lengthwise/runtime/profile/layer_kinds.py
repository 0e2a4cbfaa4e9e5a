"""Which layers of a model are measured: one of each kind, after one that warms up; the mean stands for all layers.

Layers of one class may cost differently: every third one of ModernBERT attends to all tokens, others to a window, and a
hybrid has layers without attention. Two layers are of one kind if they have the same modules, parameters and plain
attributes, such as the size of a window.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.wrap.layer_lists import Layers

MOST_KINDS = 4
"""Kinds that are measured; layers of rarer ones count as those with the closest number of parameters."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers:
    """The layers that a profile computes, in their order, and the share of all layers that each stands for."""

    shares: Mapping[int, float]
    """By the number of the layer; 0 of one that only warms up."""
    num_layers: int
    """Of the whole model."""
    like_first: int
    """The layer that stands for those of the kind of layer 0."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layers that are computed."""
        return tuple(sorted(self.shares))

    def mean(self, values: Sequence[float]) -> float:
        """The mean over all layers of the model, from a value of each computed one."""
        return sum(self.shares[number] * value for number, value in zip(self.numbers, values, strict=True))

    def filled(self, values: Sequence[float]) -> list[float]:
        """``values`` of the computed layers, where one that only warms up has that of the other one of its kind."""
        first = values[self.numbers.index(self.like_first)]
        return [value if self.shares[number] else first for number, value in zip(self.numbers, values, strict=True)]

    def largest(self, values: Sequence[float]) -> float:
        """The largest value of a layer that stands for others."""
        return max(value for number, value in zip(self.numbers, values, strict=True) if self.shares[number])

    @contextmanager
    def pinned(self, gather: LayerGather | None) -> Iterator[None]:
        """Within, a rank has the weights of these layers, where weights are gathered by layer."""
        with ExitStack() as stack:
            for number in () if gather is None else self.numbers:
                shard = WeightShard(
                    first=number, end=number + 1, num_layers=self.num_layers, with_input=True, with_output=True
                )
                stack.enter_context(gather.pinned(shard))  # type: ignore[union-attr]
            yield


def measured_layers(layers: Layers, *, called: Collection[int] | None = None) -> MeasuredLayers:
    """Choose the layers to measure: of each kind the first, but for layer 0, which warms up where another will do.

    ``called``: layers that are all measured, for the model does not call each once; None: it does.
    """
    if called is not None:
        return MeasuredLayers(
            shares=dict.fromkeys(called, 1 / len(layers)), num_layers=len(layers), like_first=min(called)
        )
    kinds = _merged(kinds_of(layers), layers)
    shares, like_first = {0: 0.0}, 0
    for kind, count in Counter(kinds).items():
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        chosen = numbers[1] if numbers[0] == 0 and count > 1 else numbers[0]
        shares[chosen], like_first = count / len(kinds), chosen if numbers[0] == 0 else like_first
    return MeasuredLayers(shares=shares, num_layers=len(kinds), like_first=like_first)


def kinds_of(layers: Iterable[nn.Module]) -> list[int]:
    """The kind of each layer: the number of the first layer that is like it."""
    traits = [_traits(layer) for layer in layers]
    names = sorted(set().union(*traits))
    numbered = {name for name in names if _counts_layers([of_layer.get(name) for of_layer in traits])}
    keys = [tuple((name, of_layer.get(name)) for name in names if name not in numbered) for of_layer in traits]
    return [keys.index(key) for key in keys]


def _counts_layers(values: list[Any]) -> bool:
    """Whether a trait says which layer it is rather than what: it is another one in every layer."""
    if all(type(value) is int for value in values) and len({value - i for i, value in enumerate(values)}) == 1:
        return True
    if all(type(value) is str and str(i) in value for i, value in enumerate(values)):
        return len({value.replace(str(i), "#") for i, value in enumerate(values)}) == 1
    return len(values) > 2 and len(set(values)) == len(values)


def _traits(layer: nn.Module) -> dict[str, Any]:
    """The classes of a layer's modules, their plain attributes, and what its parameters are like."""
    traits: dict[str, Any] = {}
    for path, module in layer.named_modules():
        traits[f"{path} class"] = type(module)
        for name, value in vars(module).items():
            if value is None or isinstance(value, (bool, int, str)):
                traits[f"{path}.{name}"] = value
    for name, parameter in layer.named_parameters():
        traits[f"{name} tensor"] = (parameter.shape, parameter.dtype, parameter.requires_grad)
    return traits


def _merged(kinds: list[int], layers: Layers) -> list[int]:
    """``kinds`` with at most :data:`MOST_KINDS` of them."""
    frequent = [kind for kind, _ in Counter(kinds).most_common(MOST_KINDS)]
    sizes = {kind: sum(parameter.numel() for parameter in layers[kind].parameters()) for kind in set(kinds)}
    return [
        kind if kind in frequent else min(frequent, key=lambda other: abs(sizes[other] - sizes[kind])) for kind in kinds
    ]
