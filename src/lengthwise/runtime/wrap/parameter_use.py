"""Which units of parameters a forward uses at which position, as the forward of a model was observed to do."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lengthwise.runtime.wrap.layer_hooks import HookedLayers
from lengthwise.runtime.wrap.structure import ModelStructure


class ParameterUse(TorchFunctionMode):
    """Notes, while it is active, every call of torch that computes with a parameter."""

    def __init__(self, structure: ModelStructure, layers: HookedLayers) -> None:
        super().__init__()
        self._unit_of = _units_by_id(structure)
        self._layers, self._num_units = layers, structure.num_layers + 2
        self._used: list[set[int]] = [set() for _ in range(self._num_units)]

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list):  # and not a shape or a dtype alone
            position, last = self._layers.position, self._num_units - 1
            after = min(position + 1, last) if self._layers.is_between else position
            for value in pytree.tree_iter((args, kwargs)):
                unit = self._unit_of.get(id(value))
                if unit is not None:
                    self._used[position].add(unit)
                    self._used[after].add(unit)  # the backward of what is between layers is that of the next one
        return result

    def by_position(self, deferred: Iterable[nn.Parameter]) -> tuple[frozenset[int], ...]:
        """The units that each position uses; those that no call was seen to use are used where their modules are.

        ``deferred``: parameters that are used after the layers where nobody sees it.
        """
        last = self._num_units - 1
        used = [set(units) for units in self._used]
        used[last] |= {self._unit_of[id(parameter)] for parameter in deferred if id(parameter) in self._unit_of}
        for unit in set(self._unit_of.values()) - set().union(*used):
            for position in (unit, last) if unit == 0 else (unit,):
                used[position].add(unit)
        return tuple(frozenset(units) for units in used)


def units_of_modules(structure: ModelStructure) -> tuple[frozenset[int], ...]:
    """The units that each position may use if layers use their own parameters, and any those outside of all layers."""
    unit_of = _units_by_id(structure)
    outside = frozenset({0, structure.num_layers + 1})
    units_of_layers = [
        frozenset(unit_of[id(parameter)] for parameter in layer.parameters() if id(parameter) in unit_of)
        for layer in structure.layers
    ]
    return (outside, *(outside | units for units in units_of_layers), outside)


def _units_by_id(structure: ModelStructure) -> dict[int, int]:
    """The unit of each parameter that can be gathered, by its identity."""
    parameters = dict(structure.model.named_parameters())
    tables = (structure.table(), *structure.frozen_tables())
    return {id(parameters[name]): slot.unit for table in tables for name, slot in table.slots.items()}
