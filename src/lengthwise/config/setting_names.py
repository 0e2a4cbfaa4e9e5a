"""How messages name settings: by their key in a configuration, or as options of ``prepare``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config
from lengthwise.core.errors import LengthwiseError

OTHER_MEANING = frozenset({"plan.objective", "plan.cost", "plan.workers"})
"""Settings whose name means something else in ``prepare``; both say so."""
_OTHER_NAME = {"optim.name": "optimizer"}
"""Settings that have another name in ``prepare``."""
_PREPARE = re.compile(r"(?<![\w./])((?:[a-z]+\.)[a-z_]+)\b(?: \(\w+= of prepare\))?(?![\w(]|\.[a-z])")


@cache
def setting_keys() -> frozenset[str]:
    """The dotted key of every setting of a configuration that is in a section."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    return frozenset(f"{name}.{key}" for name, kind in sections.items() for key in getattr(kind, "model_fields", ()))


def option_of(key: str) -> str | None:
    """The option of ``prepare`` that the setting ``key`` is; None: ``prepare`` has no such option."""
    name = _OTHER_NAME.get(key, key.rpartition(".")[2])
    is_option = key in _OTHER_NAME or (name in PrepareOptions.model_fields and key not in OTHER_MEANING)
    return name if is_option and key in setting_keys() else None


def spelt_for_prepare(message: str) -> str:
    """``message`` with settings as options of ``prepare``; it says of others that only configurations have them."""

    def spell(match: re.Match[str]) -> str:
        if match[1] not in setting_keys():
            return match[0]
        return option_of(match[1]) or f"{match[1]} (of configurations alone)"

    return _PREPARE.sub(spell, message)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Errors name settings as options of ``prepare``, not as keys of a configuration file."""
    try:
        yield
    except LengthwiseError as error:
        renamed = spelt_for_prepare(str(error))
        if renamed == str(error):
            raise
        raise type(error)(renamed) from error
