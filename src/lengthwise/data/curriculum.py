"""Curricula: every sequence once an epoch, in random order but for this: none comes before its difficulty is reached.

Competence c(x) is the share of the corpus, the easiest, that sequences are drawn from when a share x of an epoch's
sequences is done (Platanios et al. 2019). There it is drawn with replacement; here an epoch stays lossless, as c is x
at least. The order is a permutation drawn uniformly from those where the r-th easiest of n sequences stands at no
position p (both from 1) with n c(p / n) < r. It is drawn position by position from what is reached and not used yet,
which is uniform: how many ways there are to go on does not depend on which one was drawn.

Competence is looked at ``MOST_BLOCKS`` times an epoch, evenly: within a block of positions it is that of the block's
first, or what filling the block needs. With no more sequences than that, a block is one position.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, Protocol

import numpy as np

from lengthwise.config.limits import MOST_BLOCKS
from lengthwise.core.errors import InputError, Setting
from lengthwise.data.rng import draw, epoch_order, raw_stream

LINEAR, ROOT, STEP, NATURAL = PACINGS = ("linear", "root", "step", "natural")


class Difficulty(Protocol):
    """One number per sequence."""

    @property
    def values(self) -> np.ndarray:
        """[num_sequences] from easy to hard."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the values."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How an epoch gets harder."""

    name: str = ROOT
    """linear: c = c0 + (1 - c0) x; root: sqrt(c0^2 + (1 - c0^2) x); step: c grows in equal steps, at equal intervals or
    when all that is reached is used up; natural: no competence, but batches of one difficulty group each."""
    start: float = 0.1
    """c0, competence at the beginning of an epoch."""
    stages: int = 5
    """Of step: how often it grows. Of natural: groups, of as many sequences each."""
    epochs: int | None = None
    """With a curriculum; shuffled afterwards. None: all."""

    def __post_init__(self) -> None:
        if self.name not in PACINGS:
            raise InputError(f"no pacing {self.name!r}; known: {', '.join(PACINGS)}")
        if not 0 < self.start <= 1:
            raise InputError(
                f"{Setting.PACING_START} {self.start:g} is no share of the corpus; use one above 0, up to 1"
            )
        if self.stages > MOST_BLOCKS:
            raise InputError(f"{Setting.PACING_STAGES} {self.stages:,}: at most {MOST_BLOCKS:,} can be told apart")
        if self.stages < 1 or (self.epochs is not None and self.epochs < 1):
            raise InputError(
                f"{Setting.PACING_STAGES} {self.stages} and {Setting.CURRICULUM_EPOCHS} {self.epochs}: at least 1 is "
                "needed"
            )

    def reached(self, position: int, count: int) -> int:
        """Number of ``count`` sequences that competence reaches at ``position``, counted from 1.

        floor(count c(position / count)) in exact arithmetic: the same on every machine.
        """
        start = Fraction(repr(self.start))
        if self.name == LINEAR:
            return int(count * start + (1 - start) * position)
        if self.name == ROOT:
            return isqrt(int(count * (count * start**2 + (1 - start**2) * position)))
        grown, level = 0, start  # step: level is c after so many growths
        while grown < self.stages and position > count * min(Fraction(grown + 1, self.stages + 1), level):
            grown += 1
            level = start + (1 - start) * Fraction(grown, self.stages)
        return int(count * level)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curriculum:
    """Curriculum order of an epoch, from easy to hard, by a metric and a pacing."""

    values: np.ndarray = field(repr=False)
    """[num_sequences] the difficulty of each; equal ones by id."""
    digest: str
    """Of the metric."""
    pacing: Pacing = field(default_factory=Pacing)

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Order these ids for the epoch; a function of seed, epoch and metric alone."""
        count = len(ids)
        if self._is_over(epoch):
            return ids[epoch_order(count, seed=seed, epoch=epoch)]
        ascending = ids[np.argsort(self.values[ids], kind="stable")]
        if self.pacing.name == NATURAL:
            ranks = epoch_order(count, seed=seed, epoch=epoch)
            group = np.searchsorted(self._group_ends(count), ranks, side="right")
            return ascending[ranks[np.argsort(group, kind="stable")]]
        return ascending[paced_order(count, self.pacing, seed=seed, epoch=epoch)]

    def breaks(self, count: int, *, epoch: int) -> np.ndarray | None:
        """Positions where the groups of the natural mixture end, as a batch is of one group."""
        return self._group_ends(count) if self.pacing.name == NATURAL and not self._is_over(epoch) else None

    def to_json(self) -> dict[str, Any]:
        """Name, metric and pacing of the order."""
        pacing = self.pacing
        return {
            "name": "curriculum",
            "metric": self.digest,
            "pacing": pacing.name,
            "start": pacing.start,
            "stages": pacing.stages,
            "epochs": pacing.epochs,
        }

    def _is_over(self, epoch: int) -> bool:
        return self.pacing.epochs is not None and epoch >= self.pacing.epochs

    def _group_ends(self, count: int) -> np.ndarray:
        stages = self.pacing.stages
        return np.array([count * number // stages for number in range(1, stages + 1)], dtype=np.int64)


def paced_order(count: int, pacing: Pacing, *, seed: int, epoch: int) -> np.ndarray:
    """[count] the difficulty rank of the sequence at each position; O(count log count)."""
    stream = raw_stream(seed=seed, epoch=epoch)
    order = np.empty(count, dtype=np.int64)
    pool, num_in_pool, reached = np.empty(count, dtype=np.int64), 0, 0  # ranks that are reached and not used yet
    for start, end, until in _blocks(count, pacing):
        pool[num_in_pool : num_in_pool + until - reached] = np.arange(reached, until)
        num_in_pool, reached = num_in_pool + until - reached, until
        chosen = draw(stream, end - start, num_in_pool)
        order[start:end] = pool[chosen]
        left = num_in_pool - len(chosen)
        is_free = np.ones(len(chosen), dtype=bool)  # of the places behind those that are left
        is_free[chosen[chosen >= left] - left] = False
        pool[chosen[chosen < left]] = pool[left:num_in_pool][is_free]
        num_in_pool = left
    return order


def _blocks(count: int, pacing: Pacing) -> Iterator[tuple[int, int, int]]:
    """Where every block of positions starts and ends, and how many sequences it is drawn from."""
    number = min(count, MOST_BLOCKS)
    edges = [count * block // number for block in range(number + 1)]
    limits = (min(count, max(pacing.reached(start + 1, count), end)) for start, end in pairwise(edges))
    yield from zip(edges, edges[1:], accumulate(limits, max))
