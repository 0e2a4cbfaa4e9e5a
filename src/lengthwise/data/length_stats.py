"""Statistics of a corpus's lengths: padding, imbalance of attention, and what a limit on length would cut."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lengthwise.core.lengths import LengthIndex
from lengthwise.data.order import epoch_order

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99, 99.9)
BATCH_SIZES = (2, 4, 8, 16, 32)
MAX_LENGTHS = tuple(1024 << doublings for doublings in range(8))
"""1K to 128K tokens; K is 1024."""

_EDGES = MAX_LENGTHS


@dataclass(frozen=True, kw_only=True)
class LengthStatsBin:
    """Sequences of ``low <= length < high`` (None: no end)."""

    low: int
    high: int | None
    num_sequences: int
    num_tokens: int
    share_of_sequences: float
    share_of_tokens: float


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Share of computed tokens that is padding when batches of ``batch_size`` are padded to their longest sequence."""

    batch_size: int
    random_order: float
    sorted_order: float


@dataclass(frozen=True, kw_only=True)
class LengthLimitEffect:
    """What a limit of ``max_length`` tokens meets."""

    max_length: int
    sequences_over: int
    share_of_sequences: float
    share_of_tokens_in_them: float
    """Tokens of the sequences over the limit: what `drop` loses."""
    share_of_tokens_beyond: float
    """Tokens past the limit: what `truncate` loses."""


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Everything ``lengthwise stats`` shows."""

    digest: str
    num_sequences: int
    num_tokens: int
    min_length: int
    max_length: int
    mean_length: float
    median_length: float
    percentiles: dict[str, float]
    histogram: tuple[LengthStatsBin, ...]
    padding: tuple[Padding, ...]
    attention_imbalance: float
    imbalance_ranks: int
    cuts: tuple[LengthLimitEffect, ...]
    num_loss_tokens: int | None = None
    """Tokens that have a loss, where the index says which; none: all but the first of each sequence."""
    sequences_without_loss: int | None = None
    """Sequences none of whose tokens has a loss, such as those that a limit on length has cut."""

    def to_json(self) -> dict[str, Any]:
        """Plain values of the statistics, for JSON."""
        return asdict(self)


def length_stats(
    index: LengthIndex, *, max_lengths: tuple[int, ...] = MAX_LENGTHS, num_ranks: int = 8, seed: int = 0
) -> LengthStats:
    """Statistics of a corpus; a function of the lengths and ``seed`` (which orders them) alone."""
    lengths = index.lengths.astype(np.int64)
    shuffled = lengths[epoch_order(len(lengths), seed=seed, epoch=0)]
    ascending = np.sort(lengths)
    return LengthStats(
        digest=index.digest,
        num_sequences=len(lengths),
        num_tokens=index.num_tokens,
        min_length=int(ascending[0]),
        max_length=index.max_length,
        mean_length=index.num_tokens / len(lengths),
        median_length=float(np.median(ascending)),
        percentiles={f"p{percent:g}": float(np.percentile(ascending, percent)) for percent in PERCENTILES},
        histogram=histogram(lengths),
        padding=tuple(
            Padding(
                batch_size=size,
                random_order=padding_share(shuffled, batch_size=size),
                sorted_order=padding_share(ascending, batch_size=size),
            )
            for size in BATCH_SIZES
        ),
        attention_imbalance=attention_imbalance(shuffled, num_ranks=num_ranks),
        imbalance_ranks=num_ranks,
        cuts=tuple(_cut(lengths, limit) for limit in max_lengths),
        num_loss_tokens=None if index.targets is None else int(index.targets.sum()),
        sequences_without_loss=None if index.targets is None else int((index.targets == 0).sum()),
    )


def padding_share(lengths: np.ndarray, *, batch_size: int) -> float:
    """Padding over computed tokens when consecutive ``batch_size`` sequences are padded to the longest of them."""
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths, starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return 1.0 - float(lengths.sum()) / float((longest * sizes).sum())


def attention_imbalance(lengths: np.ndarray, *, num_ranks: int) -> float:
    """How much longer causal attention takes than if its work were spread evenly over ``num_ranks``.

    Sequences, in the order given, are laid end to end into packs of at most max(lengths) tokens (a sequence that no
    longer fits opens the next pack). Packs are dealt to ranks in turn, one a rank and step, so that ranks have near
    equal numbers of tokens. The work of a pack is the sum of its squared lengths, and a step lasts as long as its
    busiest rank: the result is sum over steps of the maximum over ranks / sum over steps of the mean over ranks,
    1 at best and ``num_ranks`` at worst. A last, incomplete step counts only if it is the only one.
    """
    tokens_before = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.searchsorted(tokens_before, tokens_before[:-1] + int(lengths.max()), side="right") - 1
    end_of = ends.tolist()
    starts, position = [], 0
    while position < len(end_of):
        starts.append(position)
        position = end_of[position]
    work = np.add.reduceat(lengths.astype(np.float64) ** 2, starts)
    num_steps = max(len(work) // num_ranks, 1)
    padded = np.zeros(num_steps * num_ranks)
    padded[: len(work)] = work[: len(padded)]
    steps = padded.reshape(num_steps, num_ranks)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())


def histogram(lengths: np.ndarray, *, edges: tuple[int, ...] = _EDGES) -> tuple[LengthStatsBin, ...]:
    """Sequences and tokens between consecutive ``edges``, below the first and from the last on."""
    lows, highs = (0, *edges), (*edges, None)
    bin_of = np.searchsorted(edges, lengths, side="right")
    counts = np.bincount(bin_of, minlength=len(lows))
    tokens = np.bincount(bin_of, weights=lengths, minlength=len(lows))
    return tuple(
        LengthStatsBin(
            low=low,
            high=high,
            num_sequences=int(count),
            num_tokens=int(num_tokens),
            share_of_sequences=float(count / counts.sum()),
            share_of_tokens=float(num_tokens / tokens.sum()),
        )
        for low, high, count, num_tokens in zip(lows, highs, counts, tokens)
    )


def _cut(lengths: np.ndarray, max_length: int) -> LengthLimitEffect:
    over = lengths[lengths > max_length]
    num_tokens = int(lengths.sum())
    return LengthLimitEffect(
        max_length=max_length,
        sequences_over=len(over),
        share_of_sequences=len(over) / len(lengths),
        share_of_tokens_in_them=int(over.sum()) / num_tokens,
        share_of_tokens_beyond=(int(over.sum()) - len(over) * max_length) / num_tokens,
    )
