"""Timing of calls."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

Result = TypeVar("Result")


def timed(call: Callable[..., Result], *arguments: Any, **named: Any) -> tuple[Result, float]:
    """What ``call`` returns, and the seconds it takes."""
    start_s = perf_counter()
    result = call(*arguments, **named)
    return result, perf_counter() - start_s
