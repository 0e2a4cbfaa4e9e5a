"""Every number of recomputed layers for packs, where the schemes of the search space differ by eighths of the layers.

Searches compare packs under eighths. A pack that is dealt then recomputes the fewest layers under which it fits, one of
the numbers between its candidate and the next that recomputes fewer. Bounds know these numbers too.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import PipelineConfig, spread
from lengthwise.plan.space.candidate import Candidate

FEWEST_HALVED = 6
"""Layers, by which two candidates differ at least, between which there is a candidate halfway."""


def next_fewer(candidates: Iterable[Candidate]) -> dict[Candidate, Candidate]:
    """Per candidate the one that recomputes the next fewer layers and is alike otherwise; none where there is none.

    Layers whose saved tensors are on the host are left out: recomputing fewer of them need not be faster.
    """
    by_scheme: dict[tuple[PipelineConfig, bool, bool], list[Candidate]] = {}
    for candidate in candidates:
        scheme, num_layers = candidate.scheme, candidate.scheme.num_layers
        if not scheme.offload and scheme.recompute == spread(scheme.num_recomputed, num_layers):
            plain = replace(scheme, recompute=(False,) * num_layers)
            for keeps_attention in (scheme.keep_attention,) if any(scheme.recompute) else (False, True):
                key = plain, keeps_attention, candidate.longest_local > 0
                by_scheme.setdefault(key, []).append(candidate)
    ordered = (sorted(members, key=lambda member: member.scheme.num_recomputed) for members in by_scheme.values())
    return {more: fewer for members in ordered for fewer, more in pairwise(members)}


def between(fewer: Candidate, more: Candidate) -> tuple[Candidate, ...]:
    """Candidates that recompute more layers than one and fewer than the other, each with room for more tokens.

    None under costs that know no other numbers of layers, as those of a profile.
    """
    finer, limit = list[Candidate](), fewer.max_tokens
    for num_layers in range(fewer.scheme.num_recomputed + 1, more.scheme.num_recomputed):
        candidate = more.recomputing(num_layers)
        try:
            max_tokens = candidate.max_tokens
        except InputError:
            return ()
        if limit < max_tokens < more.max_tokens:
            finer.append(candidate)
            limit = max_tokens
    return tuple(finer)


def one_more(fewer: Candidate, more: Candidate) -> Candidate | None:
    """The candidate that recomputes one layer more than one and fewer than the other; None where there is none.

    All that are between the two recompute as many layers at least.
    """
    num_layers = fewer.scheme.num_recomputed + 1
    if num_layers == more.scheme.num_recomputed:
        return None
    candidate = more.recomputing(num_layers)
    try:
        return candidate if candidate.max_tokens else None
    except InputError:
        return None


def halfway(fewer: Candidate, more: Candidate) -> Candidate | None:
    """The candidate that recomputes about as many layers more than one as fewer than the other, with room in between.

    Of those with as much room, the one that recomputes the fewest. None where there are too few numbers of layers
    between them, or none has room in between.
    """
    first, last = fewer.scheme.num_recomputed, more.scheme.num_recomputed
    if last - first < FEWEST_HALVED:
        return None
    try:
        middle = more.recomputing((first + last) // 2)
        while middle.scheme.num_recomputed > first + 1:
            leaner = more.recomputing(middle.scheme.num_recomputed - 1)
            if leaner.max_tokens != middle.max_tokens:
                break
            middle = leaner
        return middle if fewer.max_tokens < middle.max_tokens < more.max_tokens else None
    except InputError:
        return None
