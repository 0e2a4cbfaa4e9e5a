"""The distributed sort: every rank gives rows and gets its share of all rows in order.

N rows on p ranks, n on this one; D columns. Any input is balanced: the cuts between ranks are exact (select.py), so
that the first N % p ranks hold ceil(N / p) rows and the others floor(N / p), and nothing is moved afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lengthwise.runtime.comm.collectives import Handle
from lengthwise.runtime.sort.check_rows import SortPeers, agree_on_rows, peers_of
from lengthwise.runtime.sort.exact_cuts import WordsAt, find_cuts
from lengthwise.runtime.sort.local import order_of, sort_integers, take, with_plain_strides
from lengthwise.runtime.sort.order_codes import shares_a_code, to_codes
from lengthwise.runtime.sort.row_words import Word, blocks, layout

MOST_PARTS, PART_ROWS = 8, 1 << 16
"""Rows travel in so many parts at most, to bound the memory on the way, of so many rows at least."""
_LEAST = torch.iinfo(torch.int64).min


def sort_rows(rows: Tensor, *, key: Tensor | None = None, group: Handle = None) -> Tensor:
    """This rank's share [m, D] of all ranks' rows in order; m is N / p, rounded up on the first N % p ranks.

    Rows that compare equal keep the order of ranks and, on a rank, of rows; so the result is a function of all rows in
    that order, not of how many ranks hold them. NaN comes last, and -0.0 equals 0.0. Without torch.distributed, or on
    one rank, a plain sort.

    Time O(n log n). Memory: rows, those returned and at most as much again while it runs, if a row has 16 bytes or
    more or has no key and fits in 64 bits. About 20 collectives on few ranks; never more than 80.

    Args:
        rows: [n, D] of any dtype of ``codes.DTYPES``, where the group talks (Gloo: CPU; NCCL: GPU); n may be 0.
        key: [n] numbers to sort by, of any of these dtypes; None: by the whole row, its first column first.
        group: the ranks; None: all.

    Raises:
        InputError: on every rank, if a rank's rows or key are none, or of another dtype or width than another's.
    """
    peers = peers_of(rows, group)
    rows, key = with_plain_strides(rows.detach()), None if key is None else with_plain_strides(key.detach())
    counts = agree_on_rows(peers, rows, key)
    if sum(counts) == 0:
        return rows.clone()
    by = rows if key is None else key.unsqueeze(1)
    words, is_exact = _survey(peers, by)
    if key is None and is_exact and len(words) == 1:
        return _sort_words(peers, words[0], rows, counts)
    return _sort_by_order(peers, words, rows, key, counts)


def shares(num_rows: int, num_parts: int) -> list[int]:
    """Divide ``num_rows`` among parts: as equal as can be, larger ones first."""
    return [num_rows // num_parts + (part < num_rows % num_parts) for part in range(num_parts)]


def _survey(peers: SortPeers, rows: Tensor) -> tuple[tuple[Word, ...], bool]:
    """The words of ``rows`` over all ranks, and whether rows can be had back from them. One all-reduce."""
    num_columns = rows.shape[1]
    ranges = torch.full((2 * num_columns + 1,), _LEAST, device=rows.device)
    for block in blocks(len(rows)):
        for column in range(num_columns):
            codes = to_codes(rows[block, column])
            ends = torch.stack([codes.max(), ~codes.min()])  # the complement turns the smallest into the largest
            ranges[2 * column : 2 * column + 2] = torch.maximum(ranges[2 * column : 2 * column + 2], ends)
        ranges[-1] = torch.maximum(ranges[-1], shares_a_code(rows[block]).to(torch.int64))
    values = peers.largest(ranges).tolist()
    return layout([(~low, high) for high, low in zip(values[:-1:2], values[1:-1:2])]), values[-1] < 1


def _sort_words(peers: SortPeers, word: Word, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Sort rows that are one integer each: only the integers are sorted and travel."""
    words = word.encode(rows)
    sort_integers(words)
    if peers.size > 1:
        words = _exchange_words(peers, words, counts)
        sort_integers(words)
    out = rows.new_empty(len(words), rows.shape[1])
    word.decode(words, out)
    return out


def _exchange_words(peers: SortPeers, words: Tensor, counts: Sequence[int]) -> Tensor:
    """Exchange words so that this rank gets its share, a sorted run from every rank."""
    moves = _moves(peers, lambda places: _at(words, places).unsqueeze(1).to(torch.int64), counts, num_parts=1)
    return peers.all_to_all(words, moves.send[0], moves.receive[0])


def _sort_by_order(
    peers: SortPeers, words: tuple[Word, ...], rows: Tensor, key: Tensor | None, counts: Sequence[int]
) -> Tensor:
    """Sort rows of any kind, in parts: of each part the rows in local order are sent, and those received are merged."""
    by = rows if key is None else key.unsqueeze(1)
    order = order_of(words, by)
    if peers.size == 1:
        return take(rows, order)

    def words_at(places: Tensor) -> Tensor:
        targets = _at(by, _at(order, places))
        return torch.stack([word.encode(targets).to(torch.int64) for word in words], dim=1)

    num_parts = min(MOST_PARTS, -(-sum(counts) // (peers.size * PART_ROWS)))
    moves = _moves(peers, words_at, counts, num_parts=num_parts)
    out = rows.new_empty(sum(map(sum, moves.receive)), rows.shape[1])
    start = 0
    for part, (send, receive) in enumerate(zip(moves.send, moves.receive)):
        chosen = torch.cat([order[piece] for piece in moves.pieces(part)])
        came = peers.all_to_all(take(rows, chosen), send, receive)
        keys = came if key is None else peers.all_to_all(take(key, chosen), send, receive).unsqueeze(1)
        take(came, order_of(words, keys), out=out[start : start + len(came)])
        start += len(came)
    return out


@dataclass(frozen=True)
class _Moves:
    """Destinations of this rank's sorted rows, part by part."""

    send: list[list[int]]
    """[K][p] rows to every rank."""
    receive: list[list[int]]
    """[K][p] rows from every rank."""

    def pieces(self, part: int) -> list[slice]:
        """Slices of this rank's sorted rows in a part, by target rank. A rank's parts lie side by side."""
        sizes = [counts[rank] for rank in range(len(self.send[0])) for counts in self.send]
        ends = [0, *accumulate(sizes)]
        first = range(part, len(sizes), len(self.send))
        return [slice(ends[place], ends[place + 1]) for place in first]


def _moves(peers: SortPeers, words_at: WordsAt, counts: Sequence[int], *, num_parts: int) -> _Moves:
    """Cut the whole order into every rank's parts."""
    sizes = [part for share in shares(sum(counts), peers.size) for part in shares(share, num_parts)]
    targets = torch.tensor([*accumulate(sizes[:-1])], device=peers.device)
    cuts = find_cuts(words_at, targets, counts=counts, rank=peers.rank, group=peers.group)
    ends = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), counts[peers.rank])])
    all_sizes = peers.gather(ends.diff()).view(peers.size, peers.size, num_parts)  # [from, to, part]
    return _Moves(all_sizes[peers.rank].T.tolist(), all_sizes[:, peers.rank].T.tolist())


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Rows of ``x`` at places that need not all be there: where they are not, whatever comes to hand."""
    if len(x) == 0:
        return x.new_zeros(len(places), *x.shape[1:])
    return take(x, places.clamp(max=len(x) - 1))
