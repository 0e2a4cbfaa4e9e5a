"""What tests import while they run is left to itself by collections of garbage, as what was imported before is."""

import gc
import sys

MANY = 30
"""Modules: fewer are not worth a collection."""
_known = [0]


def leave_imported_alone(*, always: bool = False) -> None:
    """Freeze all that there is if many modules have come since; with ``always``, if few have.

    Models of tests are small, and modules a million objects, which every full collection looks at: those of torch and
    transformers come as they are first used, and trainers of others collect whenever they begin and end.
    """
    num_modules = len(sys.modules)
    if always or num_modules >= _known[0] + MANY:
        gc.collect()
        gc.freeze()
        _known[0] = num_modules
