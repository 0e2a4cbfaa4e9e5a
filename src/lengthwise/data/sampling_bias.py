"""What an order does to sampling: whether the steps of an epoch are samples of the corpus, in numbers and in words.

A step's gradient estimates the corpus' only if its sequences are drawn from the whole corpus. An order by difficulty
gives that up on purpose; this says how far.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.core.correlation import pearson, ranks
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler

TENTHS = 10
STRONG, NOTICEABLE = 0.5, 0.1
"""Correlations of a step's mean with the step: above, said to be strong; below the other, none. Chance gives about
1 / sqrt(steps), which is allowed for."""
LARGEST_DRIFT = 0.2
"""Kolmogorov-Smirnov distance of a tenth of an epoch from the corpus, above which it is another distribution."""
ALIKE = 0.5
"""Share of the variance of ranks that is between steps."""
UNEVEN = 0.25
"""Standard deviation over mean of the tokens of a step."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How something of the sequences goes along with the step."""

    name: str
    pearson: float
    """Correlation of the step's mean with the step; 0 where one of them never changes."""
    spearman: float
    """The same of their ranks."""
    pearson_by_tenth: tuple[float | None, ...]
    """None where a tenth is one step, or nothing changes in it."""
    drift_by_tenth: tuple[float, ...]
    """Kolmogorov-Smirnov distance of the sequences of each tenth of the epoch from those of all of it."""
    between_steps: float
    """Share of the variance of ranks that is between steps, less what chance makes: 1 if the sequences of a step are
    alike, 0 if each is a sample of all. Above 0 under a token budget, where long sequences have a step alone."""

    @property
    def largest_drift(self) -> float:
        """Means of the tenths of the order."""
        return max(self.drift_by_tenth)

    @property
    def strength(self) -> float:
        """The larger of the two correlations, without its sign."""
        return max(abs(self.pearson), abs(self.spearman))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Trend over the steps of one number per step."""

    mean: float
    variance: float
    coefficient: float
    """Standard deviation over mean."""
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class SamplingReport:
    """What the first epoch of an order is like."""

    order: dict[str, Any]
    num_steps: int
    trends: tuple[Trend, ...]
    """Of length, and of the metric if it is another."""
    tokens: Spread
    """Of a step."""
    tokens_by_tenth: tuple[float, ...]
    """Mean tokens of the steps of each tenth."""
    sequences: Spread
    """Of a step."""
    coverage_by_tenth: tuple[float, ...]
    """Share of the epoch's tokens seen at the end of each tenth of its steps."""
    each_once: bool
    """Whether the epoch holds every sequence of the corpus exactly once."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values of the diagnostics, for JSON."""
        return asdict(self)


def safety_of(
    sampler: Sampler, lengths: LengthIndex, *, metric: np.ndarray | None = None, metric_name: str = ""
) -> SamplingReport:
    """The report on the first epoch that ``sampler`` makes of sequences of ``lengths``; O(n log n)."""
    ids, ends = sampler.arrange(0)
    ordered_lengths = lengths.lengths[ids].astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    trends = [_trend("length", ordered_lengths, ends)]
    if metric is not None:
        trends.append(_trend(metric_name, metric[ids], ends))
    tokens = np.add.reduceat(ordered_lengths, ends - sizes)
    tenths = _tenths(len(ends))
    done = np.concatenate([[0], np.cumsum(tokens)])
    spread = _spread(tokens)
    each_once = len(ids) == len(lengths) and len(np.unique(ids)) == len(ids)
    return SamplingReport(
        order=sampler.state_dict()["order"],
        num_steps=len(ends),
        trends=tuple(trends),
        tokens=spread,
        tokens_by_tenth=tuple(float(tokens[start:end].mean()) for start, end in tenths),
        sequences=_spread(sizes),
        coverage_by_tenth=tuple(float(done[end] / done[-1]) for _, end in tenths),
        each_once=each_once,
        warnings=tuple(_warnings(trends, spread, num_steps=len(ends), num_sequences=len(ids), each_once=each_once)),
    )


