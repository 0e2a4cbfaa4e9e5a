"""What ``max_length`` does to a corpus: refuse, drop, truncate or split what is longer, and count every token of it."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lengthwise.config.choices import OverLength
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.wording import counted


@dataclass(frozen=True, kw_only=True)
class LengthLedger:
    """What became of every token: ``tokens_in == tokens_out + tokens_dropped + tokens_cut + tokens_held_out``."""

    rule: OverLength
    max_length: int | None
    sequences_in: int
    tokens_in: int
    dropped: int = 0
    """Sequences left out whole."""
    tokens_dropped: int = 0
    truncated: int = 0
    """Sequences whose end was cut off."""
    tokens_cut: int = 0
    split: int = 0
    """Sequences cut into pieces, of which every token is kept."""
    pieces: int = 0
    """Pieces the split sequences became."""
    held_out: int = 0
    """Sequences that ``data.validation_share`` keeps for the other of training and validation."""
    tokens_held_out: int = 0
    sequences_out: int
    tokens_out: int

    @property
    def in_words(self) -> str:
        """What became of sequences over the limit; empty if every token is kept in one piece."""
        if not (self.dropped or self.truncated or self.split):
            return ""
        limit, cut = f"{self.max_length:,}", counted(self.tokens_cut, "token")
        return {
            "drop": f"{counted(self.dropped, 'sequence')} ({counted(self.tokens_dropped, 'token')}) over {limit} left "
            "out",
            "truncate": f"{counted(self.truncated, 'sequence')} cut at {limit}, losing {cut}",
            "split": f"{counted(self.split, 'sequence')} over {limit} split into {counted(self.pieces, 'piece')}",
        }[self.rule]

    def to_json(self) -> dict[str, Any]:
        """Plain values of the ledger, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusView:
    """The sequences a rule makes of a corpus: ``lengths[i]`` tokens from ``starts[i]`` of sequence ``base_ids[i]``."""

    lengths: LengthIndex
    base_ids: np.ndarray
    starts: np.ndarray
    ledger: LengthLedger

    def __post_init__(self) -> None:
        for name in ("base_ids", "starts"):
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)


def apply_max_length(lengths: LengthIndex, *, max_length: int | None, rule: OverLength) -> CorpusView:
    """Sequences of at most ``max_length`` tokens under ``rule``, in corpus order.

    ``split`` makes ceil(length / max_length) pieces that differ by at most one token. The view's digest covers the
    base digest, the rule and the limit; without a limit it is the base digest.

    Raises:
        InputError: rule ``error`` and a sequence is over the limit, or no sequence is left.
    """
    if max_length is None:
        return _whole(lengths, rule=rule)
    if max_length < 1:
        raise InputError(f"{Setting.MAX_LENGTH} {max_length}: at least 1 token is needed")
    is_over = lengths.lengths > max_length
    if rule == "error" and is_over.any():
        _refuse(lengths, is_over, max_length)
    if rule == "drop":
        return _drop(lengths, is_over, max_length)
    if rule == "split":
        return _split(lengths, max_length)
    return _truncate(lengths, is_over, max_length, rule)


def _refuse(lengths: LengthIndex, is_over: np.ndarray, max_length: int) -> None:
    first, num_over = int(np.argmax(is_over)), int(is_over.sum())
    length = int(lengths.lengths[first])
    raise InputError(
        f"sequence {lengths.number_of(first)} has {length:,} tokens, over {Setting.MAX_LENGTH} {max_length:,}; in all, "
        f"{num_over:,} of {len(lengths):,} sequences are longer, the longest with {lengths.max_length:,}. "
        f"Raise {Setting.MAX_LENGTH}, or set {Setting.OVER_LENGTH} to drop, truncate or split"
    )


def _whole(lengths: LengthIndex, *, rule: OverLength) -> CorpusView:
    count, tokens = len(lengths), lengths.num_tokens
    ledger = LengthLedger(
        rule=rule, max_length=None, sequences_in=count, tokens_in=tokens, sequences_out=count, tokens_out=tokens
    )
    return CorpusView(lengths=lengths, base_ids=np.arange(count), starts=np.zeros(count, dtype=np.int64), ledger=ledger)


def _view(
    lengths: LengthIndex, new_lengths: np.ndarray, *, base_ids: np.ndarray, starts: np.ndarray, counts: dict[str, Any]
) -> CorpusView:
    mark = f"{lengths.digest}/{counts['rule']}/{counts['max_length']}"
    numbers = base_ids if lengths.numbers is None else lengths.numbers[base_ids]
    index = LengthIndex(lengths=new_lengths, corpus_digest=mark, numbers=numbers)
    ledger = LengthLedger(
        sequences_in=len(lengths),
        tokens_in=lengths.num_tokens,
        sequences_out=len(index),
        tokens_out=index.num_tokens,
        **counts,
    )
    assert ledger.tokens_in == ledger.tokens_out + ledger.tokens_dropped + ledger.tokens_cut, ledger
    return CorpusView(lengths=index, base_ids=base_ids, starts=starts, ledger=ledger)


def _drop(lengths: LengthIndex, is_over: np.ndarray, max_length: int) -> CorpusView:
    base_ids = np.flatnonzero(~is_over)
    if not len(base_ids):
        raise InputError(
            f"all {len(lengths):,} sequences are over {Setting.MAX_LENGTH} {max_length:,} (the shortest has "
            f"{int(lengths.lengths.min()):,} tokens), so none is left; raise it, or truncate or split instead of drop"
        )
    dropped = lengths.lengths[is_over]
    counts = {
        "rule": "drop",
        "max_length": max_length,
        "dropped": len(dropped),
        "tokens_dropped": int(dropped.sum(dtype=np.int64)),
    }
    kept_lengths = lengths.lengths[base_ids]
    return _view(
        lengths, kept_lengths, base_ids=base_ids, starts=np.zeros(len(kept_lengths), dtype=np.int64), counts=counts
    )


def _truncate(lengths: LengthIndex, is_over: np.ndarray, max_length: int, rule: OverLength) -> CorpusView:
    new_lengths = np.minimum(lengths.lengths, max_length)
    counts = {
        "rule": rule,
        "max_length": max_length,
        "truncated": int(is_over.sum()),
        "tokens_cut": lengths.num_tokens - int(new_lengths.sum(dtype=np.int64)),
    }
    starts = np.zeros(len(new_lengths), dtype=np.int64)
    return _view(lengths, new_lengths, base_ids=np.arange(len(new_lengths)), starts=starts, counts=counts)


def _split(lengths: LengthIndex, max_length: int) -> CorpusView:
    base_lengths = lengths.lengths.astype(np.int64)
    num_pieces = -(-base_lengths // max_length)
    base_ids = np.repeat(np.arange(len(base_lengths)), num_pieces)
    piece = np.arange(len(base_ids)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    short, num_longer = np.divmod(base_lengths, num_pieces)  # the first num_longer pieces have one token more
    starts = piece * short[base_ids] + np.minimum(piece, num_longer[base_ids])
    new_lengths = short[base_ids] + (piece < num_longer[base_ids])
    is_split = num_pieces > 1
    counts = {
        "rule": "split",
        "max_length": max_length,
        "split": int(is_split.sum()),
        "pieces": int(num_pieces[is_split].sum()),
    }
    return _view(lengths, new_lengths, base_ids=base_ids, starts=starts, counts=counts)
