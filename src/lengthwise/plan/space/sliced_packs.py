"""Where the packs of a scheme with slices are cut, and how long a pipeline of such packs takes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from heapq import heapreplace
from itertools import chain
from math import ceil, inf

import numpy as np

from lengthwise.core.one_f_one_b import PassTimes
from lengthwise.core.pipeline_config import SLICE_METHODS, PipelineConfig, WeightPlacement
from lengthwise.core.planned_micro_batch import PlannedSlice
from lengthwise.core.sliced_passes import RULES, Rule, SlicedEnd, kept_bytes_of, largest_share, sliced_end
from lengthwise.plan.space.candidate import Candidate, most_tokens


class Slices(StrEnum):
    """Whether pipelines of several stages may cut their micro-batches into slices."""

    NONE = "none"
    AUTO = "auto"


SLICE_COUNTS = (4, 16, 64)
"""Slices of every micro-batch that schemes may have."""
COUNTS_BETWEEN = {4: (8,), 16: (8, 12, 24, 32), 64: (24, 32, 48)}
"""Other numbers of slices that plans try in place of each of these."""
COMPARED_BATCHES = 8
"""Typical batches at most for whose longest sequence schemes with slices are compared with those without."""
PAYS = 0.01
"""Share of time or device-seconds that a scheme with slices has to save for some of these sequences."""
NEAR = 1.1
"""Most times the time or device-seconds of the best scheme with slices."""
FEWEST_TOKENS = 16
"""Tokens of a slice, where all are equal."""
HALVINGS = 32
"""Of the tokens of a sequence, while the place of a cut is searched."""
MOST_KEPT = 1 << 14
"""Packs whose cuts are remembered."""


def can_slice(scheme: PipelineConfig) -> bool:
    """Whether slices of micro-batches would leave stages of ``scheme`` less to wait for, and can be planned."""
    return (
        scheme.num_stages > 1
        and SLICE_METHODS.issuperset(scheme.methods)
        and scheme.weights is WeightPlacement.WHOLE
        and scheme.head_groups == 1
        and not (scheme.zero_bubble or scheme.shard_gradients)
    )


def in_slices(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that can have slices, with every number of slices that schemes may have."""
    return [
        replace(candidate, scheme=replace(candidate.scheme, slices=count))
        for candidate in candidates
        for count in (SLICE_COUNTS if can_slice(candidate.scheme) else ())
    ]


