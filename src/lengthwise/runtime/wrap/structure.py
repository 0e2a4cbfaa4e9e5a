"""Locate the layer stack of an ``nn.Module`` and group its parameters by layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.state.narrow_parameters import common_dtype
from lengthwise.runtime.state.table import ParameterTable
from lengthwise.runtime.wrap.layer_lists import Layers, find_layers

_SHARDED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of frozen parameters that can be gathered by layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStructure:
    """A model with its layers."""

    model: nn.Module
    layers_name: str
    """The path of the list of layers in the model; of several lists, their paths."""
    layers_by_path: tuple[tuple[str, nn.Module], ...]
    """The layers and their paths in the model, in order; a module that is called several times as often."""

    @cached_property
    def layers(self) -> Layers:
        """The layers, in order."""
        return tuple(layer for _, layer in self.layers_by_path)

    @property
    def is_order_guessed(self) -> bool:
        """Whether the layers are of several lists or parts of modules, which the forward may call in another order."""
        are_of_one_list = all(path.rpartition(".")[0] == self.layers_name for path, _ in self.layers_by_path)
        return not are_of_one_list and len(set(self.layers)) == len(self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers_by_path)

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a module or parameter is in, by its path; None: it is in none."""
        while name not in self._numbers and name:
            name = name.rpartition(".")[0]
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {path: number for number, (path, _) in enumerate(self.layers_by_path)}

    @cached_property
    def is_hugging_face(self) -> bool:
        """Whether attention goes through the registry of transformers."""
        return hasattr(self.model, "set_attn_implementation") and hasattr(self.model, "config")

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, each once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def check_parameters(self) -> None:
        """Check that there are trained parameters, of real numbers.

        Raises:
            InputError: there are none, or one is complex.
        """
        complex_name = next((name for name, value in self.parameters.items() if value.is_complex()), None)
        if complex_name is not None:
            raise InputError(
                f"{complex_name} of {type(self.model).__name__} is complex, and gradients and the optimizer's state "
                "are real numbers: hold it as torch.view_as_real(values); the forward takes torch.view_as_complex of it"
            )
        if not self.parameters:
            raise InputError(
                f"{type(self.model).__name__} trains none of its {len(list(self.model.parameters())):,} parameters: "
                "requires_grad is False for all of them. Load an adapter with PeftModel.from_pretrained(..., "
                "is_trainable=True), or call requires_grad_(True) on what is to be trained"
            )

    @property
    def computed_dtype(self) -> torch.dtype:
        """The dtype of its first trained parameter; of a model that trains none, of its first parameter of floats."""
        floats = (parameter for parameter in self.model.parameters() if parameter.is_floating_point())
        first = next(iter(self.parameters.values()), None)
        first = next(floats, None) if first is None else first
        return torch.get_default_dtype() if first is None else first.dtype

    def precision(self, autocast: torch.dtype | None = None) -> tuple[torch.dtype | None, ...]:
        """What a forward computes in now: the dtype of its weights, the default, that of ``autocast``, and what a cast
        to float32 gives, which is float64 while packs are compared.
        """
        return self.computed_dtype, torch.get_default_dtype(), autocast, torch.empty(0).float().dtype

    def table(self) -> ParameterTable:
        """Group trained parameters into units: before the layers, each layer, after them."""
        return self._table_of(self.parameters)

    def frozen_tables(self) -> list[ParameterTable]:
        """Group frozen parameters into the same units, one table for each dtype; quantized ones are in none."""
        names_of_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in self.model.named_parameters():
            is_plain = type(parameter) in (nn.Parameter, AbsentParameter) and parameter.layout == torch.strided
            if not parameter.requires_grad and is_plain and parameter.dtype in _SHARDED_DTYPES:
                names_of_dtype.setdefault(parameter.dtype, []).append(name)
        return [self._table_of(names) for names in names_of_dtype.values()]

    def unit_frozen_bytes(self) -> tuple[int, ...]:
        """The bytes of each unit of the :meth:`frozen_tables`, and of trained parameters that are casts of others."""
        parameters, sizes = dict(self.model.named_parameters()), [0] * (self.num_layers + 2)
        for table in self.frozen_tables():
            for name, slot in table.slots.items():
                sizes[slot.unit] += prod(slot.shape) * parameters[name].element_size()
        common, slots = common_dtype(self.parameters.values()), self.table().slots
        for name, parameter in self.parameters.items():
            if parameter.dtype != common:
                sizes[slots[name].unit] += prod(slots[name].shape) * parameter.element_size()
        return tuple(sizes)

    def move_rest(self, device: torch.device) -> None:
        """Move to a device what cannot be gathered by layer: buffers, and frozen parameters that are in no table."""
        tables = (self.table(), *self.frozen_tables())
        gathered = {name for table in tables for name in table.slots}
        for name, parameter in self.model.named_parameters():
            if name not in gathered:
                parameter.data = parameter.data.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def _table_of(self, names: Iterable[str]) -> ParameterTable:
        units, seen = {}, False
        for name, _ in self.model.named_parameters():
            number = self.layer_of(name)
            seen = seen or number is not None
            units[name] = number + 1 if number is not None else self.num_layers + 1 if seen else 0
        return ParameterTable.of_units(self.model, {name: units[name] for name in names}, self.num_layers + 2)

    def constants(self) -> Iterator[Tensor]:
        """Parameters, buffers and other tensors that modules keep, such as tables of positions."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for module in self.model.modules():
            yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def find_structure(
    model: nn.Module, *, layers: str | None = None, of_any_class: bool = False, is_trained: bool = False
) -> ModelStructure:
    """Find a model's layers, as :func:`find_layers` does.

    Raises:
        InputError: there are none, or several lists may be meant; or first of all, the model is an encoder with a
            decoder. It is to be trained, and its parameters cannot be.
    """
    if not of_any_class:
        _check_no_decoder(*hugging_face_models(model))
    name, layers_by_path = find_layers(model, name=layers, of_any_class=of_any_class)
    structure = ModelStructure(model=model, layers_name=name, layers_by_path=tuple(layers_by_path))
    if is_trained:
        structure.check_parameters()
    return structure


def _check_no_decoder(*parts: nn.Module) -> None:
    """Raise ``InputError`` if one of some models of transformers is an encoder with a decoder."""
    for part in parts:
        if getattr(getattr(part, "config", None), "is_encoder_decoder", False):
            raise InputError(
                f"{type(part).__name__} is an encoder with a decoder, which attends from one sequence to another; only "
                "self-attention can be computed in packs"
            )


def hugging_face_models(model: nn.Module) -> list[nn.Module]:
    """The outermost modules whose attention goes through the registry of transformers; maybe the model itself."""
    models: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in models)
        if not inside and hasattr(module, "set_attn_implementation") and hasattr(module, "config"):
            models[name] = module
    return list(models.values())
