"""Devices of your own: a YAML file with what a data sheet says, instead of the name of a preset."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lengthwise.core.device_spec import DEVICES, GBIT, GBYTE, DeviceSpec
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief, read_text
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.core.wording import GIB, nearest

SUFFIXES = (".yaml", ".yml")
MAX_FILE_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class _Field:
    """One number of the file: the field of ``DeviceSpec`` it sets, in which unit, and its bounds."""

    sets: str
    unit: float
    maximum: float
    required: bool = True


_FIELDS = {
    "memory_gib": _Field(sets="memory_bytes", unit=GIB, maximum=1 << 20),
    "bfloat16_tflops": _Field(sets="flops_per_s", unit=1e12, maximum=1e9),
    "float32_tflops": _Field(sets="float32_flops_per_s", unit=1e12, maximum=1e9, required=False),
    "memory_gbyte_per_s": _Field(sets="memory_bytes_per_s", unit=1e9, maximum=1e9),
    "link_gbyte_per_s": _Field(sets="link_bytes_per_s", unit=GBYTE, maximum=1e9),
    "network_gbit_per_s": _Field(sets="network_bytes_per_s", unit=GBIT, maximum=1e9),
    "link_latency_us": _Field(sets="link_call_s", unit=1e-6, maximum=1e6, required=False),
    "network_latency_us": _Field(sets="network_call_s", unit=1e-6, maximum=1e6, required=False),
    "devices_per_node": _Field(sets="devices_per_node", unit=1, maximum=1 << 16, required=False),
    "matmul_share": _Field(sets="matmul_share", unit=1, maximum=1, required=False),
    "activation_passes": _Field(sets="activation_passes", unit=1, maximum=1000, required=False),
    "attention_share": _Field(sets="attention_share", unit=1, maximum=1, required=False),
    "overlap_slowdown": _Field(sets="overlap_slowdown", unit=1, maximum=1, required=False),
    "host_gbyte_per_s": _Field(sets="host_bytes_per_s", unit=GBYTE, maximum=1e9, required=False),
    "host_memory_gib": _Field(sets="host_memory_bytes", unit=GIB, maximum=1 << 20, required=False),
    "host_memory_gbyte_per_s": _Field(sets="host_memory_bytes_per_s", unit=GBYTE, maximum=1e9, required=False),
    "price_per_hour": _Field(sets="price_per_hour", unit=1, maximum=1e9, required=False),
}
_WHOLE = ("devices_per_node",)


def resolve_device(name: str) -> DeviceSpec:
    """The device of a preset's name, or of a YAML file.

    Raises:
        InputError: there is neither, or the file says too little or what cannot be; the message names it.
    """
    if name.endswith(SUFFIXES):
        return read_device(Path(name))
    if name not in DEVICES:
        raise InputError(f"no device {brief(name)}, and a file of one ends with .yaml; {nearest(name, DEVICES)}")
    return DEVICES[name]


def read_device(path: Path) -> DeviceSpec:
    """The device that a YAML file describes.

    Raises:
        InputError: there is no such file, or it says too little or what cannot be; the message names it.
    """
    try:
        values = parse_yaml(read_text(path, what="a device file", max_bytes=MAX_FILE_BYTES))
    except FileNotFoundError:
        raise InputError(f"there is no device file {path}; {_nearest_device(path)}") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not a device file: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a device file: it holds {brief(values)}, not settings such as memory_gib: 80")
    if unknown := sorted(values.keys() - _FIELDS.keys() - {"name"}):
        raise InputError(f"{path}: a device has no {brief(unknown[0])}; {nearest(unknown[0], [*_FIELDS, 'name'])}")
    name = values.get("name", path.stem)
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or name == "cpu":
        raise InputError(f"{path}: name must be letters, digits and -_.+, and not cpu, but is {brief(name)}")
    if missing := [key for key, field in _FIELDS.items() if field.required and values.get(key) is None]:
        raise InputError(f"{path} lacks {', '.join(missing)}, which every device has")
    numbers = {key: _number(path, key, values[key]) for key in _FIELDS if values.get(key) is not None}
    if "host_gbyte_per_s" in numbers and "host_memory_gib" not in numbers:
        raise InputError(f"{path} says host_gbyte_per_s, and host_memory_gib is missing; give both or neither")
    fields = {_FIELDS[key].sets: number * _FIELDS[key].unit for key, number in numbers.items()}
    counts = {field: int(fields[field]) for field in ("memory_bytes", "host_memory_bytes", *_WHOLE) if field in fields}
    try:
        return DeviceSpec(name=name, **{**fields, **counts})  # type: ignore[arg-type]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _nearest_device(path: Path) -> str:
    """A clause that suggests the device file beside a missing one, or the preset, that its name is close to."""
    files = [str(other) for suffix in SUFFIXES for other in path.parent.glob(f"*{suffix}")]
    return nearest(str(path), files) if get_close_matches(str(path), files) else nearest(path.stem, DEVICES)


def _number(path: Path, key: str, value: object) -> float:
    """A positive number within the bounds of its field."""
    maximum = _FIELDS[key].maximum
    kinds = (int,) if key in _WHOLE else (int, float)
    if type(value) not in kinds or not 0 < value <= maximum:  # type: ignore[operator]
        expected = "a whole number from 1" if key in _WHOLE else "a number above 0"
        raise InputError(f"{path}: {key} must be {expected} and at most {maximum:,.0f}, not {brief(value)}")
    return value  # type: ignore[return-value]
