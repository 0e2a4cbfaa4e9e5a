"""A corpus cut into blocks: what one rank scores at a time, and what is kept when an analysis is killed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.lock import FolderLock
from lengthwise.index.sequence_metrics import MetricFiles, save_array, save_json
from lengthwise.index.settings import differences

FEWEST_BLOCKS, MOST_BLOCKS = 256, 4096
"""Enough for many ranks to end together; one file each."""
_NOTE = "request.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Block ``i`` holds the sequences ``ids[cuts[i] : cuts[i + 1]]``; the same for any number of ranks."""

    ids: np.ndarray
    tokens: np.ndarray
    """Of each of them, as many as are scored."""
    cuts: np.ndarray

    def __len__(self) -> int:
        return len(self.cuts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are scored in all."""
        return int(self.tokens.sum(dtype=np.int64))

    def of(self, number: int) -> np.ndarray:
        """Ids of a block."""
        return self.ids[self.cuts[number] : self.cuts[number + 1]]

    def size(self, *numbers: int) -> tuple[int, int]:
        """Sequences and tokens of some blocks."""
        parts = [self.tokens[self.cuts[number] : self.cuts[number + 1]] for number in numbers]
        return sum(map(len, parts)), sum(int(part.sum(dtype=np.int64)) for part in parts)


def cut_blocks(ids: np.ndarray, tokens: np.ndarray, *, block_cost: int, sequence_cost: int = 0) -> Blocks:
    """Neighbours in ``ids``, which have ``tokens``, in blocks of about equal cost.

    A sequence costs its tokens and ``sequence_cost``. A block costs ``block_cost`` at most, but for its last sequence.
    Of a large corpus it costs as much more as keeps the number of blocks below ``MOST_BLOCKS``, of a small one as much
    less as ``FEWEST_BLOCKS`` need.
    """
    costs = tokens.astype(np.int64) + sequence_cost
    before = np.cumsum(costs) - costs
    total = int(before[-1] + costs[-1])
    block = before // max(min(block_cost, -(-total // FEWEST_BLOCKS)), -(-total // MOST_BLOCKS))
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(block)) + 1, [len(ids)]])
    return Blocks(ids=ids, tokens=tokens, cuts=cuts)


@dataclass(frozen=True, kw_only=True)
class FinishedBlocks:
    """The finished blocks of one analysis, in a folder of their own."""

    files: MetricFiles

    def file(self, number: int) -> Path:
        """Values of block ``number``."""
        return self.files.parts / f"{number:07d}.npy"

    def claim(self, request: dict[str, Any], *, num_blocks: int) -> list[int]:
        """The blocks that are still to be scored, in order.

        Raises:
            InputError: the folder holds blocks of another request.
        """
        begun = self._begun()
        if begun != request:
            if begun and any(self.files.parts.glob("[0-9]*.npy")):
                raise InputError(
                    f"metric {self.files.name!r} of {self.files.index} is half-made by another request "
                    f"({differences(begun, request)}); run the same command as before, choose another --name, or start "
                    "over with --restart"
                )
            self.empty()  # blocks without a request may be of any
            save_json(self.files.parts / _NOTE, request)
        for stray in self.files.parts.glob("*.partial-*"):
            stray.unlink()
        return [number for number in range(num_blocks) if not self.file(number).is_file()]

    def save(self, number: int, values: np.ndarray) -> None:
        """Keep the values of a block, whole or not at all."""
        save_array(self.file(number), values)

    def join(self, blocks: Blocks) -> np.ndarray:
        """[num_sequences] the values of all blocks, in corpus order and in the narrowest type that holds them."""
        parts = [np.load(self.file(number)) for number in range(len(blocks))]
        values = np.empty(len(blocks.ids), dtype=np.result_type(*{part.dtype for part in parts}))
        for number, part in enumerate(parts):
            values[blocks.of(number)] = part
        return values

    def clear(self) -> None:
        """Remove the metric, finished or not."""
        for path in (self.files.info, self.files.order, self.files.values):
            path.unlink(missing_ok=True)
        self.empty()

    def empty(self) -> None:
        """Remove all finished blocks; the folder stays while it is held."""
        for path in self.files.parts.iterdir():
            path.unlink()

    def _begun(self) -> dict[str, Any]:
        note = self.files.parts / _NOTE
        begun: dict[str, Any] = json.loads(note.read_text()) if note.is_file() else {}
        return begun

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the metric; its folder of blocks is made if need be and removed if it is left empty.

        Raises:
            InputError: another process holds it.
        """
        lock = FolderLock(
            self.files.folder / f"{self.files.name}.lock",
            user=f"another analysis that makes metric {self.files.name!r}",
            way_out="wait for it, or choose another --name",
        )
        self.files.folder.mkdir(parents=True, exist_ok=True)
        with lock.held():
            self.files.parts.mkdir(exist_ok=True)
            try:
                yield
            finally:
                if not any(self.files.parts.iterdir()):
                    self.files.parts.rmdir()
