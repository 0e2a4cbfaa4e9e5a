"""Comparison of what must be equal on all ranks before they train.

Ranks that were started with other settings, data, code or weights would wait for each other for ever, or train on with
different values. One small all-gather compares digests; values travel, as JSON, only where the digests differ.
"""

from collections.abc import Mapping
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.differences import differences, digest_of, message_of
from lengthwise.runtime.comm.objects import gather_json, gather_same
from lengthwise.runtime.comm.world import DistContext


def require_equal(world: DistContext, values: Mapping[str, Any]) -> None:
    """Check that ``values``, a tree of numbers, texts, lists and None, is the same on every rank; all ranks call this.

    One all-gather of 16 bytes; two more where something differs.

    Raises:
        InputError: on every rank, with the keys that differ and their values on which ranks.
    """
    if not gather_same(world, digest_of(values)):
        raise InputError(message_of(differences(dict(enumerate(gather_json(world, values))))))
