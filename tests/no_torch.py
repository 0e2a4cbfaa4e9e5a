"""A pytest plugin that makes importing torch or anything built on it an error: ``pytest -p tests.no_torch``."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ABSENT = ("torch", "transformers", "accelerate", "safetensors")


class Absent(MetaPathFinder):
    """Finds nothing where the packages are; None in ``sys.modules`` would look loaded to SciPy, which asks there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse the packages and all below them."""
        if fullname.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{fullname} is kept out: this half must work without torch", name=fullname)
        return None


sys.meta_path.insert(0, Absent())
