"""Types of a parallel configuration's entries, which plans made by hand or read from elsewhere may get wrong."""

from numbers import Integral
from typing import Any

from lengthwise.core.errors import InputError

LISTS = ("stage_layers", "methods", "recompute", "offload")
COUNTS = ("degree", "tile_tokens", "head_groups", "slices")
FLAGS = ("keep_attention", "shard_gradients", "zero_bubble")


def check_types(scheme: Any) -> None:
    """Raise ``InputError`` with name and value of an entry of another type than a scheme has."""
    for names, kind, words in (
        (LISTS, tuple, "a tuple"),
        (COUNTS, Integral, "a whole number"),
        (FLAGS, bool, "a bool"),
    ):
        for name in names:
            if not isinstance(value := getattr(scheme, name), kind):
                raise InputError(f"{name} of a scheme is {words}, not {value!r}")
    for layers in scheme.stage_layers:
        if not isinstance(layers, Integral):
            raise InputError(f"stage_layers of a scheme are whole numbers of layers, not {layers!r}")
