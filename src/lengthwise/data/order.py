"""Which sequences an epoch holds, and in which order; functions of seed and epoch, whatever the cluster."""

from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self, get_args, get_type_hints, runtime_checkable

import numpy as np

from lengthwise.config.choices import OrderName
from lengthwise.config.limits import WINDOW
from lengthwise.core.arguments import check_arguments
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.wording import nearest
from lengthwise.data.curriculum import NATURAL, ROOT, Curriculum, Difficulty, Pacing
from lengthwise.data.rng import epoch_order as epoch_order

SHUFFLED, CORPUS, SORTED, CURRICULUM, WINDOWED = ORDERS = get_args(OrderName)


class Selection(Protocol):
    """Which sequences an epoch holds."""

    def ids(self, epoch: int) -> np.ndarray:
        """Ids of the sequences of epoch ``epoch``, in corpus order; one that it holds twice is there twice."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain values that identify it in checkpoints."""
        ...


class Order(Protocol):
    """Order of an epoch's sequences."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Arrange these ids in the order of the epoch."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain values that identify it in checkpoints."""
        ...


@runtime_checkable
class OrderOfBatches(Order, Protocol):
    """An order that also says where batches end; they are cut from it and then come in random order."""

    def breaks(self, count: int, *, epoch: int) -> np.ndarray | None:
        """Ascending positions that no batch of ``count`` sequences crosses; None: batches come as they are cut."""
        ...


@dataclass(frozen=True)
class EverySequence:
    """Every sequence of a corpus, once an epoch."""

    num_sequences: int

    def ids(self, epoch: int) -> np.ndarray:
        """All, from 0."""
        return np.arange(self.num_sequences)

    def to_json(self) -> dict[str, Any]:
        """Empty: every sequence is the default selection."""
        return {}


@dataclass(frozen=True)
class Shuffled:
    """Every epoch in a new random order."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """A permutation by seed and epoch."""
        return ids[epoch_order(len(ids), seed=seed, epoch=epoch)]

    def to_json(self) -> dict[str, Any]:
        """Name of the order."""
        return {"name": SHUFFLED}


@dataclass(frozen=True)
class InCorpusOrder:
    """Order of the corpus itself, in every epoch."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Return the ids as they are."""
        return ids

    def to_json(self) -> dict[str, Any]:
        """Name of the order."""
        return {"name": CORPUS}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sorted:
    """Sorted order, from the smallest to the largest value of a metric; equal ones by id."""

    values: np.ndarray = field(repr=False)
    """[num_sequences] the metric of each sequence."""
    digest: str
    """Of the metric."""

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """A stable sort: the same in every epoch."""
        return ids[np.argsort(self.values[ids], kind="stable")]

    def to_json(self) -> dict[str, Any]:
        """Name and metric of the order."""
        return {"name": SORTED, "metric": self.digest}


@dataclass(frozen=True, kw_only=True, eq=False)
class Windowed:
    """Shuffled, then sorted within windows, up and down in turn, and cut; batches of similar values in random order."""

    values: np.ndarray = field(repr=False)
    """[num_sequences] the metric of each sequence."""
    digest: str
    """Of the metric."""
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"{Setting.WINDOW} {self.window}: at least 1 sequence is needed")

    def arrange(self, ids: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """A window ends where the next begins: among the largest values, or among the smallest."""
        shuffled = ids[epoch_order(len(ids), seed=seed, epoch=epoch)]
        num_windowed = len(ids) // self.window * self.window
        windows = shuffled[:num_windowed].reshape(-1, self.window)
        ascending = np.take_along_axis(windows, np.argsort(self.values[windows], axis=1, kind="stable"), axis=1)
        ascending[1::2] = ascending[1::2, ::-1]
        rest = shuffled[num_windowed:]
        rest = rest[np.argsort(self.values[rest], kind="stable")]
        return np.concatenate([ascending.ravel(), rest[::-1] if len(windows) % 2 else rest])

    def breaks(self, count: int, *, epoch: int) -> np.ndarray | None:
        """No breaks but the end."""
        return np.empty(0, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """Name, metric and window of the order."""
        return {"name": WINDOWED, "metric": self.digest, "window": self.window}


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """What an order is made from, beside the values of its metric; named as in the configuration."""

    order: str = SHUFFLED
    """Of an epoch: shuffled; corpus, as they come; sorted or curriculum, by a metric; windowed, batches of sequences
    that a window sorted by it, in random order."""
    pacing: str = ROOT
    """Of a curriculum, how the share of the corpus grows that is drawn from: linear, root, step or natural."""
    pacing_start: float = 0.1
    """That share at the beginning of an epoch."""
    pacing_stages: int = 5
    """Of step: how often it grows. Of natural: groups of difficulty, of which every batch is of one."""
    curriculum_epochs: int | None = None
    """With a curriculum, shuffled afterwards; None: all."""
    window: int = WINDOW
    """Sequences that windowed sorts at a time."""

    def __post_init__(self) -> None:
        check_arguments(get_type_hints(type(self)), vars(self))

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Take the settings of an order from the attributes of ``settings``."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @property
    def needs_metric(self) -> bool:
        """Whether the order follows a metric."""
        return self.order in (SORTED, CURRICULUM, WINDOWED)

    @property
    def is_steady(self) -> bool:
        """Whether lengths are as likely at the beginning of an epoch as at its end, if the corpus is mixed."""
        return self.order not in (SORTED, CURRICULUM) or (self.order == CURRICULUM and self.pacing == NATURAL)


def make_order(settings: OrderSettings | str, difficulty: Difficulty | None = None) -> Order:
    """The order of these settings, or of this name.

    Args:
        settings: or a name of ``ORDERS``.
        difficulty: the metric of those that follow one.

    Raises:
        InputError: there is no such order, or its metric is not given.
    """
    settings = OrderSettings(order=settings) if isinstance(settings, str) else settings
    name = settings.order
    if name not in ORDERS:
        raise InputError(f"no order {name!r}; {nearest(name, ORDERS)}")
    if not settings.needs_metric:
        return Shuffled() if name == SHUFFLED else InCorpusOrder()
    if difficulty is None:
        raise InputError(
            f"{Setting.ORDER}={name} follows a metric, and none is given; one number per sequence is needed"
        )
    values, digest = difficulty.values, difficulty.digest
    if name == SORTED:
        return Sorted(values=values, digest=digest)
    if name == WINDOWED:
        return Windowed(values=values, digest=digest, window=settings.window)
    pacing = Pacing(
        name=settings.pacing,
        start=settings.pacing_start,
        stages=settings.pacing_stages,
        epochs=settings.curriculum_epochs,
    )
    return Curriculum(values=values, digest=digest, pacing=pacing)
