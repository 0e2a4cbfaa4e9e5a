"""Which sequences an epoch holds, and in which order; functions of seed and epoch, whatever the cluster."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Selection(Protocol):
    """Which sequences an epoch holds."""

    def ids(self, epoch: int) -> np.ndarray:
        """Of every sequence that epoch ``epoch`` holds, in corpus order; one that it holds twice is there twice."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What tells it from others, in plain values."""
        ...


class Order(Protocol):
    """In which order an epoch's sequences come."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """The same ids in the epoch's order."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What tells it from others, in plain values."""
        ...


@dataclass(frozen=True)
class Everything:
    """Every sequence of a corpus, once an epoch."""

    num_sequences: int

    def ids(self, epoch: int) -> np.ndarray:
        """All, from 0."""
        return np.arange(self.num_sequences)

    def to_json(self) -> dict[str, Any]:
        """Nothing: it is what a corpus is."""
        return {}


@dataclass(frozen=True)
class Shuffled:
    """Every epoch in a new random order."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """A permutation by seed and epoch."""
        return ids[epoch_order(len(ids), seed=seed, epoch=epoch)]

    def to_json(self) -> dict[str, Any]:
        """Its name."""
        return {"name": "shuffled"}


@dataclass(frozen=True)
class InCorpusOrder:
    """As they come."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """As they are."""
        return ids

    def to_json(self) -> dict[str, Any]:
        """Its name."""
        return {"name": "corpus"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sorted:
    """From the smallest to the largest value of a metric; equal ones by id."""

    values: np.ndarray = field(repr=False)
    """[num_sequences] the metric of each sequence."""
    digest: str
    """Of the metric."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """A stable sort: the same in every epoch."""
        return ids[np.argsort(self.values[ids], kind="stable")]

    def to_json(self) -> dict[str, Any]:
        """Its name and metric."""
        return {"name": "sorted", "metric": self.digest}


def make_order(name: str) -> Order:
    """The order called ``name``."""
    orders: dict[str, Order] = {"shuffled": Shuffled(), "corpus": InCorpusOrder()}
    return orders[name]


def epoch_order(num_sequences: int, *, seed: int, epoch: int) -> np.ndarray:
    """A random permutation of ``num_sequences`` positions.

    The stable argsort of raw Philox output, whose stream NumPy guarantees across versions (unlike that of
    ``Generator.permutation``).
    """
    stream = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    return np.argsort(stream.random_raw(num_sequences), kind="stable")
