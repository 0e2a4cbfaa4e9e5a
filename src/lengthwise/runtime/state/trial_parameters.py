"""The parameters that an optimizer is tried on: some of the model's own, with few numbers for the time of the trial.

They are the model's own objects, as an optimizer may tell them apart by identity or by attributes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.runtime.state.borrowed_parameters import borrowed

SHAPES = {1: ((3,), (4,)), 2: ((2, 3), (3, 2))}
"""Of the parameters that are tried, by their number of dimensions: two of each kind differ."""
_LEAST = 2
"""Parameters of each kind that are tried."""
_MOST = 32
"""Parameters of each number of dimensions that are tried at most."""
MOST_NUMBERS = 1 << 20
"""Numbers of all parameters that are tried, up to which a trial notes their values on the way."""
_MOST_NEIGHBOURS = 64
"""Parameters that are tried for what two of them have to do with one another."""


class TrialParameters:
    """All parameters of an optimizer, and the few of them that it is tried on."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        """Without ``parameters``, two matrices and two vectors are."""
        shapes = [shape for shapes in SHAPES.values() for shape in shapes]
        self.all = list(parameters) or [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.are_of_model = bool(parameters)
        self.tried: list[nn.Parameter] = []
        self.shapes: list[tuple[int, ...]] = []

    @property
    def decaying(self) -> list[nn.Parameter]:
        """All parameters of two dimensions or more."""
        return [parameter for parameter in self.all if parameter.dim() > 1]

    @property
    def others(self) -> list[nn.Parameter]:
        """All parameters of fewer dimensions."""
        return [parameter for parameter in self.all if parameter.dim() <= 1]

    def choose_kinds(self) -> None:
        """Choose small parameters of each number of dimensions and set of attributes."""
        self._choose([self.all])

    def choose(self, made: torch.optim.Optimizer) -> None:
        """Choose small parameters of each group of ``made``, of each number of dimensions and set of attributes."""
        self._choose([group["params"] for group in made.param_groups])

    def _choose(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        groups = {id(parameter): position for position, part in enumerate(parts) for parameter in part}
        there = [parameter for parameter in self.all if id(parameter) in groups and parameter.numel()]
        eligible = [parameter for parameter in there if parameter.dim() in SHAPES] or there
        numbers: Counter[Any] = Counter()
        self.tried, self.shapes = [], []
        for parameter in sorted(eligible, key=lambda x: (-x.dim(), x.numel())):
            kind = (groups[id(parameter)], parameter.dim(), tuple(sorted(vars(parameter))))
            if numbers[kind] < _LEAST and numbers[parameter.dim()] < _MOST:
                numbers.update((kind, parameter.dim()))
                shapes = SHAPES.get(parameter.dim(), ((2,) * parameter.dim(),))
                self.shapes.append(shapes[numbers[kind] % len(shapes)])
                self.tried.append(parameter)

    def keep_shapes(self) -> None:
        """Try parameters in the shapes that they have."""
        self.shapes = [tuple(parameter.shape) for parameter in self.tried]

    def keep_shapes_if_small(self) -> bool:
        """Try parameters in the shapes that they have, if these are small, and return whether they are."""
        if is_small := sum(parameter.numel() for parameter in self.tried) <= MOST_NUMBERS:
            self.keep_shapes()
        return is_small

    def of_layers(self) -> "TrialParameters":
        """A trial of neighbouring parameters: all of the model, or the first and the last of it."""
        trial = TrialParameters(self.all)
        there = [parameter for parameter in self.all if parameter.numel()]
        half = _MOST_NEIGHBOURS // 2
        trial.tried = there if len(there) <= _MOST_NEIGHBOURS else [*there[:half], *there[-half:]]
        trial.shapes = [(3,) * parameter.dim() for parameter in trial.tried]
        return trial

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within, all parameters have values for a trial: zeros, which take no memory, on the CPU."""
        shapes = {id(parameter): shape for parameter, shape in zip(self.tried, self.shapes)}
        nothing, values = torch.zeros(()), list[Tensor | None]()
        are_kept = all(tuple(parameter.shape) == shapes[id(parameter)] for parameter in self.tried)
        for parameter in self.all:
            dim = parameter.dim()
            other = tuple(parameter.shape) if are_kept else SHAPES.get(dim, ((2,) * dim,))[0]
            values.append(nothing.expand(shapes.get(id(parameter), other)))
        with borrowed(self.all, values):
            yield

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Give some of the tried parameters values, by their numbers, and take the gradients of all."""
        for parameter in self.tried:
            parameter.grad = None
        for index, value in values.items():
            self.tried[index].data = value

    def all_but(self, indices: Sequence[int]) -> set[int]:
        """The identities of all parameters but those with these numbers among the ones that are tried."""
        return {id(parameter) for parameter in self.all} - {id(self.tried[index]) for index in indices}
