"""Score every sequence of an index on all ranks; killed at any moment, the same request goes on where it was."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.index.sequence_metrics import MetricFiles, finish, open_metric, save_array
from lengthwise.index.settings import differences
from lengthwise.index.store import TokenStore
from lengthwise.runtime.analyze.blocks import Blocks, FinishedBlocks
from lengthwise.runtime.analyze.length import LengthScorer
from lengthwise.runtime.analyze.request import AnalysisRequest
from lengthwise.runtime.analyze.user_function import FunctionScorer
from lengthwise.runtime.analyze.work_queue import WorkQueue, from_first, on_all
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.sort.deal_rows import write_ordered
from lengthwise.runtime.sort.rows import sort_rows

Progress = Callable[[int, int, int], None]
"""Called on the first rank with the sequences and tokens that all ranks have scored, and the tokens in all."""


class Scorer(Protocol):
    """Makes the values of a metric, block by block."""

    def identity(self) -> dict[str, Any]:
        """Plain values that identify the scores: equal identities, equal scores."""
        ...

    def blocks(self) -> Blocks:
        """Blocks of the whole corpus, in the order in which they are scored."""
        ...

    def start(self, device: torch.device) -> None:
        """Make ready to score on ``device``."""
        ...

    def score(self, ids: np.ndarray) -> np.ndarray:
        """One finite number per sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The outcome of :func:`analyze`."""

    info: dict[str, Any]
    """What NAME.json holds."""
    was_up_to_date: bool
    num_resumed_blocks: int = 0
    """Blocks that an earlier, interrupted analysis had finished."""


def make_scorer(request: AnalysisRequest, store: TokenStore) -> Scorer:
    """Make the scorer of the metric that ``request`` asks for; loads no model yet.

    Raises:
        InputError: the index or the model or the function cannot be used.
    """
    if request.kind == "loss":
        from lengthwise.runtime.analyze.sequence_loss import (
            LossScorer,  # checkpoints and all: seconds that others need not wait
        )

        return LossScorer(request, store)
    if request.kind == "length":
        return LengthScorer(store)
    if not store.has_tokens:
        raise InputError(f"{store.path} holds lengths alone; {request.target} needs an index with tokens")
    return FunctionScorer(request, store)


def analyze(
    request: AnalysisRequest,
    store: TokenStore,
    world: DistContext,
    *,
    restart: bool = False,
    on_progress: Progress | None = None,
) -> Analysis:
    """Make the metric that ``request`` asks for, and save it beside the index. Every rank calls this.

    An interrupted analysis goes on, with any number of ranks, and gives the same values to the bit; a finished metric
    of the same request is left as it is.

    Raises:
        LengthwiseError: on all ranks, what went wrong on any of them. Finished blocks are kept.
    """
    started = time.perf_counter()
    parts = FinishedBlocks(files=MetricFiles(index=store.path, name=request.name))
    scorer = on_all(world, lambda: make_scorer(request, store))
    blocks = scorer.blocks()
    with ExitStack() as stack:

        def begin() -> tuple[dict[str, Any], list[int] | None]:
            identity = scorer.identity()
            stack.enter_context(parts.held())
            return identity, _begin(parts, identity, store, num_blocks=len(blocks), restart=restart)

        identity, pending = from_first(world, begin)
        if pending is None:
            return Analysis(info=parts.files.read_info(), was_up_to_date=True)
        if pending:
            on_all(world, lambda: scorer.start(world.device))
        _score(scorer, blocks, pending, parts=parts, world=world, on_progress=on_progress)
        from_first(world, lambda: save_array(parts.files.values, parts.join(blocks)))
        _write_order(parts.files, world)
        details = {
            "metric": request.metric,
            **identity,
            "seconds": time.perf_counter() - started,
            "num_ranks": world.size,
            "num_blocks": len(blocks),
            "num_resumed_blocks": len(blocks) - len(pending),
        }
        info = from_first(world, lambda: _finish(parts, store, details))
    return Analysis(info=info, was_up_to_date=False, num_resumed_blocks=len(blocks) - len(pending))


def _begin(
    parts: FinishedBlocks, identity: dict[str, Any], store: TokenStore, *, num_blocks: int, restart: bool
) -> list[int] | None:
    """The blocks to score; None if the metric is finished."""
    if restart:
        parts.clear()
    if not parts.files.info.is_file():
        return parts.claim({**identity, "index_digest": store.digest}, num_blocks=num_blocks)
    info = open_metric(parts.files.index, parts.files.name, digest=store.digest).info
    if (before := {key: info.get(key) for key in identity}) != identity:
        raise InputError(
            f"metric {parts.files.name!r} of {store.path} is another one ({differences(before, identity)}); choose "
            "another --name, or replace it with --restart"
        )
    parts.empty()  # killed between the last file and the removal of the blocks
    return None


def _score(
    scorer: Scorer,
    blocks: Blocks,
    pending: list[int],
    *,
    parts: FinishedBlocks,
    world: DistContext,
    on_progress: Progress | None,
) -> None:
    deal = WorkQueue(world)
    total = blocks.num_tokens
    show = on_progress if on_progress is not None and world.is_first else _silent
    if world.is_first:
        deal.add(*blocks.size(*sorted(set(range(len(blocks))) - set(pending))))

    def score() -> None:
        try:
            while (turn := deal.take()) < len(pending):
                number = pending[turn]
                parts.save(number, scorer.score(blocks.of(number)))
                show(*deal.add(*blocks.size(number)), total)
        except BaseException:
            deal.stop()
            raise
        finally:
            deal.end()
        deal.wait(lambda: show(*deal.add(0, 0), total))

    on_all(world, score)


def _silent(sequences: int, tokens: int, total: int) -> None:
    pass


def _write_order(files: MetricFiles, world: DistContext) -> None:
    """Ids from the smallest to the largest value, equal ones by id, sorted and written by all ranks together."""

    def read() -> tuple[Tensor, Tensor]:
        values = np.load(files.values, mmap_mode="r")
        start, end = (place * len(values) // world.size for place in (world.rank, world.rank + 1))
        ids = torch.arange(start, end, device=world.device).unsqueeze(1)
        return ids, torch.from_numpy(np.array(values[start:end])).to(world.device)

    ids, values = on_all(world, read)
    write_ordered(sort_rows(ids, key=values), files.order, flat=True)


def _finish(parts: FinishedBlocks, store: TokenStore, details: dict[str, Any]) -> dict[str, Any]:
    info = finish(parts.files, index_digest=store.digest, lengths=store.lengths.lengths, details=details)
    parts.empty()
    return info
