"""What is compared: clusters of several sizes, networks and links, steps of several sizes; a training's tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TypeVar

from lengthwise.core.device_spec import GBIT, GBYTE
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import counted, parse_tokens
from lengthwise.report.pages.compare_results import TrainingBudget
from lengthwise.session.measured_profile import MeasuredProfile
from lengthwise.session.planning_args import COMMAND_LINE, Spelling

MAX_POINTS = 64
"""Comparisons of one sweep."""
MAX_TOKENS_PER_STEP = 1 << 40
FEW_TOKENS = 1000
"""A number below it, before one in thousands or more, was meant to have decimals."""
MIN_RATE, MAX_RATE = 1e-6, 1e6
"""Gbit/s of a network port, or Gbyte/s of a link."""

Value = TypeVar("Value", int, float)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One comparison of a sweep."""

    cluster: ClusterSpec
    tokens_per_step: int | None
    """Most tokens of a global batch; None: by the number of devices."""


def sweep_points(
    clusters: Sequence[ClusterSpec],
    tokens_per_step: Sequence[int],
    spelling: Spelling,
    *,
    networks: Sequence[float] = (),
    links: Sequence[float] = (),
    profile: MeasuredProfile | None = None,
) -> list[SweepPoint]:
    """Every cluster with every network, every link and every size of a step; an empty list leaves the default.

    Args:
        clusters: at least one.
        tokens_per_step: most tokens of a global batch.
        spelling: how errors name settings.
        networks: rates of each device's network port, in Gbit/s.
        links: rates of each device to the others of its node, in Gbyte/s a direction.
        profile: what costs are fitted to, with rates of its own.

    Raises:
        InputError: a value is out of its range, rates are given beside a profile, or there are too many comparisons.
    """
    for tokens in tokens_per_step:
        if not 1 <= tokens <= MAX_TOKENS_PER_STEP:
            raise InputError(f"{spelling('tokens_per_step')} must be from 1 to {MAX_TOKENS_PER_STEP:,}, not {tokens:,}")
    for rates, option, argument, unit in (
        (networks, "--network", "network_gbit_per_s", "Gbit/s"), (links, "--link", "link_gbyte_per_s", "Gbyte/s")
    ):  # fmt: skip
        _check_rates(rates, option if spelling.is_option else argument, unit=unit, profile=profile)
    variants = [
        _with_rates(cluster, gbit_per_s=network, gbyte_per_s=link)
        for cluster, network, link in product(clusters, networks or (None,), links or (None,))
    ]
    budgets: list[int | None] = [*tokens_per_step] or [None]
    points = [SweepPoint(cluster=cluster, tokens_per_step=tokens) for cluster, tokens in product(variants, budgets)]
    if len(points) > MAX_POINTS:
        raise InputError(
            f"{len(points):,} comparisons are asked for, and at most {MAX_POINTS} are made; sweep fewer sizes"
        )
    return points


def _check_rates(rates: Sequence[float], setting: str, *, unit: str, profile: MeasuredProfile | None) -> None:
    """Raise ``InputError`` for a rate that no device has, and for any where times of micro-batches are measured."""
    if rates and profile is not None:
        raise InputError(
            f"{setting} is for costs from a data sheet; {profile.path} holds micro-batches measured over the links of "
            f"its ranks. Leave {setting} or the profile out"
        )
    for rate in rates:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise InputError(f"{setting} must be from {MIN_RATE:g} to {MAX_RATE:,.0f} {unit}, not {rate:g}")


def _with_rates(cluster: ClusterSpec, *, gbit_per_s: float | None, gbyte_per_s: float | None) -> ClusterSpec:
    """The cluster with other network ports and other links within nodes; None: its own."""
    device = cluster.device
    if gbit_per_s is not None:
        device = replace(device, network_bytes_per_s=gbit_per_s * GBIT)
    if gbyte_per_s is not None:
        device = replace(device, link_bytes_per_s=gbyte_per_s * GBYTE)
    return replace(cluster, device=device)


def as_list(values: Value | Sequence[Value] | None, setting: str) -> list[Value]:
    """One value or several, each once; none for None.

    Raises:
        InputError: they are an empty list, which is not the default; the message names the ``setting``.
    """
    if values is None:
        return []
    several = list(dict.fromkeys([values] if isinstance(values, int | float) else values))
    if not several:
        raise InputError(f"{setting} is an empty list; give at least one number, or leave it out")
    return several


def make_budget(spelling: Spelling, *, tokens: float | None, price_per_hour: float | None) -> TrainingBudget:
    """Tokens and price of a whole training.

    Raises:
        InputError: a number is out of its range, or a price comes without tokens.
    """
    if tokens is not None and not 1 <= tokens < math.inf:
        raise InputError(f"{spelling('tokens')} must be at least 1, not {tokens}")
    if price_per_hour is not None and not (price_per_hour > 0 and math.isfinite(price_per_hour)):
        raise InputError(f"{spelling('price_per_hour')} must be above 0 and finite, not {price_per_hour:g}")
    if price_per_hour is not None and tokens is None:
        raise InputError(f"{spelling('price_per_hour')} is for a whole training; say of how many {spelling('tokens')}")
    return TrainingBudget(num_tokens=None if tokens is None else int(tokens), price_per_hour=price_per_hour)


def parse_budget(tokens: str | None, price_per_hour: float | None) -> TrainingBudget:
    """Tokens and price of a whole training, as the options --tokens and --price-per-hour give them."""
    num_tokens = next(iter(parse_token_counts(tokens, "--tokens")), None)
    return make_budget(COMMAND_LINE, tokens=num_tokens, price_per_hour=price_per_hour)


def parse_token_counts(text: str | None, option: str) -> list[int]:
    """Whole numbers from ``200K,1M,4000000``, each once; none for None.

    Raises:
        InputError: a part is no such number, or two are one with a decimal comma.
    """
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for digits, decimals in pairwise(parts):
        if digits.isdecimal() and int(digits) < FEW_TOKENS and decimals[-1:].isalpha():
            first = counted(int(digits), "token")
            raise InputError(
                f"{option} {brief(text or '')} is a step of {first} and one of {decimals}; decimals come after a "
                f"point ({digits}.{decimals}), and commas are between numbers"
            )
    return list(dict.fromkeys(_tokens(part, option) for part in parts))


def _tokens(text: str, option: str) -> int:
    number = parse_tokens(text)
    if not number:
        raise InputError(f"{option} {brief(text)} is not a number of tokens, such as 200000, 200K, 4M or 10B")
    return number


def parse_rates(text: str | None, option: str, *, unit: str) -> list[float]:
    """Numbers from ``100,400``, each once; none for None.

    Raises:
        InputError: a part is no number.
    """
    try:
        return list(dict.fromkeys(float(part) for part in text.split(","))) if text is not None else []
    except ValueError:
        raise InputError(f"{option} {brief(text)} is not a list of {unit}, such as 400 or 100,400") from None
