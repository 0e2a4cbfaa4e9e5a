"""Ranks for pipelines: the devices that share a layer inside one node, the stages of a pipeline together.

Nodes are runs of ``devices_per_node`` ranks; the last one may be shorter. Every pipeline's list of ranks is cut into
parcels that should stay inside a node: as many stages as a node holds, else single stages. A stage that is larger than
a node takes whole nodes and one parcel for the rest. Parcels fill the nodes exactly, or some of them must be split.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.core.errors import InputError
from lengthwise.plan.space.candidate import Candidate

MAX_PATTERNS = 20_000
"""Node contents tried before a search for an exact filling gives up; parcels that divide a node never need as many."""

Pattern = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Parcel:
    """Places ``start .. start + size`` in the list of ranks of one pipeline."""

    pipeline: int
    start: int
    size: int
    fixed: bool
    """A whole node of a stage that is larger than a node: never split."""


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """Which parcels stay whole, which are split into single ranks, and the sizes that fill each node."""

    unsplit: list[_Parcel]
    split: list[_Parcel]
    contents: list[Pattern]


def place(
    candidates: Sequence[tuple[Candidate, int]], num_devices: int, devices_per_node: int
) -> list[tuple[Candidate, tuple[int, ...]]]:
    """Every pipeline with its ranks, stage by stage, in the order of ``candidates``; together they tile the cluster.

    A stage crosses into another node only if it is larger than a node or the stages cannot fill the nodes otherwise:
    then as few of them as possible do, if none is larger than a node. The stages of a pipeline share a node where all
    can be placed so.

    Raises:
        InputError: the pipelines do not occupy exactly ``num_devices``.
    """
    pipelines = _pipelines(candidates, num_devices)
    nodes = _nodes(num_devices, devices_per_node)
    filling = _whole(pipelines, nodes) or _crossing(_parcels(pipelines, nodes[0], broken=len(pipelines)), nodes)
    ranks = _assign([candidate.num_devices for candidate in pipelines], filling, nodes)
    return list(zip(pipelines, ranks))


def placeable(candidates: Sequence[tuple[Candidate, int]], num_devices: int, devices_per_node: int) -> bool:
    """Whether no stage crosses more nodes than its size makes it.

    Raises:
        InputError: the pipelines do not occupy exactly ``num_devices``.
    """
    pipelines = _pipelines(candidates, num_devices)
    nodes = _nodes(num_devices, devices_per_node)
    parcels = _parcels(pipelines, nodes[0], broken=len(pipelines))
    return _fill([parcel.size for parcel in parcels], nodes) is not None


def _pipelines(candidates: Sequence[tuple[Candidate, int]], num_devices: int) -> list[Candidate]:
    pipelines = [candidate for candidate, count in candidates for _ in range(count)]
    occupied = sum(candidate.num_devices for candidate in pipelines)
    if occupied != num_devices:
        raise InputError(
            f"{len(pipelines)} pipelines occupy {occupied} devices, the cluster has {num_devices}; "
            "a strategy must tile it exactly"
        )
    return pipelines


def _nodes(num_devices: int, devices_per_node: int) -> list[int]:
    """Devices of each node."""
    full, rest = divmod(num_devices, min(num_devices, devices_per_node))
    return [min(num_devices, devices_per_node)] * full + [rest] * (rest > 0)


def _parcels(pipelines: list[Candidate], devices_per_node: int, *, broken: int) -> list[_Parcel]:
    """Parcels of every pipeline; the ``broken`` largest pipelines keep only single stages together."""
    chunks = [max(1, min(candidate.num_stages, devices_per_node // candidate.scheme.degree)) for candidate in pipelines]
    order = sorted(range(len(pipelines)), key=lambda index: (-chunks[index] * pipelines[index].scheme.degree, index))
    for index in order[:broken]:
        chunks[index] = 1
    parcels = []
    for number, (candidate, chunk) in enumerate(zip(pipelines, chunks)):
        length = candidate.scheme.degree * chunk
        for start in range(0, candidate.num_devices, length):
            end = min(start + length, candidate.num_devices)
            parcels += [
                _Parcel(
                    pipeline=number,
                    start=offset,
                    size=min(devices_per_node, end - offset),
                    fixed=length > devices_per_node <= end - offset,
                )
                for offset in range(start, end, devices_per_node)
            ]
    return parcels


def _whole(pipelines: list[Candidate], nodes: list[int]) -> _Filling | None:
    """A filling that splits no parcel and breaks as few of the largest pipelines as it can, if there is one."""

    def attempt(broken: int) -> _Filling | None:
        parcels = _parcels(pipelines, nodes[0], broken=broken)
        contents = _fill([parcel.size for parcel in parcels], nodes)
        return None if contents is None else _Filling(unsplit=parcels, split=[], contents=contents)

    best = attempt(0)
    if best is not None:
        return best
    low, high, best = 0, len(pipelines), attempt(len(pipelines))
    while best is not None and high - low > 1:  # what fits in larger parcels also fits in their parts
        middle = (low + high) // 2
        layout = attempt(middle)
        low, high, best = (middle, high, best) if layout is None else (low, middle, layout)
    return best


def _crossing(parcels: list[_Parcel], nodes: list[int]) -> _Filling:
    """A filling that splits as few parcels as possible: the largest ones, since smaller ones fit wherever they do."""
    order = sorted(range(len(parcels)), key=lambda index: (not parcels[index].fixed, parcels[index].size, index))
    low, high, best = 0, len(parcels), [(1,) * size for size in nodes]
    while high - low > 1:
        middle = (low + high) // 2
        sizes = [parcels[index].size for index in order[:middle]]
        contents = _fill(sizes + [1] * (sum(nodes) - sum(sizes)), nodes)
        if contents is None:
            high = middle
        else:
            low, best = middle, contents
    return _Filling(
        unsplit=[parcels[index] for index in sorted(order[:low])],
        split=[parcels[index] for index in sorted(order[low:])],
        contents=best,
    )


def _assign(num_ranks: list[int], filling: _Filling, nodes: list[int]) -> list[tuple[int, ...]]:
    """Ranks of each pipeline: parcels take the first free slots of their size, split ones single ranks."""
    slots: dict[int, deque[int]] = {}
    rank = 0
    for node, sizes in zip(nodes, filling.contents):
        assert sum(sizes) == node, "the contents of a node fill it"
        for size in sizes:
            slots.setdefault(size, deque()).append(rank)
            rank += size
    ranks = [[0] * number for number in num_ranks]
    for parcel in filling.unsplit:
        first = slots[parcel.size].popleft()
        ranks[parcel.pipeline][parcel.start : parcel.start + parcel.size] = range(first, first + parcel.size)
    for parcel in filling.split:
        parcel_ranks = [slots[1].popleft() for _ in range(parcel.size)]
        ranks[parcel.pipeline][parcel.start : parcel.start + parcel.size] = parcel_ranks
    return [tuple(pipeline_ranks) for pipeline_ranks in ranks]


def _fill(sizes: list[int], nodes: list[int]) -> list[Pattern] | None:
    """Sizes of the parcels in each node, each node exactly full; None if there is no such filling.

    The shorter last node is filled first. Of the others, all alike, the next one holds one of the largest parcels left.
    Dead ends are remembered. Nothing is found after ``MAX_PATTERNS`` either.
    """
    size_counts = Counter(sizes)
    candidates = sorted(size_counts, reverse=True)
    capacities = nodes[::-1]
    left = tuple(size_counts[size] for size in candidates)
    chosen: list[Pattern] = []
    states, dead = [left], set()
    options = [_patterns(candidates, left, capacities[0], largest=capacities[0] == nodes[0])]
    for _ in range(MAX_PATTERNS):
        pattern = next(options[-1], None)
        if pattern is None:
            options.pop()
            dead.add((len(options), states.pop()))
            if not options:
                return None
            chosen.pop()
            continue
        left = tuple(have - used for have, used in zip(states[-1], pattern))
        if (len(chosen) + 1, left) in dead:
            continue
        chosen.append(pattern)
        if len(chosen) == len(capacities):
            contents = [
                tuple(size for size, n in zip(candidates, node_counts) for _ in range(n)) for node_counts in chosen
            ]
            short = contents[:1] if capacities[0] != nodes[0] else []
            return contents[len(short) :] + short
        states.append(left)
        options.append(_patterns(candidates, left, nodes[0], largest=True))
    return None


def _patterns(sizes: list[int], counts: Pattern, capacity: int, *, largest: bool) -> Iterator[Pattern]:
    """How many parcels of each size fill ``capacity`` exactly: most of the largest first, at least one if asked."""
    if not sizes:
        if capacity == 0:
            yield ()
        return
    least = 1 if largest and counts[0] else 0
    for number in range(min(counts[0], capacity // sizes[0]), least - 1, -1):
        rest = capacity - number * sizes[0]
        for others in _patterns(sizes[1:], counts[1:], rest, largest=largest and not counts[0]):
            yield (number, *others)
