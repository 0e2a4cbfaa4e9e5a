"""Check the values of a Hugging Face ``config.json`` before anything is computed with them."""

from collections.abc import Mapping
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions", "n_inner",
    "max_window_layers",
)  # fmt: skip
_NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rope_theta")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_decoder")
_LISTS = ("architectures", "layer_types")
_OBJECTS = ("rope_scaling", "rope_parameters")
MAX_SIZE = 1 << 40
MAX_NUMBER = 1e15


def check_values(config: Any, path: object) -> dict[str, Any]:
    """The configuration without fields that are null, all of the others of the type that they have in any model.

    Raises:
        InputError: a field that sizes a model has another type or is out of bounds; the message names it.
    """
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a model's configuration: it holds {brief(config)}, not an object")
    for name, value in config.items():
        if value is None:
            continue
        if name in _SIZES and (type(value) is not int or not 0 <= value <= MAX_SIZE):
            raise _wrong(path, name, value, f"a whole number from 0 to {MAX_SIZE:,}")
        if name in _NUMBERS:
            _check_number(value, path, name)
        if name in _FLAGS and type(value) is not bool:
            raise _wrong(path, name, value, "true or false")
        if name in _LISTS and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise _wrong(path, name, value, "a list of text")
        if name in _OBJECTS:
            _check_rope(value, path, name)
    return {name: value for name, value in config.items() if value is not None}


def _check_rope(value: Any, path: object, name: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(path, name, value, "an object")
    for key, item in value.items():
        if key in ("type", "rope_type"):
            if not isinstance(item, str):
                raise _wrong(path, f"{name}.{key}", item, "text")
        elif item is not None and not isinstance(item, list):
            _check_number(item, path, f"{name}.{key}")


def _check_number(value: Any, path: object, name: str) -> None:
    if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
        raise _wrong(path, name, value, f"a number above 0 and at most {MAX_NUMBER:g}")


def _wrong(path: object, name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{path}: {name} must be {expected}, not {brief(value)}")
