"""Sequences that begin alike, made of the corpus' tokens: to check a model on what its items share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from lengthwise.core.batch import Pack
from lengthwise.runtime.loop.run_state import MicroBatchMaker
from lengthwise.runtime.wrap.collator import with_shared_prefixes
from lengthwise.runtime.wrap.unit_members import Units

PATHS = ((range(6), range(6, 9), range(20, 24)), (range(6), range(6, 9), range(30, 35)), (range(6), range(40, 47)))
"""Of each sequence, which of the corpus' first tokens it consists of: all share six, and two of them three more."""
SHORT_PATHS = (
    (range(1), range(1, 2), range(20, 22)),
    (range(1), range(1, 2), range(30, 32)),
    (range(1), range(40, 43)),
)
"""The same, where no sequence of the corpus has so many tokens."""


def _paths(longest: int | None) -> Sequence[Sequence[range]]:
    return PATHS if longest is None or longest >= max(sum(map(len, path)) for path in PATHS) else SHORT_PATHS


@contextmanager
def branches_alone(run: MicroBatchMaker) -> Iterator[Pack]:
    """Within, the run's sequences 0, 1 and 2 begin alike, and are computed each by itself; gives their pack."""
    before = run.collator
    paths = _paths(before.longest)
    rows = [np.concatenate([list(part) for part in path]) for path in paths]

    def column(values_of: Callable[[int], np.ndarray], sequence: int) -> np.ndarray:
        values = np.asarray(values_of(0))
        return values[rows[sequence] % len(values)]

    def labels(sequence: int) -> np.ndarray:
        values = column(before.source.tokens, sequence).astype(np.int64)
        num_shared = sum(map(len, paths[sequence][:-1]))
        values[: num_shared + 1] = before.ignore_index
        return values

    class Source:
        """The tokens of the sequences."""

        def tokens(self, sequence: int, /) -> np.ndarray:
            """The tokens of one of them."""
            return column(before.source.tokens, sequence)

    run.collator = replace(
        before,
        source=Source(),
        labels=labels,
        passed={name: partial(column, values_of) for name, values_of in before.passed.items()},
        loss_columns={name: partial(column, values_of) for name, values_of in before.loss_columns.items()},
        special=None,
        shared=None,
    )
    try:
        yield Pack(ids=tuple(range(len(paths))), lengths=tuple(map(len, rows)))
    finally:
        run.collator = before


@contextmanager
def branches_shared(run: MicroBatchMaker) -> Iterator[Pack]:
    """Within, the run's unit 0 has these sequences, and what they share once; gives its pack."""
    with branches_alone(run) as pack:
        units = Units(offsets=np.array([0, len(pack.ids)]), lengths=np.array(pack.lengths))
        run.collator = with_shared_prefixes(replace(run.collator, units=units))
        assert run.collator.shared is not None, "it was made so"
        yield Pack(ids=(0,), lengths=(run.collator.shared.tree(0).num_slots,))
