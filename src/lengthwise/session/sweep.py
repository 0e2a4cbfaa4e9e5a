"""What is compared: clusters of several sizes and networks, steps of several sizes; and a whole training's tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from lengthwise.core.device_spec import GBIT
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import parse_tokens
from lengthwise.report.pages.compare_results import TrainingBudget
from lengthwise.session.planning_args import COMMAND_LINE, Spelling

MAX_POINTS = 64
"""Comparisons of one sweep."""
MAX_TOKENS_PER_STEP = 1 << 40
MAX_GBIT_PER_S = 1e6

Value = TypeVar("Value", int, float)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One comparison of a sweep."""

    cluster: ClusterSpec
    tokens_per_step: int | None
    """Most tokens of a global batch; None: by the number of devices."""


def sweep_points(
    clusters: Sequence[ClusterSpec], tokens_per_step: Sequence[int], networks: Sequence[float], spelling: Spelling
) -> list[SweepPoint]:
    """Every cluster with every network and every size of a step; an empty list leaves the default.

    Args:
        clusters: at least one.
        tokens_per_step: most tokens of a global batch.
        networks: rates of each device's network port, in Gbit/s.
        spelling: how errors name settings.

    Raises:
        InputError: a value is out of its range, or there are too many comparisons.
    """
    for tokens in tokens_per_step:
        if not 1 <= tokens <= MAX_TOKENS_PER_STEP:
            raise InputError(f"{spelling('tokens_per_step')} must be from 1 to {MAX_TOKENS_PER_STEP:,}, not {tokens:,}")
    for rate in networks:
        if not 0 < rate <= MAX_GBIT_PER_S:
            setting = "--network" if spelling.is_option else "network_gbit_per_s"
            raise InputError(f"{setting} must be above 0 and at most {MAX_GBIT_PER_S:,.0f} Gbit/s, not {rate:g}")
    variants = [_with_network(cluster, rate) for cluster in clusters for rate in networks] if networks else clusters
    budgets: list[int | None] = [*tokens_per_step] or [None]
    points = [SweepPoint(cluster=cluster, tokens_per_step=tokens) for cluster, tokens in product(variants, budgets)]
    if len(points) > MAX_POINTS:
        raise InputError(
            f"{len(points):,} comparisons are asked for, and at most {MAX_POINTS} are made; sweep fewer sizes"
        )
    return points


def _with_network(cluster: ClusterSpec, gbit_per_s: float) -> ClusterSpec:
    return replace(cluster, device=replace(cluster.device, network_bytes_per_s=gbit_per_s * GBIT))


def as_list(values: Value | Sequence[Value] | None) -> list[Value]:
    """One value or several, each once; none for None."""
    if values is None:
        return []
    return list(dict.fromkeys([values] if isinstance(values, int | float) else values))


def make_budget(spelling: Spelling, *, tokens: int | None, price_per_hour: float | None) -> TrainingBudget:
    """Tokens and price of a whole training.

    Raises:
        InputError: a number is out of its range, or a price comes without tokens.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"{spelling('tokens')} must be at least 1, not {tokens}")
    if price_per_hour is not None and not (price_per_hour > 0 and math.isfinite(price_per_hour)):
        raise InputError(f"{spelling('price_per_hour')} must be above 0 and finite, not {price_per_hour:g}")
    if price_per_hour is not None and tokens is None:
        raise InputError(f"{spelling('price_per_hour')} is for a whole training; say of how many {spelling('tokens')}")
    return TrainingBudget(num_tokens=tokens, price_per_hour=price_per_hour)


def parse_budget(tokens: str | None, price_per_hour: float | None) -> TrainingBudget:
    """Tokens and price of a whole training, as the options --tokens and --price-per-hour give them."""
    num_tokens = next(iter(parse_token_counts(tokens, "--tokens")), None)
    return make_budget(COMMAND_LINE, tokens=num_tokens, price_per_hour=price_per_hour)


def parse_token_counts(text: str | None, option: str) -> list[int]:
    """Whole numbers from ``200K,1M,4000000``, each once; none for None.

    Raises:
        InputError: a part is no such number.
    """
    numbers = [_tokens(part.strip(), option) for part in text.split(",")] if text is not None else []
    return list(dict.fromkeys(numbers))


def _tokens(text: str, option: str) -> int:
    number = parse_tokens(text)
    if not number:
        raise InputError(f"{option} {brief(text)} is not a number of tokens, such as 200000, 200K, 4M or 10B")
    return number


def parse_rates(text: str | None, option: str) -> list[float]:
    """Numbers from ``100,400``, each once; none for None.

    Raises:
        InputError: a part is no number.
    """
    try:
        return list(dict.fromkeys(float(part) for part in text.split(","))) if text is not None else []
    except ValueError:
        raise InputError(f"{option} {brief(text)} is not a list of Gbit/s, such as 400 or 100,400") from None
