"""Where what can be made again is kept for this user."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``lengthwise`` in XDG_CACHE_HOME or ``~/.cache``; where the user has no home, a path that cannot be written."""
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        parent = Path(os.devnull)
    return parent / "lengthwise"
