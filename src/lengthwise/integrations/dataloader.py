"""A batch sampler for one's own ``DataLoader`` and loop: balanced micro-batches of sequences that each rank has alone.

sampler = lw.BatchSampler([len(row) for row in rows], tokens_per_micro_batch=8192, sequences_per_step=256)
loader = DataLoader(rows, batch_sampler=sampler, collate_fn=...)
for batch in sampler.follow(loader):
    (model(batch).loss * sampler.weight).backward()       # under DistributedDataParallel: sampler.ddp_weight
    if sampler.is_last:
        optimizer.step(); optimizer.zero_grad()
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.utils import data

from lengthwise.config.setting_names import as_option
from lengthwise.core.arguments import arguments_checked, read_shapes
from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch, num_targets
from lengthwise.core.errors import CheckError, InputError, errors_spelt
from lengthwise.core.lengths import LengthIndex, read_lengths, read_targets
from lengthwise.data.batch_budget import Budget
from lengthwise.data.order import OrderSettings, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sort_key import difficulty
from lengthwise.integrations.load_balance import EQUAL_AT, deal
from lengthwise.integrations.shapes_first import ShapesFirstStream
from lengthwise.runtime.comm.world import under_torchrun

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class RankMicroBatch:
    """One micro-batch of this rank."""

    batch: GlobalBatch
    """Of its step."""
    ids: tuple[int, ...]
    weight: float
    is_last: bool
    shape: tuple[int, int] | None
    state: dict[str, Any]
    """Where to go on from it: at its step again, or after it."""


class BatchSampler(data.Sampler[list[int]]):
    """One epoch of lists of dataset indices per iteration; for ``DataLoader(batch_sampler=)``.

    Global batches depend on the seed alone; each is dealt to all ranks by the work of its sequences, the longest first.
    Every rank has as many steps, and at least one micro-batch in each: where there are more ranks than sequences, the
    shortest of the step again, with weight 0. Numbers of micro-batches differ, so gradients are summed at the last one
    (``is_last``; until then ``model.no_sync()`` under DistributedDataParallel).

    Args:
        lengths: of all items.
        tokens_per_micro_batch: budget; with ``padded``, of the longest times their number.
        tokens_per_step: budget of a global batch, or
        sequences_per_step: its size.
        rank: this rank; None: as torch.distributed says.
        num_ranks: of all; None: as torch.distributed says.
        seed: of the order.
        metric: of orders that follow one, a number per item; None: its length.
        padded: the collate function pads to the longest of a micro-batch, instead of packing.
        max_sequences: of a micro-batch, with ``padded``.
        equal_shapes: instead of a budget of the step: it has this many micro-batches over all ranks, padded to one
            shape, see ``shape``; for pipelines.
        shapes: with ``padded``, the only ones that micro-batches have, (rows, length) as those of a
            :class:`~lengthwise.data.size_buckets.SizeBuckets`; see ``shape``. For models compiled for them.
        shapes_first: with ``shapes``, whether those steps of an epoch come first in which ranks meet shapes for the
            first time, for models that compile a shape when it comes; the order depends on the number of ranks.
        objective: what has a loss, as in :func:`lengthwise.prepare`.
        targets: how many tokens of each item have a loss, where labels leave out some; 1 for each item gives the weight
            of a mean over items, such as pairs.
        equal_at: length of a sequence whose attention takes as long as all else; about twelve times the model's
            hidden size, six times without a causal mask.
        ordering: order, pacing, pacing_start, pacing_stages, curriculum_epochs and window, as in
            :class:`~lengthwise.data.order.OrderSettings`.
    """

    @errors_spelt(as_option)
    @arguments_checked
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
        metric: Sequence[float] | np.ndarray | None = None,
        padded: bool = False,
        max_sequences: int | None = None,
        equal_shapes: int | None = None,
        shapes: Iterable[tuple[int, int]] | None = None,
        shapes_first: bool = False,
        objective: str = NEXT_TOKEN,
        targets: Sequence[int] | np.ndarray | None = None,
        equal_at: int = EQUAL_AT,
        **ordering: Any,
    ) -> None:
        """For a dataset whose item i has ``lengths[i]`` tokens; arguments are explained above.

        Raises:
            InputError: budgets are contradictory, an item is over the budget, or the rank is not known.
        """
        index = _one_each(lengths)
        self._rank, self._num_ranks = _place(rank, num_ranks)
        _check_items(index, tokens_per_micro_batch)
        if equal_at < 1:
            raise InputError(f"equal_at={equal_at}: the length of a sequence is at least 1 token")
        self._lengths, self._budget = index.lengths, tokens_per_micro_batch
        self._padded = _padded_budget(
            tokens_per_micro_batch,
            padded=padded,
            max_sequences=max_sequences,
            equal_shapes=equal_shapes,
            num_ranks=self._num_ranks,
        )
        self._shapes = None if shapes is None else _lattice(shapes, self._padded, index.max_length)
        self._equal_at = equal_at
        self._targets = None if targets is None else read_targets(targets, len(index))
        settings = OrderSettings(**ordering)
        self._new_stream: Callable[[], Any] = partial(
            Sampler,
            index,
            seed=seed,
            tokens_per_step=tokens_per_step,
            sequences_per_step=sequences_per_step,
            budget=self._padded if equal_shapes else None,
            order=make_order(settings, difficulty(metric, index, settings)),
            objective=objective,
        )
        if shapes_first:
            if self._shapes is None:
                raise InputError("shapes_first=True is for micro-batches of few shapes; give shapes, or leave it out")
            self._new_stream = partial(ShapesFirstStream, self._new_stream, self._met_in)
        self._state = self._new_stream().state_dict()
        self._given: deque[RankMicroBatch] = deque()
        self._current: RankMicroBatch | None = None

    @property
    def weight(self) -> float:
        """Weight of the last list's mean loss: its share of the step's targets. Those of a step sum to 1 over ranks."""
        return self._part.weight

    @property
    def ddp_weight(self) -> float:
        """The weight times the ranks, where gradients are averaged over ranks, as DistributedDataParallel does."""
        return self._part.weight * self._num_ranks

    @property
    def is_last(self) -> bool:
        """Whether the last list ends its step on this rank."""
        return self._part.is_last

    @property
    def step(self) -> int:
        """Number of its step, from 0 over all epochs."""
        return self.batch.step

    @property
    def batch(self) -> GlobalBatch:
        """The global batch of the last list's step, of all ranks: what a learning-rate may follow."""
        return self._part.batch

    @property
    def shape(self) -> tuple[int, int] | None:
        """With ``equal_shapes`` or ``shapes``: rows and length to pad the last list to; None: as it comes."""
        return self._part.shape

    @property
    def _part(self) -> RankMicroBatch:
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

    def _reach(self, part: RankMicroBatch) -> None:
        self._current, self._state = part, part.state

    def _epoch(self) -> Iterator[RankMicroBatch]:
        """What is left of an epoch for this rank."""
        stream = self._new_stream()
        stream.load_state_dict(self._state)
        epoch = stream.epoch
        while stream.epoch == epoch:
            before = stream.state_dict()
            batch = next(stream)
            cut = self._cut(batch, self._rank)
            for number, (ids, weight) in enumerate(cut):
                is_last = number == len(cut) - 1
                state = stream.state_dict() if is_last else before
                shape = self._shape_of(ids, batch)
                yield RankMicroBatch(batch=batch, ids=ids, weight=weight, is_last=is_last, shape=shape, state=state)

    def _shape_of(self, ids: tuple[int, ...], batch: GlobalBatch) -> tuple[int, int] | None:
        if self._shapes is not None:
            return self._shapes[self._smallest(int(self._lengths[list(ids)].max()))]
        if self._padded is None or self._padded.equal_shapes is None:
            return None
        return -(-len(batch.ids) // self._padded.equal_shapes), max(batch.lengths)

    def _met_in(self, batch: GlobalBatch) -> set[Hashable]:
        """Ranks and the shapes that they meet in a step."""
        return {
            (rank, self._shape_of(ids, batch)) for rank in range(self._num_ranks) for ids, _ in self._cut(batch, rank)
        }

    def _cut(self, batch: GlobalBatch, rank: int) -> list[tuple[tuple[int, ...], float]]:
        """A rank's micro-batches of a step, and their weights."""
        total = max(1, sum(self._count(i, batch.objective) for i in batch.ids))
        nothing = ((min(zip(batch.lengths, batch.ids))[1],), 0.0)
        if self._padded is not None and self._padded.equal_shapes is not None:
            count = self._padded.equal_shapes
            edges = [len(batch.ids) * number // count for number in range(count + 1)]
            lists = [batch.ids[start:end] for start, end in pairwise(edges)][rank :: self._num_ranks]
        else:
            lists = deal(batch, self._num_ranks, max_tokens=self._budget, equal_at=self._equal_at)[rank]
            lists = lists if self._padded is None else self._cut_padded([i for ids in lists for i in ids], self._padded)
        counted = [
            (ids, sum(self._count(i, batch.objective) for i in ids) / total) if ids else nothing for ids in lists
        ]
        return counted or [nothing]

    def _count(self, item: int, objective: str) -> int:
        if self._targets is not None:
            return int(self._targets[item])
        return num_targets((int(self._lengths[item]),), objective=objective)

    def _smallest(self, length: int) -> int:
        """Which of the shapes, the smallest that holds a sequence of ``length``."""
        assert self._shapes is not None, "there are some"
        return next(number for number, (_, longest) in enumerate(self._shapes) if longest >= length)

    def _cut_padded(self, ids: list[int], budget: Budget) -> list[tuple[int, ...]]:
        """Longest first, as many together as stay within the budget when all are as long as the first."""
        ordered = sorted(ids, key=lambda i: (-int(self._lengths[i]), i))
        if self._shapes is not None:
            cut_to_shapes = []
            while ordered:
                rows, _ = self._shapes[self._smallest(int(self._lengths[ordered[0]]))]
                cut_to_shapes.append(tuple(ordered[:rows]))
                ordered = ordered[rows:]
            return cut_to_shapes
        cut = budget.cut(self._lengths[ordered])
        return [tuple(ordered[start:end]) for start, end in zip(cut.starts.tolist(), cut.ends.tolist())]


def _padded_budget(
    tokens: int, *, padded: bool, max_sequences: int | None, equal_shapes: int | None, num_ranks: int
) -> Budget | None:
    """The budget of a padded micro-batch; None where sequences are packed."""
    if not padded:
        for name, value in {"max_sequences": max_sequences, "equal_shapes": equal_shapes}.items():
            if value is not None:
                raise InputError(f"{name}={value} is of micro-batches that are padded; give padded=True")
        return None
    if equal_shapes is not None and equal_shapes % num_ranks:
        raise InputError(
            f"equal_shapes={equal_shapes} micro-batches of a step cannot be shared evenly by {num_ranks} ranks; use a "
            f"multiple of {num_ranks}"
        )
    return Budget(tokens=tokens, padded=True, max_sequences=max_sequences, equal_shapes=equal_shapes)


def _lattice(shapes: Iterable[tuple[int, int]], budget: Budget | None, longest: int) -> list[tuple[int, int]]:
    """The shapes, the shortest rows first.

    Raises:
        InputError: micro-batches are not padded, or have a shape already; a shape is over their budget; none is long
            enough.
    """
    sorted_shapes = sorted(read_shapes(shapes), key=lambda shape: shape[1])
    if budget is None or budget.equal_shapes is not None or budget.max_sequences is not None:
        raise InputError("shapes need padded=True, and say what equal_shapes and max_sequences would; leave those out")
    if not sorted_shapes:
        raise InputError("shapes is empty; leave it out, or make some: lengthwise.data.size_buckets.padded_lattice")
    if sorted_shapes[-1][1] < longest:
        raise InputError(
            f"an item has {longest:,} tokens, the longest of {len(sorted_shapes)} shapes {sorted_shapes[-1][1]:,}; "
            "make them of all lengths: lengthwise.data.size_buckets.padded_lattice"
        )
    for rows, length in sorted_shapes:
        if rows < 1 or rows * length > (budget.tokens or 0):
            raise InputError(
                f"the shape {rows} x {length:,} has {rows * length:,} tokens, over "
                f"tokens_per_micro_batch={budget.tokens:,}; make the shapes with this budget"
            )
    return sorted_shapes


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


def _one_each(lengths: Sequence[int] | np.ndarray) -> LengthIndex:
    """The lengths.

    Raises:
        InputError: they are none, or some items have several.
    """
    items = enumerate(lengths) if isinstance(lengths, Sequence | np.ndarray) and not isinstance(lengths, str) else ()
    if (several := next((number for number, length in items if np.ndim(length)), None)) is not None:
        raise InputError(
            f"item {several} has {np.size(lengths[several])} lengths; give each item one number, of a unit of several "
            "sequences the sum of theirs, with targets=[1, 1, ...] for the weight of a mean over units"
        )
    return LengthIndex(lengths=read_lengths(lengths).lengths.astype(np.int64))


def _check_items(index: LengthIndex, budget: int) -> None:
    """Raise ``InputError`` if an item is over the budget of a micro-batch."""
    if index.max_length > budget:
        longest = int(np.argmax(index.lengths))
        raise InputError(
            f"item {longest} has {index.max_length:,} tokens, over tokens_per_micro_batch={budget:,}; raise it, cut "
            "the item, or let ranks share it: lengthwise.prepare"
        )
