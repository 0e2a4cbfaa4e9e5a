"""Locate the layer stack of an ``nn.Module`` and group its parameters by layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.state.table import ParameterTable
from lengthwise.runtime.wrap.model_accessors import input_embeddings

Layers = nn.ModuleList | nn.Sequential
"""What holds the layers of a model."""

_SHARDED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of frozen parameters that can be gathered by layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelStructure:
    """A model with its list of layers."""

    model: nn.Module
    layers_name: str
    """The path of the list of layers in the model."""
    layers: Layers

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @cached_property
    def is_hugging_face(self) -> bool:
        """Whether attention goes through the registry of transformers."""
        return hasattr(self.model, "set_attn_implementation") and hasattr(self.model, "config")

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, each once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of all trained parameters.

        Raises:
            InputError: they are not of one dtype, or there are none.
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
        names = {parameter.dtype: name for name, parameter in self.parameters.items()}
        if len(names) != 1:
            listed = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
            raise InputError(
                f"{type(self.model).__name__} needs trained parameters of one dtype; {listed}. "
                "Cast it with model.to(dtype), or keep it in float32 and compute under torch.autocast"
            )
        return next(iter(names))

    @cached_property
    def computed_dtype(self) -> torch.dtype:
        """The dtype of its first trained parameter; of a model that trains none, of its first parameter of floats."""
        floats = (parameter for parameter in self.model.parameters() if parameter.is_floating_point())
        first = next(iter(self.parameters.values()), None)
        first = next(floats, None) if first is None else first
        return torch.get_default_dtype() if first is None else first.dtype

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
        """The bytes of each unit of the :meth:`frozen_tables`."""
        parameters, sizes = dict(self.model.named_parameters()), [0] * (self.num_layers + 2)
        for table in self.frozen_tables():
            for name, slot in table.slots.items():
                sizes[slot.unit] += prod(slot.shape) * parameters[name].element_size()
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
        prefix = f"{self.layers_name}."
        units, seen = {}, False
        for name, _ in self.model.named_parameters():
            if name.startswith(prefix):
                units[name], seen = int(name.removeprefix(prefix).split(".")[0]) + 1, True
            else:
                units[name] = self.num_layers + 1 if seen else 0
        return ParameterTable.of_units(self.model, {name: units[name] for name in names}, self.num_layers + 2)

    def constants(self) -> Iterator[Tensor]:
        """Parameters, buffers and other tensors that modules keep, such as tables of positions."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for module in self.model.modules():
            yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def find_structure(model: nn.Module, *, layers: str | None = None, of_any_class: bool = False) -> ModelStructure:
    """Find a model's layers: the longest ``ModuleList`` of modules of one class, or the one named ``layers``.

    Where no ``ModuleList`` can be meant, the longest ``Sequential`` of modules of one class that have modules of their
    own. ``of_any_class``: modules of a list may be of several classes, and of lists that are as long the last is taken.

    Raises:
        InputError: there is none, or several are as long; or first of all, the model is an encoder with a decoder.
    """
    if not of_any_class:
        _check_no_decoder(*hugging_face_models(model))
    if layers is not None:
        named = {**_containers(model, nn.ModuleList), **_containers(model, nn.Sequential)}
        if layers not in named:
            listed = ", ".join(named) or "none"
            raise InputError(f"{type(model).__name__} has no ModuleList or Sequential {layers!r}; it has: {listed}")
        return ModelStructure(model=model, layers_name=layers, layers=named[layers])
    outer = _without_towers(model, _candidates(model, of_any_class=of_any_class))
    if not outer:
        raise InputError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of modules of one class, so its layers are "
            "not known; put them into one, or name one with modules of several classes: "
            "prepare(..., layers='transformer.blocks')"
        )
    longest = max(len(modules) for modules in outer.values())
    longest_names = _nearest_to_tokens(model, [name for name, modules in outer.items() if len(modules) == longest])
    if len(longest_names) > 1 and not of_any_class and (around := _list_around(model, longest_names)):
        return ModelStructure(model=model, layers_name=around, layers=_containers(model, nn.ModuleList)[around])
    if len(longest_names) > 1 and not of_any_class:
        listed = " and ".join(longest_names)
        raise InputError(f"{listed} have {longest} layers each; say which: prepare(..., layers={longest_names[0]!r})")
    return ModelStructure(model=model, layers_name=longest_names[-1], layers=outer[longest_names[-1]])


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


def _list_around(model: nn.Module, names: list[str]) -> str | None:
    """The outermost list that several lists are all parts of, such as adapters of layers of several classes."""
    lists = _containers(model, nn.ModuleList)
    return next((outer for outer in lists if all(name.startswith(f"{outer}.") for name in names)), None)


def _candidates(model: nn.Module, *, of_any_class: bool) -> dict[str, Layers]:
    """The outermost lists that may be the layers, by name: of those that are likeliest."""
    lists, sequentials = _containers(model, nn.ModuleList), _containers(model, nn.Sequential)
    equal = {name: modules for name, modules in lists.items() if len({type(module) for module in modules}) == 1}
    equal_sequentials = {
        name: modules for name, modules in sequentials.items() if len({type(module) for module in modules}) == 1
    }
    if of_any_class:
        return _outermost(lists, are_nested=True) or _outermost(lists) or _outermost(equal_sequentials, are_nested=True)
    return (
        _outermost(equal, are_nested=True)
        or _outermost(lists, are_nested=True)
        or _outermost(equal_sequentials, are_nested=True)
        or _outermost(equal)
    )


def _outermost(lists: dict[str, Layers], *, are_nested: bool = False) -> dict[str, Layers]:
    """Keep lists that are in no other; with ``are_nested``, of those whose first module has modules of its own."""
    return {
        name: modules
        for name, modules in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
        and (not are_nested or next(modules[0].children(), None) is not None)
    }


def _containers(model: nn.Module, kind: type[Layers]) -> dict[str, Layers]:
    return {name: modules for name, modules in model.named_modules() if isinstance(modules, kind) and len(modules)}


def _without_towers(model: nn.Module, outer: dict[str, Layers]) -> dict[str, Layers]:
    """Leave out lists in other models of transformers than the one that embeds tokens, such as towers for images."""
    embedding = input_embeddings(model)
    parts = {name: part for name, part in model.named_modules() if name and hasattr(part, "set_attn_implementation")}
    towers = [name for name, part in parts.items() if all(module is not embedding for module in part.modules())]
    rest = {
        name: modules for name, modules in outer.items() if not any(name.startswith(f"{tower}.") for tower in towers)
    }
    return rest if embedding is not None and rest else outer


def _nearest_to_tokens(model: nn.Module, names: list[str]) -> list[str]:
    """Keep the layer lists that are nearest to the token embedding; others belong to image towers, say."""
    embedding = input_embeddings(model)
    home = next((name for name, module in model.named_modules() if module is embedding), None)
    if home is None or len(names) < 2:
        return names
    shared = {name: _num_shared(name.split("."), home.split(".")) for name in names}
    names = [name for name in names if shared[name] == max(shared.values())]
    depths = {name: name.count(".") for name in names}
    return [name for name in names if depths[name] == min(depths.values())]


def _num_shared(first: list[str], second: list[str]) -> int:
    """The number of leading parts that two paths share."""
    return next((depth for depth, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
