"""Read the items of a slow dataset in worker processes while the rank computes.

They have the dataset as it was when they began, so they begin anew with every epoch: where a dataset gives other items
in another epoch, they see it as this process does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from lengthwise.core.batch import Pack
from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.wrap.collator import PackCollator, SequenceSource

PACKS_AHEAD = 2
"""Micro-batches that each process reads ahead."""

_SPECIAL = "which tokens are never hidden"
"""The name of a column that is no argument of a forward."""
Labels = Callable[[int], np.ndarray]
Item = tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]
"""Tokens, labels and further columns of a sequence."""


class ItemReaders:
    """A source that ``num_workers`` processes of a ``DataLoader`` prefetch from, a micro-batch at a time, in order.

    They know the micro-batches of a step when it starts, and live for an epoch. What is asked for out of turn is read
    on the spot.
    """

    def __init__(
        self,
        source: SequenceSource,
        labels: Labels | None,
        *,
        num_workers: int,
        columns: Mapping[str, Labels] | None = None,
        name: Callable[[int], str] = "item {}".format,
        epoch: Callable[[], Any] = lambda: None,
    ) -> None:
        """``columns``: what else is read of a sequence, by name; ``name``: what an error calls a sequence; ``epoch``:
        that of the step that starts.
        """
        self._items = _Items(source, labels, columns or {}, name)
        self._order, self._num_workers = _Order(), num_workers
        self._epoch, self._begun_in = epoch, epoch()
        self._loader: DataLoader[list[Item]] | None = self._new_loader()
        self._batches: Iterator[list[Item]] = iter(())
        self._waiting: Iterator[tuple[int, ...]] = iter(())
        self._held: dict[int, Item] = {}

    def _new_loader(self) -> DataLoader[list[Item]]:
        return DataLoader(
            self._items,
            sampler=self._order,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            prefetch_factor=PACKS_AHEAD,
        )

    def start(self, packs: Sequence[Pack]) -> None:
        """Start to read the micro-batches of a step; what is left of the step before is dropped."""
        if self._loader is not None and (epoch := self._epoch()) != self._begun_in:
            self.close()
            self._loader, self._begun_in = self._new_loader(), epoch
        self._order.packs = [pack.ids for pack in packs]
        self._waiting = iter(self._order.packs)
        self._batches = iter(()) if self._loader is None or not packs else iter(self._loader)
        self._held = {}

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence of the current micro-batch.

        Raises:
            LengthwiseError: a process could not read one of its sequences.
        """
        return self._of(sequence)[0]

    def labels(self, sequence: int, /) -> np.ndarray:
        """The labels of a sequence of the current micro-batch, whose corpus has labels."""
        return cast(np.ndarray, self._of(sequence)[1])

    def column(self, name: str, sequence: int, /) -> np.ndarray:
        """The values of a further column for a sequence of the current micro-batch."""
        return self._of(sequence)[2][name]

    def close(self) -> None:
        """Shut the worker processes down."""
        self._loader, self._batches = None, iter(())

    def _of(self, sequence: int) -> Item:
        while sequence not in self._held and (ids := next(self._waiting, None)) is not None:
            try:
                self._held = dict(zip(ids, next(self._batches)))
            except Exception as error:
                # frames of the loader would keep it alive, and what garbage collection shuts down waits 5 s a process
                raise error.with_traceback(None) from None
        return self._held[sequence] if sequence in self._held else self._items.read(sequence)


def read_with_workers(
    collator: PackCollator, num_workers: int, *, epoch: Callable[[], Any]
) -> tuple[ItemReaders | None, PackCollator]:
    """Start ``num_workers`` readers of all columns of sequences; return them, and the collator that reads from them.

    ``epoch``: that of the step that starts; the readers begin anew with each.

    Without any, None and the collator as it is.
    """
    if not num_workers:
        return None, collator
    special = {} if collator.special is None else {_SPECIAL: collator.special}
    columns = {**collator.passed, **collator.loss_columns, **special}
    readers = ItemReaders(
        collator.source, collator.labels, num_workers=num_workers, columns=columns, name=collator.name, epoch=epoch
    )
    return readers, replace(
        collator,
        source=readers,
        labels=None if collator.labels is None else readers.labels,
        passed={name: partial(readers.column, name) for name in collator.passed},
        loss_columns={name: partial(readers.column, name) for name in collator.loss_columns},
        special=None if collator.special is None else partial(readers.column, _SPECIAL),
    )


class _Order(Sampler[tuple[int, ...]]):
    """Samples the micro-batches of a step in order."""

    def __init__(self) -> None:
        self.packs: list[tuple[int, ...]] = []

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.packs)

    def __len__(self) -> int:
        return len(self.packs)


class _Items(Dataset[list[Item]]):
    """A dataset whose items are micro-batches: all sequences with the given ids."""

    def __init__(
        self, source: SequenceSource, labels: Labels | None, columns: Mapping[str, Labels], name: Callable[[int], str]
    ) -> None:
        self._source, self._labels, self._columns, self._name = source, labels, columns, name

    def __getitem__(self, ids: tuple[int, ...]) -> list[Item]:
        return [self.read(id) for id in ids]

    def read(self, id: int) -> Item:
        """Read the tokens, labels and columns of one sequence."""
        try:
            labels = None if self._labels is None else self._labels(id)
            return self._source.tokens(id), labels, {name: read(id) for name, read in self._columns.items()}
        except Exception as error:
            raise LengthwiseError(f"{self._name(id)} could not be read: {type(error).__name__}: {error}") from error


def _as_it_is(items: Any) -> Any:
    return items
