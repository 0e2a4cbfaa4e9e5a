"""Which settings of a resumed run make other batches than those that it began with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.config.run_config import Config, load_saved
from lengthwise.core.atomic_write import shown
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.sampler import OtherBatchesError

_MAKE_NO_BATCHES = {"validation", "verify", "prefetch"}
"""Settings of data that do not say which sequences are trained, nor when."""


def named_settings(error: OtherBatchesError, config: Config, folder: RunFolder) -> InputError:
    """``error`` by the settings that changed since the run in ``folder`` began; as it is if none of them did."""
    try:
        begun = load_saved(folder.config)
    except InputError:
        return error
    before, now = _settings(begun), _settings(config)
    changed = [name for name in now | before if before.get(name) != now.get(name)]
    if not changed:
        return error
    words = ", ".join(f"{name} is {_word(now.get(name))} and was {_word(before.get(name))}" for name in changed)
    return InputError(
        f"{words} when the run in {shown(folder.path)} began; what decides which sequences are trained, and in which "
        "order, stays for the whole run: resume without the change, or start another run"
    )


def _settings(config: Config) -> dict[str, Any]:
    data = config.data.model_dump(mode="json", exclude=_MAKE_NO_BATCHES)
    return {"seed": config.seed, **dict(_flat("data", data))}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _flat(f"{name}[{number}]", inner)
    else:
        yield name, str(Path(value).resolve()) if name.endswith(".index") and value else value


def _word(value: Any) -> str:
    return "not set" if value in (None, "") else str(value).lower() if isinstance(value, bool) else shown(str(value))
