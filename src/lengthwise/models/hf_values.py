"""Check the values of a Hugging Face ``config.json`` before anything is computed with them.

Only what is read here is checked, and every form that transformers writes passes: sizes and numbers by layer, stage or
part of the model, and rotary parameters by type of layer.
"""

from collections.abc import Iterable, Mapping
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
_ROPE_TYPES = ("type", "rope_type")
_ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "partial_rotary_factor",
)  # fmt: skip
_LENGTHS = ("max_position_embeddings", "n_positions")
"""Sizes that transformers computes for some models, as a number such as 1200.0."""
_ONCE = ("vocab_size", *_LENGTHS)
"""Sizes that are one number in a model of any family."""
MAX_SIZE = 1 << 40
MAX_NUMBER = 1e15


def check_values(config: Any, path: object) -> dict[str, Any]:
    """The configuration without fields that are null, all of the others of the type that they have in any model.

    Raises:
        InputError: a field that sizes a model has another type or is out of bounds; the message names it.
    """
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a model's configuration: it holds {brief(config)}, not an object")
    values = {name: _whole(value) if name in _LENGTHS else value for name, value in config.items() if value is not None}
    for name, value in values.items():
        if name in _SIZES:
            for part in [value] if name in _ONCE else _parts(value):
                _check_size(part, path, name)
        if name in _NUMBERS:
            for part in _parts(value):
                _check_number(part, path, name)
        if name in _FLAGS and type(value) is not bool:
            raise _wrong(path, name, value, "true or false")
        if name in _LISTS and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise _wrong(path, name, value, "a list of text")
        if name in _OBJECTS:
            _check_rope(value, path, name)
    return values


def check_same_layers(config: Mapping[str, Any], path: object) -> None:
    """Raise ``InputError`` if a size or number that :func:`check_values` passed is one by layer or part."""
    for name in set(_SIZES) & config.keys():
        _check_size(config[name], path, name)
    for name in set(_NUMBERS) & config.keys():
        _check_number(config[name], path, name)


def rope_by_layer(rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rotary parameters of each type of layer, where they are written by type."""
    return {kind: values for kind, values in rope.items() if isinstance(values, Mapping)}


def _parts(value: Any) -> Iterable[Any]:
    """The values of a field that may be one by layer, stage or part of the model, such as ``[4, 8, 16]``."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else [value]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_rope(value: Any, path: object, name: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(path, name, value, "an object")
    for kind, values in rope_by_layer(value).items():
        _check_rope(values, path, f"{name}.{kind}")
    for key, item in value.items():
        if item is None:
            continue
        if key in _ROPE_TYPES and not isinstance(item, str):
            raise _wrong(path, f"{name}.{key}", item, "text")
        if key in _ROPE_NUMBERS:
            _check_number(item, path, f"{name}.{key}")


def _check_size(value: Any, path: object, name: str) -> None:
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise _wrong(path, name, value, f"a whole number from 0 to {MAX_SIZE:,}")


def _check_number(value: Any, path: object, name: str) -> None:
    if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
        raise _wrong(path, name, value, f"a number above 0 and at most {MAX_NUMBER:g}")


def _wrong(path: object, name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{path}: {name} must be {expected}, not {brief(value)}")
