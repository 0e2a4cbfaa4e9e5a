"""A metric that is a function of the user's: imported by name, called with each sequence."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from numbers import Real
from threading import current_thread, main_thread
from typing import Any, NoReturn

import numpy as np
import torch

from lengthwise.core.errors import InputError
from lengthwise.core.plugins import load_plugin
from lengthwise.index.store import TokenStore
from lengthwise.runtime.analyze.blocks import Blocks, cut_blocks
from lengthwise.runtime.analyze.request import AnalysisRequest

_BLOCK_COST = 1 << 20
_SEQUENCE_COST = 4096
"""Tokens whose scoring takes as long as what a function does for a sequence of any length."""


class FunctionScorer:
    """Calls MODULE:FUNCTION as ``f(tokens, id)``, ``tokens`` being a read-only array of token ids."""

    def __init__(self, request: AnalysisRequest, store: TokenStore) -> None:
        self._label, self._store = request.target, store
        self._plugin = load_plugin(request.target, what="metric", usage="f(tokens, id)")

    def identity(self) -> dict[str, Any]:
        """The function's name, and a digest of the file it is in."""
        return {"kind": "function", "function": self._label, "source_digest": self._plugin.source_digest}

    def blocks(self) -> Blocks:
        """Blocks in corpus order, as files are read fastest."""
        lengths = self._store.lengths.lengths
        ids = np.arange(len(lengths))
        return cut_blocks(ids, lengths, block_cost=_BLOCK_COST, sequence_cost=_SEQUENCE_COST)

    def start(self, device: torch.device) -> None:
        """Do nothing: the function has been imported."""

    def score(self, ids: np.ndarray) -> np.ndarray:
        """One number per sequence: int64 if all are whole numbers, float32 if all are, else float64.

        Raises:
            InputError: the function fails, or returns what is not one finite number.
        """
        with _exits_raised():
            values = [self._call(id) for id in ids.tolist()]
        return np.array(values, dtype=np.result_type(*{np.dtype(type(value)) for value in values}))

    def _call(self, id: int) -> Any:
        tokens = self._store.tokens(id)
        try:
            value = self._plugin.function(tokens, id)
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{self._label} fails on sequence {id} ({len(tokens):,} tokens): {type(error).__name__}: {error} "
                f"({where.filename}, line {where.lineno})"
            ) from error
        return self._checked(value, id)

    def _checked(self, value: object, id: int) -> np.number[Any]:
        if not isinstance(value, Real | np.bool_):
            shown = f"an array of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise InputError(
                f"{self._label} returns {shown} for sequence {id}; it must return one number: an int or a float"
            )
        if isinstance(value, int | np.integer | np.bool_):
            if not -(1 << 63) <= int(value) < 1 << 63:
                raise InputError(f"{self._label} returns {value} for sequence {id}, beyond 64 bits; return a float")
            return np.int64(value)
        if not isfinite(value):
            raise InputError(
                f"{self._label} returns {value} for sequence {id}; a metric must be a finite number, so that sequences "
                "can be ordered by it"
            )
        return np.float32(value) if isinstance(value, np.float32 | np.float16) else np.float64(value)


@contextmanager
def _exits_raised() -> Iterator[None]:
    """Make ``os._exit`` raise in a function of the user's, which would end the analysis as if all had gone well."""
    leave = os._exit

    def raise_exit(status: int) -> NoReturn:
        if current_thread() is main_thread():
            raise SystemExit(f"os._exit({status})")
        leave(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = leave
