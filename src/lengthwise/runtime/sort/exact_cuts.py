"""Exact cuts: where each rank's sorted rows have to be cut for the pieces to hold given numbers of rows in all.

Rows are ordered by their words, equal ones by rank and place, so that no two are alike and every cut is one row and no
other, whatever the rows hold. Each rank keeps, for every cut, a window of its rows in which the cut lies, and shows S
rows of it, evenly spaced. All ranks count their rows before each row shown: the sums are those rows' places in the
whole order, and so say on which side of the cut they lie. No window can then hold more than 1 / (S + 1) of what it
did, and so the number of rounds is known beforehand: 4 for 10 million rows a rank, of two collectives each.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lengthwise.runtime.comm.collectives import Handle, all_gather, all_reduce

WordsAt = Callable[[Tensor], Tensor]
"""The words [k, W] of this rank's sorted rows at places [k]."""
MOST_SHOWN, SHOWN_IN_ALL = 63, 1 << 14
"""Rows that a rank shows for a cut; that all ranks show for all cuts."""


def find_cuts(words_at: WordsAt, targets: Tensor, *, counts: Sequence[int], rank: int, group: Handle) -> Tensor:
    """How many of this rank's rows are among the first ``targets[c]`` of all rows, for every c.

    Args:
        words_at: of this rank's rows, which are sorted.
        targets: [C] the same on all ranks.
        counts: rows of every rank.
        rank: this one.
        group: the ranks.
    """
    num_cuts = len(targets)
    num_shown = max(1, min(MOST_SHOWN, SHOWN_IN_ALL // (len(counts) * num_cuts)))
    steps = torch.arange(1, num_shown + 1, device=targets.device)
    low, high = torch.zeros_like(targets), torch.full_like(targets, counts[rank])
    widest = max(counts)
    while widest:
        width = (high - low).unsqueeze(1)
        places = torch.where(width > 0, low.unsqueeze(1) + width * steps // (num_shown + 1), -1)
        shown = _show(words_at, places, len(counts), group)  # [p, C, S, W + 1]
        words, is_shown = shown[..., :-1], shown[..., -1] >= 0
        before = _rows_before(words_at, words, rank=rank, low=low, high=high, widest=widest)
        before[rank] = places
        in_all = torch.where(is_shown, before, 0)
        all_reduce(in_all, group=group)
        is_left = in_all < targets[:, None]
        includes = before.clone()
        includes[rank] += 1  # a row left of the cut is itself before the cut
        low = torch.where(is_shown & is_left, includes, low[:, None]).amax(dim=(0, 2))
        high = torch.where(is_shown & ~is_left, before, high[:, None]).amin(dim=(0, 2))
        widest //= num_shown + 1
    assert torch.equal(low, high)
    return low


def _show(words_at: WordsAt, places: Tensor, num_ranks: int, group: Handle) -> Tensor:
    """Gather from every rank the words at ``places`` [C, S] and then the place, -1 where nothing is shown."""
    flat = places.flatten()
    words = words_at(flat.clamp(min=0))
    own_words = torch.cat([words, flat.unsqueeze(1)], dim=1).view(*places.shape, -1)
    shown = own_words.new_empty(num_ranks, *own_words.shape)
    all_gather(shown.flatten(), own_words.flatten(), group=group)
    return shown


def _rows_before(words_at: WordsAt, words: Tensor, *, rank: int, low: Tensor, high: Tensor, widest: int) -> Tensor:
    """Count [p, C, S] this rank's rows that come before each row shown, by bisection in this rank's windows.

    Rows that equal one of a later rank come before it.
    """
    shape = words.shape[:-1]
    wanted = words.reshape(-1, words.shape[-1])
    is_later = torch.arange(shape[0], device=words.device) > rank
    with_equals = is_later[:, None, None].expand(shape).flatten()
    first, last = (bound[:, None].expand(shape).flatten() for bound in (low, high))
    for _ in range(widest.bit_length()):
        middle = (first + last) // 2
        is_before = _is_before(words_at(middle), wanted, with_equals)
        is_open = first < last
        first = torch.where(is_open & is_before, middle + 1, first)
        last = torch.where(is_open & ~is_before, middle, last)
    return first.view(shape)


def _is_before(words: Tensor, wanted: Tensor, with_equals: Tensor) -> Tensor:
    """[k] whether words [k, W] are smaller than those wanted, or equal where that counts too."""
    smaller = torch.zeros_like(with_equals)
    equal = ~smaller
    for ours, theirs in zip(words.unbind(1), wanted.unbind(1)):
        smaller |= equal & (ours < theirs)
        equal &= ours == theirs
    return smaller | (equal & with_equals)
