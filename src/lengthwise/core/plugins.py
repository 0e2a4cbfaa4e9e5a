"""Functions of the user's or of other packages that a setting names: MODULE:FUNCTION, or a registered entry point."""

import re
import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from lengthwise.core.errors import InputError
from lengthwise.core.wording import nearest

POLICIES, READERS = "lengthwise.policies", "lengthwise.readers"
"""Groups of entry points."""
_LABEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Plugin(NamedTuple):
    """A function that was loaded by name."""

    function: Callable[..., Any]
    source_digest: str
    """Sixteen hex digits over the file of its module; empty where it has none."""


def is_label(name: str) -> bool:
    """Whether ``name`` has the form MODULE:FUNCTION."""
    return _LABEL.fullmatch(name) is not None


def registered(group: str) -> dict[str, str]:
    """Name -> MODULE:FUNCTION of the entry points that installed packages register in ``group``."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load_plugin(name: str, *, what: str, usage: str, group: str = "") -> Plugin:
    """Import the function called ``name``; the current folder is looked in first.

    Args:
        name: MODULE:FUNCTION, or an entry point of ``group``.
        what: what it is, for errors, such as ``policy``.
        usage: how it is called, such as ``f(tokens, id)``.
        group: the group of entry points; empty: there is none.

    Raises:
        InputError: there is no such module or function, importing it fails, or it cannot be called.
    """
    label = name if is_label(name) or not group else registered(group).get(name, name)
    module_name, _, path = label.partition(":")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        target = module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"{what} {name}: no module {error.name!r} in {here} or among the installed packages"
            ) from None
        raise InputError(f"{what} {name}: importing {module_name} fails: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} {name}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(target, part):
            public_names = [other for other in getattr(target, "__dict__", ()) if not other.startswith("_")]
            raise InputError(f"{what} {name}: {module_name} has no {part!r}; {nearest(part, public_names)}")
        target = getattr(target, part)
    if not callable(target):
        raise InputError(f"{what} {name}: it is a {type(target).__name__}, not a function {usage}")
    file = getattr(module, "__file__", None)
    source = blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file and Path(file).is_file() else ""
    return Plugin(target, source)