def counted_otherwise(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates with numbers of slices that plans try in place of theirs, and searches do not know."""
    return [
        candidate.in_slices(count)
        for candidate in candidates
        for count in COUNTS_BETWEEN.get(candidate.scheme.slices, ())
    ]


def with_slices(
    candidates: Sequence[Candidate], mode: Slices, *, samples: Sequence[np.ndarray], max_length: int
) -> tuple[Candidate, ...]:
    """The candidates of a search space in which micro-batches may be cut into slices, where costs know what that takes.

    Schemes with slices join where they pay for the longest sequence of a typical batch, of ``samples``. If all devices
    are done with the others before it ends under any scheme without, they have to be faster alone; else they have to
    take fewer device-seconds, and be done as soon as the others are. Of these the fastest join, and any than which none
    as fast takes fewer device-seconds, both within ``NEAR``. Neither split backwards nor sharded gradients are a reason
    to leave any out: a scheme with those may be better for the longest sequence, and no other pack.
    Where no scheme without holds a sequence of ``max_length``, those that do join, or that which holds the most.
    """
    is_priced = [getattr(candidate.cost, "prices_slices", False) for candidate in candidates]
    if mode is Slices.NONE or not is_priced or not all(is_priced):
        return tuple(candidates)
    options = in_slices(candidates)
    joined: dict[Candidate, None] = {}
    unsplit = [candidate for candidate in candidates if not candidate.scheme.zero_bubble] or candidates
    unsharded = [candidate for candidate in unsplit if not candidate.scheme.shard_gradients]
    batches = list(samples[:COMPARED_BATCHES])
    longest = most_tokens(candidates)
    if options and longest < max_length:
        largest = max(options, key=lambda option: option.max_tokens)
        if largest.max_tokens >= max_length:
            batches.append(np.array([max_length]))
        elif largest.max_tokens > longest:
            joined[largest] = None
    for lengths in batches:
        for compared in (unsplit, unsharded) if 0 < len(unsharded) < len(unsplit) else (unsplit,):
            joined |= dict.fromkeys(_that_pay(compared, options, lengths))
    return (*candidates, *joined)


def _that_pay(
    candidates: Sequence[Candidate], options: Sequence[Candidate], lengths: np.ndarray
) -> Iterator[Candidate]:
    """The ``options`` under which the longest sequence of a batch is better off than under all ``candidates``."""
    num_devices = candidates[0].num_cluster_devices
    values, counts = np.unique(lengths, return_counts=True)
    others_s = np.full(len(values), np.inf)
    for candidate in candidates:
        each_s = candidate.num_devices * candidate.times_s(values)
        np.minimum(others_s, np.where(values <= candidate.max_tokens, each_s, np.inf), out=others_s)
    counts[-1] -= 1  # the longest itself
    others_end_s = float((others_s[counts > 0] * counts[counts > 0]).sum()) / num_devices
    longest = values[-1:]
    alone_s, device_s = _alone(candidates, longest)
    deadline_s = max(others_end_s, alone_s.min())
    fewest_s = device_s[alone_s <= deadline_s].min() if np.isfinite(deadline_s) else np.inf
    options = [option for option in options if _may_pay(option, longest, deadline_s, fewest_s)]
    if not options:
        return
    alone_s, device_s = _alone(options, longest)
    in_time = alone_s <= deadline_s
    pays = (alone_s < (1 - PAYS) * deadline_s) if others_end_s < deadline_s else device_s < (1 - PAYS) * fewest_s
    for option, is_better, alone, devices in zip(options, pays & in_time, alone_s, device_s):
        if is_better and (alone <= NEAR * alone_s.min() or devices <= NEAR * device_s[alone_s <= alone].min()):
            yield option


def _may_pay(option: Candidate, longest: np.ndarray, deadline_s: float, fewest_s: float) -> bool:
    """Whether an option pays if it fits, which takes longer to find out."""
    alone_s = float(option.times_s(longest)[0] + option.overhead_s) * option.flow_stages
    return alone_s < (1 - PAYS) * deadline_s or alone_s * option.num_devices < (1 - PAYS) * fewest_s


def _alone(candidates: Sequence[Candidate], longest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a sequence alone under each candidate, and of all of its devices, which wait in the bubble."""
    alone_s = np.array(
        [
            (float(candidate.times_s(longest)[0]) + candidate.overhead_s) * candidate.flow_stages
            if longest[0] <= candidate.max_tokens
            else np.inf
            for candidate in candidates
        ]
    )
    return alone_s, alone_s * np.array([candidate.num_devices for candidate in candidates])


def cut_pack(candidate: Candidate, lengths: Sequence[int], time_s: float) -> tuple[PlannedSlice, ...]:
    """The slices of a pack of sequences of ``lengths``, the longest first, that takes ``time_s`` on one stage.

    They have equal work as far as none has more than :func:`largest_share` of the tokens, which no first slice would.
    A pack of few tokens has fewer, so that each rank of a stage has some of every slice; none if it is not cut.
    """
    sizes, shares = _sizes_and_shares(candidate, tuple(lengths))
    return tuple(PlannedSlice(size, time_s * share) for size, share in zip(sizes, shares)) if len(sizes) > 1 else ()


@lru_cache(maxsize=MOST_KEPT)
def _sizes_and_shares(candidate: Candidate, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens of each slice of a pack, and their shares of the work; of all of it where it is not cut."""
    num_tokens = sum(lengths)
    num_slices = min(candidate.scheme.slices, num_tokens // FEWEST_TOKENS)
    while num_slices > 1:
        sizes, shares = _cuts(candidate, lengths, num_slices)
        if min(sizes) >= candidate.scheme.degree:
            return sizes, shares
        num_slices //= 2
    return (num_tokens,), (1.0,)


def _cuts(candidate: Candidate, lengths: tuple[int, ...], num_slices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens of each slice, and their shares of the work."""
    whole_s = candidate.times_s(np.array(lengths))
    before_s, starts = np.concatenate([[0.0], np.cumsum(whole_s)]), np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(starts[-1])

    def work_s(tokens: np.ndarray) -> np.ndarray:
        """Seconds of the first tokens of the pack."""
        sequence = np.minimum(np.searchsorted(starts, tokens, side="right") - 1, len(lengths) - 1)
        return before_s[sequence] + np.where(
            tokens > starts[sequence], candidate.times_s(np.maximum(1, tokens - starts[sequence])), 0.0
        )

    def ends_of(num_capped: int) -> list[int]:
        """Where slices end of which the first have as many tokens as any may, and the others equal work."""
        first = min(num_capped * slice_tokens, num_tokens - 1)
        begin_s, num_equal = float(work_s(np.array([first]))[0]), num_slices - num_capped
        wanted_s = begin_s + (before_s[-1] - begin_s) * np.arange(1, num_equal) / num_equal
        low, high = (np.full(num_equal - 1, tokens, dtype=np.int64) for tokens in (first, num_tokens))
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            is_short = work_s(middle) < wanted_s
            low, high = np.where(is_short, middle, low), np.where(is_short, high, middle)
        return [*range(slice_tokens, first + 1, slice_tokens), *high.tolist(), num_tokens]

    slice_tokens, num_capped = ceil(largest_share(num_slices) * num_tokens), 0
    ends = ends_of(0)
    while num_capped < num_slices - 1 and ends[num_capped] - num_capped * slice_tokens > slice_tokens:
        num_capped += 1
        ends = ends_of(num_capped)
    for number in range(num_slices - 1):  # a token each at least, no more than allowed, and as much left for the others
        before, left = (ends[number - 1] if number else 0), num_slices - 1 - number
        ends[number] = max(
            before + 1, num_tokens - left * slice_tokens, min(ends[number], before + slice_tokens, num_tokens - left)
        )
    sums_s = work_s(np.array(ends))
    sizes = np.diff(ends, prepend=0).tolist()
    return tuple(sizes), tuple((np.diff(sums_s, prepend=0.0) / (sums_s[-1] or 1.0)).tolist())


def with_fewer_slices(candidate: Candidate, works_s: np.ndarray, num_tokens: np.ndarray) -> tuple[Candidate, ...]:
    """What each pack of a pipeline runs as, so that their slices are about as large as those of the longest.

    Short ones then cost less overhead. They do not have so few that memory is short.

    Args:
        candidate: as which the longest pack runs.
        works_s: [V] seconds of each pack on one stage, overhead left out.
        num_tokens: [V] of each pack.
    """
    wanted = candidate.scheme.slices * works_s / (works_s.max(initial=0.0) or 1.0)
    runs = []
    for fewest, tokens in zip(wanted.tolist(), num_tokens.tolist()):
        count = ceil(max(1.0, fewest))
        while count < candidate.scheme.slices and candidate.in_slices(count).max_tokens < tokens:
            count *= 2
        runs.append(candidate.in_slices(count) if count < candidate.scheme.slices else candidate)
    return tuple(runs)


def smaller_packs(
    candidate: Candidate, packs: Sequence[tuple[int, ...]], times_s: np.ndarray, num_slices: float
) -> tuple[tuple[int, ...], ...]:
    """The sequences of a pipeline in packs of so much work as ``num_slices`` of the longest sequence have.

    Such a pack may have more tokens than ``packs`` have.

    Args:
        candidate: as which the longest runs.
        packs: positions of sequences in the batch.
        times_s: seconds of each sequence of the batch on one stage.
        num_slices: of a pack of short sequences. Each of longer ones has a pack of its own.
    """
    ordered = sorted(chain.from_iterable(packs), key=lambda position: -times_s[position])
    largest_s = times_s[ordered[0]] / candidate.scheme.slices * num_slices
    num_long = sum(times_s[position] > largest_s for position in ordered)
    long, short = ordered[:num_long], ordered[num_long:]
    parts: list[list[int]] = [[] for _ in range(ceil(sum(times_s[position] for position in short) / largest_s))]
    ends_s = [(0.0, number) for number in range(len(parts))]
    for position in short:
        end_s, number = ends_s[0]
        parts[number].append(position)
        heapreplace(ends_s, (end_s + times_s[position], number))
    return (*((position,) for position in long), *map(tuple, filter(None, parts)))


@lru_cache(maxsize=MOST_KEPT)
def _kept_bytes(candidate: Candidate, lengths: tuple[int, ...]) -> tuple[int, list[int]]:
    """What a pack takes above the model state, and what each stage keeps of each of its slices."""
    peak_bytes = int(candidate.peak_bytes(np.array([sum(lengths)]))[0])
    above_state = max(0, peak_bytes - candidate.state_bytes)
    sizes, _ = _sizes_and_shares(candidate, lengths)
    return above_state, kept_bytes_of(sizes, above_state, candidate.num_stages)


def sliced_pipeline_end(
    runs: Sequence[Candidate],
    lengths: Sequence[Sequence[int]],
    times_s: Sequence[float],
    *,
    limit_s: float = inf,
    rules: Sequence[Rule] = RULES,
) -> SlicedEnd:
    """Seconds from the first forward to the last backward of packs in slices, in issue order; inf if not below a limit.

    Args:
        runs: the candidate that each pack runs as, alike but for slices.
        lengths: of the sequences of each pack, padding included, the longest first.
        times_s: seconds of each pack on one stage.
        limit_s: seconds at which nobody wants to know more.
        rules: by which the passes may be ordered.
    """
    counts, kept_bytes, slices_s, forwards_s, limit_bytes = [], list[int](), list[float](), list[float](), 0
    for run, of_pack, time_s in zip(runs, map(tuple, lengths), times_s):
        _, shares = _sizes_and_shares(run, of_pack)
        above_state, kept_of_pack = _kept_bytes(run, of_pack)
        counts.append(len(shares))
        limit_bytes = max(limit_bytes, above_state)
        kept_bytes += kept_of_pack
        slices_s += [time_s * share for share in shares]
        forwards_s += [time_s * share / run.forwards for share in shares]
    times = PassTimes(forwards_s, [time_s - forward_s for time_s, forward_s in zip(slices_s, forwards_s)])
    return sliced_end(
        counts, times, kept_bytes, limit_bytes=limit_bytes, num_stages=runs[0].num_stages, limit_s=limit_s, rules=rules
    )
