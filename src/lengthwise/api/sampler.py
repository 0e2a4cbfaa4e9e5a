"""A batch sampler for one's own ``DataLoader`` and loop: balanced micro-batches of sequences that each rank has alone.

sampler = lw.BatchSampler([len(row) for row in rows], tokens_per_micro_batch=8192, sequences_per_step=256)
loader = DataLoader(rows, batch_sampler=sampler, collate_fn=...)
for batch in sampler.follow(loader):
    (model(batch).loss * sampler.weight).backward()       # under DistributedDataParallel: sampler.ddp_weight
    if sampler.is_last:
        optimizer.step(); optimizer.zero_grad()
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.utils import data

from lengthwise.api.balance import EQUAL_AT, deal
from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch, num_targets
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.order import make_order
from lengthwise.data.sampler import Sampler
from lengthwise.runtime.comm.world import under_torchrun

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One micro-batch of this rank."""

    step: int
    ids: tuple[int, ...]
    weight: float
    is_last: bool
    state: dict[str, Any]
    """Where to go on from it: at its step again, or after it."""


class BatchSampler(data.Sampler[list[int]]):
    """One epoch of lists of dataset indices per iteration; for ``DataLoader(batch_sampler=)``.

    Global batches depend on the seed alone; each is dealt to all ranks by the work of its sequences, the longest first.
    Every rank has as many steps, and at least one micro-batch in each: where there are more ranks than sequences, the
    shortest of the step again, with weight 0. Numbers of micro-batches differ, so gradients are summed at the last one
    (``is_last``; until then ``model.no_sync()`` under DistributedDataParallel).
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        tokens_per_micro_batch: int,
        tokens_per_step: int | None = None,
        sequences_per_step: int | None = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        seed: int = 0,
        order: str = "shuffled",
        padded: bool = False,
        objective: str = NEXT_TOKEN,
        targets: Sequence[int] | np.ndarray | None = None,
        equal_at: int = EQUAL_AT,
    ) -> None:
        """For a dataset whose item i has ``lengths[i]`` tokens.

        Args:
            lengths: of all items.
            tokens_per_micro_batch: budget; with ``padded``, of the longest times their number.
            tokens_per_step: budget of a global batch, or
            sequences_per_step: its size.
            rank: this rank; None: as torch.distributed says.
            num_ranks: of all; None: as torch.distributed says.
            seed: of the order.
            order: of an epoch: shuffled, or corpus.
            padded: the collate function pads to the longest of a micro-batch, instead of packing.
            objective: what has a loss, as in :func:`lengthwise.prepare`.
            targets: how many tokens of each item have a loss, where labels leave out some.
            equal_at: length of a sequence whose attention takes as long as all else; about twelve times the model's
                hidden size, six times without a causal mask.

        Raises:
            InputError: budgets are contradictory, an item is over the budget, or the rank is not known.
        """
        index = LengthIndex(lengths=np.asarray(lengths, dtype=np.int64))
        self._rank, self._num_ranks = _place(rank, num_ranks)
        _check_items(index, tokens_per_micro_batch, targets)
        self._lengths, self._budget, self._padded = index.lengths, tokens_per_micro_batch, padded
        self._equal_at = equal_at
        self._targets = None if targets is None else np.asarray(targets)
        self._new_stream = partial(
            Sampler,
            index,
            seed=seed,
            tokens_per_step=tokens_per_step,
            sequences_per_step=sequences_per_step,
            order=make_order(order),
            objective=objective,
        )
        self._state = self._new_stream().state_dict()
        self._given: deque[Part] = deque()
        self._current: Part | None = None

    @property
    def weight(self) -> float:
        """Of the mean loss of the last list: its share of the step's targets. All of a step's, over ranks, sum to 1."""
        return self._part.weight

    @property
    def ddp_weight(self) -> float:
        """The same where gradients are averaged over ranks, as DistributedDataParallel does."""
        return self._part.weight * self._num_ranks

    @property
    def is_last(self) -> bool:
        """Whether the last list ends its step on this rank."""
        return self._part.is_last

    @property
    def step(self) -> int:
        """Number of its step, from 0 over all epochs."""
        return self._part.step

    @property
    def _part(self) -> Part:
        if self._current is None:
            raise CheckError("no micro-batch was given out yet")
        return self._current

    def __iter__(self) -> Iterator[list[int]]:
        self._given.clear()
        for part in self._epoch():
            self._given.append(part)
            self._reach(part)
            yield list(part.ids)

    def __len__(self) -> int:
        """Micro-batches that the next iteration gives this rank. Deals all of it."""
        return sum(1 for _ in self._epoch())

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a ``DataLoader``, with ``weight`` and ``is_last`` of each while it is the current one.

        A loader with workers asks for lists ahead of time; without ``follow`` the two are those of the list that was
        asked for last.
        """
        for batch in batches:
            self._reach(self._given.popleft())
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins: at the step of the last list, or after it if that was its last one."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the sampler that gave ``state`` was, with any number of ranks.

        Raises:
            InputError: the state is of other lengths, another seed or budget.
        """
        stream = self._new_stream()
        stream.load_state_dict(state)
        self._state, self._current = stream.state_dict(), None

    def _reach(self, part: Part) -> None:
        self._current, self._state = part, part.state

    def _epoch(self) -> Iterator[Part]:
        """What is left of an epoch for this rank."""
        stream = self._new_stream()
        stream.load_state_dict(self._state)
        epoch = stream.epoch
        while stream.epoch == epoch:
            before = stream.state_dict()
            batch = next(stream)
            cut = self._cut(batch)
            for number, (ids, weight) in enumerate(cut):
                is_last = number == len(cut) - 1
                state = stream.state_dict() if is_last else before
                yield Part(step=batch.step, ids=ids, weight=weight, is_last=is_last, state=state)

    def _cut(self, batch: GlobalBatch) -> list[tuple[tuple[int, ...], float]]:
        """This rank's micro-batches of a step, and their weights."""
        held = deal(batch, self._num_ranks, max_tokens=self._budget, equal_at=self._equal_at)[self._rank]
        if self._padded:
            held = self._cut_padded([i for ids in held for i in ids])
        if not held:
            return [((min(zip(batch.lengths, batch.ids))[1],), 0.0)]
        total = sum(self._count(i, batch.objective) for i in batch.ids)
        return [(ids, sum(self._count(i, batch.objective) for i in ids) / max(1, total)) for ids in held]

    def _count(self, item: int, objective: str) -> int:
        if self._targets is not None:
            return int(self._targets[item])
        return num_targets((int(self._lengths[item]),), objective=objective)

    def _cut_padded(self, ids: list[int]) -> list[tuple[int, ...]]:
        """Longest first, as many together as stay within the budget when all are as long as the first."""
        ordered = sorted(ids, key=lambda i: (-int(self._lengths[i]), i))
        cut: list[tuple[int, ...]] = []
        while ordered:
            count = self._budget // int(self._lengths[ordered[0]])
            cut.append(tuple(ordered[:count]))
            ordered = ordered[count:]
        return cut


def _place(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (num_ranks is None):
        raise InputError("give both rank and num_ranks, or neither")
    if rank is None or num_ranks is None:
        if not dist.is_initialized():
            if under_torchrun():
                raise InputError(
                    "torch.distributed is not initialized yet, so the rank is not known; call init_process_group "
                    "first, or give rank and num_ranks"
                )
            return 0, 1
        return dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < num_ranks:
        raise InputError(f"rank {rank} of {num_ranks}: ranks count from 0")
    return rank, num_ranks


def _check_items(index: LengthIndex, budget: int, targets: Sequence[int] | np.ndarray | None) -> None:
    """Raise ``InputError`` if an item is over the budget of a micro-batch, or targets are not one number for each."""
    if index.max_length > budget:
        longest = int(np.argmax(index.lengths))
        raise InputError(
            f"item {longest} has {index.max_length:,} tokens, over tokens_per_micro_batch={budget:,}; raise it, cut "
            "the item, or let ranks share it: lengthwise.prepare"
        )
    if targets is not None and len(targets) != len(index):
        raise InputError(f"{len(targets):,} numbers of targets for {len(index):,} items; give one each")
