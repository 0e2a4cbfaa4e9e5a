"""Parameters of a less precise dtype than others of the same model, such as bfloat16 layers beside a float32 adapter.

The flat buffers of a state have one dtype, to which all of its parameters convert without loss. A parameter of another
one is a cast of its place there, made whenever values come; its gradients are added up in the buffers' dtype.
"""

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from lengthwise.runtime.state.table import ParameterTable


def common_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The dtype that all of them convert to without loss."""
    return reduce(torch.promote_types, {parameter.dtype for parameter in parameters})


class NarrowParameters:
    """The parameters of a table that are casts of their places in buffers of a wider dtype."""

    def __init__(self, named: Mapping[str, nn.Parameter], table: ParameterTable, dtype: torch.dtype) -> None:
        """``dtype``: of the buffers."""
        self.dtypes = {name: parameter.dtype for name, parameter in named.items() if parameter.dtype != dtype}
        self._units = {name: table.slots[name].unit for name in self.dtypes}
        self._casts: dict[str, tuple[Tensor, Tensor]] = {}
        """Cast and place of each that is held."""

    def attach(self, name: str, place: Tensor) -> Tensor:
        """What the parameter's values are, of those that come to ``place``: that itself, or its cast."""
        if name not in self.dtypes:
            return place
        cast = torch.empty_like(place, dtype=self.dtypes[name])
        self._casts[name] = cast, place
        return cast

    def refresh(self, unit: int | None = None) -> None:
        """Take what has come of ``unit``; None: of all."""
        for name, (cast, place) in self._casts.items():
            if unit in (None, self._units[name]):
                cast.copy_(place)

    def write_back(self) -> None:
        """Set places to what was written to their casts since."""
        for cast, place in self._casts.values():
            place.copy_(torch.where(cast != place.to(cast.dtype), cast.to(place.dtype), place))

    def release(self) -> None:
        """Forget the casts."""
        self._casts.clear()
