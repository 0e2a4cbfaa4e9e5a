"""Which modules of a model are its layers, where those that were taken first turn out to be none."""

from collections.abc import Callable
from enum import Enum, auto

from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.layer_hooks import LayersError, LayersNotCalledError, OtherOrderError
from lengthwise.runtime.wrap.layer_lists import other_lists, parts_of_layers
from lengthwise.runtime.wrap.model_accessors import is_hugging_face

_MOST_TRIED = 6
"""Lists that are tried, one after the other."""


class ComparedCalls(Enum):
    """How a model is traced and compared with itself."""

    IN_PACKS = auto()
    BY_SEQUENCE = auto()
    AT_LENGTHS_OF_CORPUS = auto()
    """Sequence by sequence, with no lengths but those that the corpus has: the model may fail with others."""


Learn = Callable[[PrepareOptions, ComparedCalls], PreparedModel]
"""Traces a model and compares it with itself."""


def learn_with_layers(model: nn.Module, learn: Learn, chosen: PrepareOptions, compared: ComparedCalls) -> PreparedModel:
    """The model, traced and compared with the modules as its layers that its forward calls, and that attend.

    The list that is found or named comes first. Where its modules are not called, their parts may be; heads or experts
    may be in a longer list than the layers; and layers of several lists are taken in the order of their calls.

    Raises:
        LayersError: of the first list; no other will do.
    """
    names, tried, first = [chosen.layers], set[str | None](), None
    while names and len(tried) < _MOST_TRIED:
        name = names.pop(0)
        if name in tried:
            continue
        tried.add(name)
        try:
            return learn(chosen.model_copy(update={"layers": name}), compared)
        except LayersError as error:
            first = first or error.with_traceback(None)
            names = [*_others(model, error, is_named=chosen.layers is not None), *names]
    assert first is not None, "something was tried"
    raise first


def _others(model: nn.Module, error: LayersError, *, is_named: bool) -> list[str]:
    """What may be the layers instead of those that an error is of, the likeliest first."""
    if isinstance(error, OtherOrderError):
        return [error.in_order]
    parts = parts_of_layers(model, error.taken) if isinstance(error, LayersNotCalledError) else None
    others = [] if is_named or is_hugging_face(model) else other_lists(model, error.taken)
    return ([] if parts is None else [parts]) + others
