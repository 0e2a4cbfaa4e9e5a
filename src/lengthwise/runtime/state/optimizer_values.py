"""What an optimizer of the user's holds of each parameter, as a checkpoint has it: tensors by name, all else in JSON.

Nothing is known beforehand of what such an optimizer keeps. Some keep other state of large parameters than of small
ones, or begin an average late. So the state is described as it is when it is saved, parameter by parameter, and a
parameter has exactly the same entries after a resume: an optimizer may ask ``if "average" not in state``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError

_log = logging.getLogger("lengthwise")
_SEQUENCES = {"tuple": tuple, "list": list, "size": torch.Size}
_KEEPS = (
    "checkpoints keep tensors, numbers, texts, None, and tuples, lists and dictionaries of such; use an optimizer that "
    "keeps such alone"
)


class UnsavedKindError(Exception):
    """An optimizer keeps a value of a kind that checkpoints do not have; the text says where and what it is."""


@dataclass(frozen=True, kw_only=True)
class DescribedState:
    """The state of an optimizer, of the parameters that a rank updates."""

    values: dict[str, Any] = field(default_factory=dict)
    """By parameter: what it has, for JSON; tensors are named there."""
    others: list[Any] = field(default_factory=list)
    """Pairs of a key and a value of what is of no parameter, for JSON."""
    attributes: list[Any] = field(default_factory=list)
    """Pairs of a key and a value of what its own ``state_dict`` has beside state and groups, for JSON."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By ``<name>/<parameter>``."""
    problem: str = ""
    """What cannot be saved; an empty string: all can."""

    @property
    def document(self) -> dict[str, Any]:
        """The part for JSON."""
        return {"parameters": self.values, "others": self.others, "attributes": self.attributes}


def describe(state: Mapping[Any, Any], names: Mapping[int, str], device: torch.device) -> DescribedState:
    """Describe the state of an optimizer.

    ``names``: of the parameters that this rank updates, by identity. ``device``: where their values are.
    """
    values: dict[str, Any] = {}
    others: list[Any] = []
    tensors: dict[str, Tensor] = {}
    try:
        for key, value in state.items():
            if id(key) in names:
                part = names[id(key)]
                writer = _Writer(device)
                values[part] = writer.encoded(value)
                tensors |= {f"{name}/{part}": tensor for name, tensor in writer.tensors.items()}
            elif isinstance(key, Tensor):
                if not isinstance(value, dict) or value:
                    raise UnsavedKindError("state of a parameter that it does not update on this rank")
            else:
                others.append([_Writer(None).encoded(key), _Writer(None).encoded(value, (str(key),))])
    except UnsavedKindError as error:
        return DescribedState(problem=f"keeps {error}, and {_KEEPS}")
    return DescribedState(values=values, others=others, tensors=tensors)


def described_attributes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer with ``state_dict`` and ``load_state_dict`` of its own has there beside state and groups.

    Pairs of a key and a value for JSON. What is of another kind is left out, with a warning.
    """
    if not keeps_attributes(optimizer):
        return []
    pairs = []
    for key, value in optimizer.state_dict().items():
        if key in ("state", "param_groups"):
            continue
        try:
            pairs.append([key, _Writer(None).encoded(value, (key,))])
        except UnsavedKindError as error:
            _log.warning("state_dict() of %s has %s, which checkpoints do not keep", type(optimizer).__name__, error)
    return pairs


def restore_attributes(optimizer: torch.optim.Optimizer, pairs: Sequence[Any]) -> None:
    """Let ``load_state_dict`` of an optimizer restore what :func:`described_attributes` gave, and nothing else.

    Raises:
        InputError: it cannot.
    """
    if not pairs or not keeps_attributes(optimizer):
        return
    groups, state = optimizer.param_groups, optimizer.state
    try:
        optimizer.load_state_dict(
            {**optimizer.state_dict(), **{key: restored(value, no_tensor) for key, value in pairs}}
        )
    except Exception as error:
        raise InputError(
            f"load_state_dict of {type(optimizer).__name__} does not take what its state_dict gave when the checkpoint "
            f"was saved ({type(error).__name__}: {error}); let it, or leave both as they are in torch.optim.Optimizer"
        ) from error
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def keeps_attributes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class has ``state_dict`` and ``load_state_dict`` of its own."""
    kind, names = type(optimizer), ("state_dict", "load_state_dict")
    return all(getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in names)