def _tenths(count: int) -> list[tuple[int, int]]:
    """Ranges of steps: ten of about the same size, or as many as there are steps."""
    number = min(TENTHS, count)
    return list(pairwise(count * tenth // number for tenth in range(number + 1)))


def _trend(name: str, values: np.ndarray, ends: np.ndarray) -> Trend:
    values = values.astype(np.float64)
    sizes = np.diff(ends, prepend=0)
    starts = ends - sizes
    means = np.add.reduceat(values, starts) / sizes
    steps, ascending = np.arange(len(means), dtype=np.float64), np.sort(values)
    tenths = _tenths(len(ends))
    return Trend(
        name=name,
        pearson=pearson(means, steps) or 0.0,
        spearman=pearson(ranks(means), steps) or 0.0,
        pearson_by_tenth=tuple(pearson(means[start:end], steps[start:end]) for start, end in tenths),
        drift_by_tenth=tuple(_distance(values[starts[start] : ends[end - 1]], ascending) for start, end in tenths),
        between_steps=_between(ranks(values), starts, sizes),
    )


def _between(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> float:
    """Share of the variance of ``values`` that lies between groups, less that of as many random groups."""
    means = np.add.reduceat(values, starts) / sizes
    total, inside = float(((values - values.mean()) ** 2).sum()), len(values) - len(means)
    if total <= 0 or inside < 1:
        return 0.0
    between_share = float((sizes * (means - values.mean()) ** 2).sum()) / total
    chance = (len(means) - 1) / (len(values) - 1)
    return max(0.0, (between_share - chance) / (1 - chance))


def _distance(sample: np.ndarray, ascending: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of a sample from the whole: the largest difference of their distributions."""
    sample = np.sort(sample)
    below = [
        np.searchsorted(part, ascending, side="right") / len(part) for part in (sample, ascending)
    ]  # they differ most at a value of either, and the sample's values are the whole's too
    return float(np.abs(below[0] - below[1]).max())


def _spread(values: np.ndarray) -> Spread:
    mean, variance = float(values.mean()), float(values.var())
    coefficient = float(np.sqrt(variance)) / mean
    return Spread(
        mean=mean, variance=variance, coefficient=coefficient, least=int(values.min()), most=int(values.max())
    )


def _warnings(
    trends: list[Trend], tokens: Spread, *, num_steps: int, num_sequences: int, each_once: bool
) -> Iterator[str]:
    chance, chance_drift = 3 / np.sqrt(num_steps), 2 / np.sqrt(num_sequences / TENTHS)
    for trend in trends:
        r = trend.pearson if abs(trend.pearson) >= abs(trend.spearman) else trend.spearman
        early, late = ("low", "high") if r > 0 else ("high", "low")
        if trend.strength >= max(STRONG, chance):
            yield (
                f"steps follow {trend.name} (correlation {r:.2f}): gradients of early steps come from sequences of "
                f"{early} {trend.name}, those of late steps from {late}"
            )
        elif trend.strength >= max(NOTICEABLE, chance):
            yield f"{trend.name} drifts with the step (correlation {r:.2f})"
        if trend.largest_drift >= max(LARGEST_DRIFT, chance_drift):
            tenth = 1 + int(np.argmax(trend.drift_by_tenth))
            yield (
                f"tenth {tenth} of the epoch has a {trend.name} unlike the corpus (Kolmogorov-Smirnov distance "
                f"{trend.largest_drift:.2f}): a running mean of the loss is not the corpus' there"
            )
        if trend.between_steps >= ALIKE:
            yield (
                f"sequences of a step are alike in {trend.name} ({trend.between_steps:.0%} of the variance is between "
                "steps): gradients of single steps differ by more than chance, though not in their mean over steps"
            )
    if tokens.coefficient >= UNEVEN:
        yield (
            f"tokens of a step vary by {tokens.coefficient:.0%} of their mean ({tokens.least:,} to {tokens.most:,}): "
            "gradients of small steps are noisier; see optim.lr_scaling"
        )
    if not each_once:
        yield "the epoch leaves sequences out or holds some more than once, as the mixture asks"
