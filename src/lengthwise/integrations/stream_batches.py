"""Global batches of a stream whose length nobody knows, for ``run.steps(batches)``: shuffled in a look-ahead buffer."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from lengthwise.core.arguments import arguments_checked
from lengthwise.core.column_names import TOKENS
from lengthwise.core.errors import InputError
from lengthwise.data.rng import raw_stream
from lengthwise.session.item_values import is_mapping
from lengthwise.session.sequence_units import members_of


class SteppedRun(Protocol):
    """A run, as far as a stream follows it."""

    next_step: int

    @property
    def world(self) -> Any:
        """Has the ``rank`` and the ``size``, the number of ranks."""
        ...


class StreamBatches:
    """The batches that this rank brings of a stream, such as an ``IterableDataset``: ``run.steps(StreamBatches(...))``.

    Every rank reads the whole stream and brings its share of each batch, so batches depend on the stream, the seed and
    the step alone, never on the number of ranks. A run that is resumed, on any number of ranks, goes on where it was:
    what its steps had is read again and passed over. Each item comes once; the last batch may be smaller.
    """

    @arguments_checked
    def __init__(
        self,
        run: SteppedRun,
        stream: Iterable[Any],
        *,
        tokens_per_step: int | None = None,
        sequences_per_step: int | None = None,
        look_ahead: int = 0,
        seed: int = 0,
        first_step: int = 0,
    ) -> None:
        """Take one of the two sizes of a batch.

        Args:
            run: the prepared run, whose ``next_step`` says which batches are done.
            stream: gives the same items in the same order whenever it is iterated: those that ``run.step`` takes.
            tokens_per_step: most tokens of a batch; an item that is over it alone is a batch alone.
            sequences_per_step: items of a batch.
            look_ahead: items that are held to draw from at random; 0: the order of the stream.
            seed: of the draws.
            first_step: the step of the run that gets the first batch.

        Raises:
            InputError: neither or both sizes are given, a number is out of range, or the stream can be read only once.
        """
        sizes = [size for size in (tokens_per_step, sequences_per_step) if size is not None]
        if len(sizes) != 1 or sizes[0] < 1:
            raise InputError(
                f"tokens_per_step={tokens_per_step} and sequences_per_step={sequences_per_step}; give one of them, at "
                "least 1"
            )
        if min(look_ahead, first_step) < 0 or not 0 <= seed < 1 << 64:
            raise InputError(
                f"look_ahead={look_ahead}, first_step={first_step} and seed={seed}; use 0 or more, and for the seed 0 "
                "to 2**64 - 1"
            )
        if isinstance(stream, Iterator):
            raise InputError(
                f"{type(stream).__name__} can be read only once, and a resumed run reads a stream again from its "
                "beginning; give an IterableDataset, or a class with __iter__"
            )
        if not hasattr(stream, "__iter__") and not hasattr(stream, "__getitem__"):
            raise InputError(
                f"stream is {type(stream).__name__}, which has no items; give an IterableDataset or a list"
            )
        self._run, self._stream, self._first_step = run, stream, first_step
        self._tokens, self._sequences, self._look_ahead, self._seed = (
            tokens_per_step, sequences_per_step, look_ahead, seed,
        )  # fmt: skip

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterate over what this rank brings to each step from ``run.next_step`` on."""
        world = self._run.world
        for step, batch in enumerate(self._batches(), self._first_step):
            if step >= self._run.next_step:
                yield batch[world.rank :: world.size]

    def _batches(self) -> Iterator[list[Any]]:
        """The batches of all ranks."""
        source, buffer, number = iter(self._stream), list[Any](), 0
        while True:
            draws, batch, num_tokens = raw_stream(seed=self._seed, epoch=number), list[Any](), 0
            while True:
                while len(buffer) <= self._look_ahead and (item := next(source, buffer)) is not buffer:
                    buffer.append(item)
                if not buffer or len(batch) == self._sequences:
                    break
                place = int(draws.random_raw() % np.uint64(len(buffer)))
                num_tokens += tokens_of(buffer[place]) if self._tokens is not None else 0
                if batch and self._tokens is not None and num_tokens > self._tokens:
                    break
                batch.append(buffer.pop(place))
            if not batch:
                return
            yield batch
            number += 1


def tokens_of(item: Any) -> int:
    """The tokens of an item: a row of ids, a dictionary with such a row, or several that are a unit.

    Raises:
        InputError: it has none.
    """
    members = members_of("an item of the stream", item, slot_tokens=1)
    if members is not None:
        return sum(map(tokens_of, members))
    if is_mapping(item):
        row = next((item[name] for name in TOKENS if item.get(name) is not None), None)
        if row is None:
            raise InputError(
                f"an item of the stream has {', '.join(map(str, item))}, and none of {', '.join(TOKENS)}; tokenise it "
                "first, and call the column of token ids input_ids"
            )
        item = row
    return len(item)