def no_tensor(name: str, home: str | None) -> Tensor:
    """No tensor, as what is described is of no parameter."""
    raise AssertionError(f"{name} is of no parameter, and has no tensors")


def merged(documents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """What all ranks describe, as one document, and what is wrong with it or ""."""
    values = {name: value for document in documents for name, value in document["parameters"].items()}
    others, problem = _merged_pairs([document["others"] for document in documents])
    attributes, of_attributes = _merged_pairs([document["attributes"] for document in documents])
    return {"parameters": values, "others": others, "attributes": attributes}, problem or of_attributes


def _merged_pairs(pairs_of_ranks: Sequence[Sequence[Any]]) -> tuple[list[Any], str]:
    """Pairs of keys and values of all ranks, and which key has two values, in words, or ""."""
    pairs: list[Any] = []
    for rank, of_rank in enumerate(pairs_of_ranks):
        for key, value in of_rank:
            earlier = next((pair for pair in pairs if pair[0] == key), None)
            if earlier is None:
                pairs.append([key, value])
            elif earlier[1] != value and repr(earlier[1]) != repr(value):  # NaN is not equal to itself
                return [], f"keeps {key} as {value} on rank {rank} and as {earlier[1]} on another; let it be the same"
    return pairs, ""


def tensor_names(value: Any) -> list[str]:
    """The names of the tensors in a described value."""
    if not isinstance(value, dict):
        return []
    [(kind, content)] = ((kind, content) for kind, content in value.items() if kind != "home")
    if kind == "tensor":
        return [content]
    items = [x for pair in content for x in pair] if kind == "dict" else content
    return [name for item in items for name in tensor_names(item)]


def restored(value: Any, tensor_of: Callable[[str, str | None], Tensor]) -> Any:
    """The value that was described; ``tensor_of`` gives a tensor by its name and the kind of device that it was on, or
    None where that is not known.
    """
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor_of(value["tensor"], value.get("home"))
    [(kind, items)] = value.items()
    if kind == "dict":
        return {restored(key, tensor_of): restored(item, tensor_of) for key, item in items}
    return _SEQUENCES[kind](restored(item, tensor_of) for item in items)


class _Writer:
    """Describes the state of one parameter."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: of the parameter; None: tensors cannot be kept."""
        self._device = device
        self.tensors: dict[str, Tensor] = {}

    def encoded(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """A value for JSON; ``path``: the keys that lead to it.

        Raises:
            UnsavedKindError: it is of a kind that cannot be saved.
        """
        kind = type(value)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, Tensor):
            return self._noted(value, path)
        if kind is dict:
            return {
                "dict": [[_Writer(None).encoded(k, path), self.encoded(x, (*path, str(k)))] for k, x in value.items()]
            }
        for name, sequence in _SEQUENCES.items():
            if kind is sequence:
                return {name: [self.encoded(item, (*path, str(i))) for i, item in enumerate(value)]}
        raise UnsavedKindError(f"{'.'.join(path) or 'state'} as a {kind.__name__}")

    def _noted(self, value: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """The mention of a tensor, whose name no other tensor of the parameter has."""
        name = ".".join(path) or "state"
        if self._device is None:
            raise UnsavedKindError(f"{name} as a tensor of no parameter")
        if type(value) not in (Tensor, nn.Parameter):
            raise UnsavedKindError(f"{name} as a {type(value).__name__}")
        if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
            raise UnsavedKindError(f"{name} as a tensor of {value.dtype} and {value.layout}")
        while name in self.tensors:
            name += "'"
        self.tensors[name] = value.detach()
        mention = {"tensor": name}
        if self._device.type != "cpu":
            mention["home"] = value.device.type
        return mention
