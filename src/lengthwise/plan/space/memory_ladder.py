"""Further schemes for long sequences, where they pay: what layers save is on the host, feed-forwards compute tiles.

Where the longest sequence fits without, offload may still be faster than recompute: attention over a long sequence
hides the copies of what would be computed again. Where it does not fit, recomputed layers put their inputs on the host,
and feed-forwards keep theirs alone. A scheme joins the search space if it is the fastest of its family at some length
that others of the family do not hold without recompute; so the space grows only where something is gained. Attention in
groups of heads joins where nothing else holds the longest sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import product

import numpy as np

from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, Method, PipelineConfig, spread
from lengthwise.plan.space.candidate import Candidate, make_candidates, most_tokens

TILE_TOKENS = 4096
"""Tokens of a tile where none are asked for: products of so many rows use a device well."""
COMPARED_LENGTHS = 12
"""Lengths, up to the longest sequence, at which schemes are compared."""
PAYS = 0.01
"""Share of its time that a scheme has to save at some length."""
RECOMPUTED = (frozenset({0.0, 1.0}), frozenset({0.0}), frozenset({1.0}))
"""Shares of layers recomputed where any may be, where none may be, and where all are."""


class OffloadMode(StrEnum):
    """Whose saved tensors schemes may put into host memory between forward and backward."""

    AUTO = "auto"
    NONE = "none"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Shares of a scheme's layers that are recomputed and offloaded, and whether feed-forwards compute tiles."""

    recomputed: float
    offloaded: float
    is_tiled: bool = False
    keeps_attention: bool = False
    """Whether recomputed layers keep what attention gave (selective recompute)."""

    def is_possible(self, shares: frozenset[float], has_host: bool, has_tiles: bool) -> bool:
        """Whether this rung is allowed, where all layers have to be recomputed whole, or none, if that is asked for."""
        return (
            (has_host or not self.offloaded)
            and (has_tiles or not self.is_tiled)
            and (len(shares) > 1 or (self.recomputed in shares and not self.keeps_attention))
        )

    def of(self, scheme: PipelineConfig, *, tile_tokens: int, head_groups: int = 1) -> PipelineConfig:
        """``scheme`` with this rung's layers recomputed and offloaded, and attention in so many groups of heads."""
        num_layers = scheme.num_layers
        return replace(
            scheme,
            recompute=spread(round(self.recomputed * num_layers), num_layers),
            offload=spread(round(self.offloaded * num_layers), num_layers),
            tile_tokens=tile_tokens if self.is_tiled else scheme.tile_tokens,
            head_groups=head_groups,
            keep_attention=self.keeps_attention,
        )


FASTER = (Rung(recomputed=0, offloaded=1), Rung(recomputed=0, offloaded=0, is_tiled=True))
"""Instead of recompute, all kept on the host, or feed-forwards alone computed again: one of them has to pay for others
to be looked at."""
MIXED = (
    Rung(recomputed=0, offloaded=1, is_tiled=True),
    Rung(recomputed=0.25, offloaded=1),
    Rung(recomputed=0.5, offloaded=1),
    Rung(recomputed=0.25, offloaded=1, is_tiled=True),
    Rung(recomputed=0.5, offloaded=1, is_tiled=True),
)
LEANER = (
    Rung(recomputed=1, offloaded=1, keeps_attention=True),
    Rung(recomputed=1, offloaded=1, is_tiled=True, keeps_attention=True),
    Rung(recomputed=0.75, offloaded=1),
    Rung(recomputed=0.75, offloaded=1, is_tiled=True),
    Rung(recomputed=1, offloaded=0.5),
    Rung(recomputed=1, offloaded=1),
    Rung(recomputed=1, offloaded=0, is_tiled=True),
    Rung(recomputed=1, offloaded=0.5, is_tiled=True),
    Rung(recomputed=1, offloaded=0.75, is_tiled=True),
    Rung(recomputed=1, offloaded=1, is_tiled=True),
)
"""Where the longest sequence does not fit otherwise; the leanest last."""
IN_GROUPS = (
    Rung(recomputed=0, offloaded=0),
    Rung(recomputed=0, offloaded=0, is_tiled=True),
    Rung(recomputed=1, offloaded=0),
    Rung(recomputed=0, offloaded=1),
    Rung(recomputed=0, offloaded=1, is_tiled=True),
    Rung(recomputed=1, offloaded=1),
    Rung(recomputed=1, offloaded=0, is_tiled=True),
    Rung(recomputed=1, offloaded=1, is_tiled=True),
)
"""Those under which attention computes groups of heads, where the longest sequence fits under no other."""


def selective_candidates(
    schemes: Iterable[PipelineConfig],
    candidates: Sequence[Candidate],
    cost: CostModel,
    *,
    num_devices: int,
    max_length: int,
    token_limit: int | None = None,
) -> tuple[Candidate, ...]:
    """Candidates whose recomputed layers keep what attention gave, of families that need recompute, where that pays:
    attention over a long sequence is most of what recompute runs again, and what it gave is little to keep.

    Of the levels of recompute that ``candidates`` have, every second. Takes what :func:`ladder_candidates` takes.
    """
    make = partial(make_candidates, cost=cost, num_devices=num_devices, token_limit=token_limit)
    added, compared = list[Candidate](), ComparedTimes(max_length)
    for scheme, members in _families(schemes, candidates).values():
        fastest = FastestOfFamily(members, compared, needs_longer=False)
        if scheme.is_plain and members and not fastest.needs_no_recompute:
            levels = {member.scheme.num_recomputed: member.scheme for member in members if any(member.scheme.recompute)}
            every_second = reversed(sorted(levels, reverse=True)[::2])
            made = make([replace(levels[level], keep_attention=True) for level in every_second])
            added += [candidate for candidate in made if fastest.add(candidate)]
    return tuple(added)


def _families(
    schemes: Iterable[PipelineConfig], candidates: Iterable[Candidate]
) -> dict[object, tuple[PipelineConfig, list[Candidate]]]:
    """One of the schemes for each of their families, and the candidates of it."""
    families: dict[object, tuple[PipelineConfig, list[Candidate]]] = {}
    for scheme in schemes:
        families.setdefault(family_of(scheme), (scheme, []))
    for candidate in candidates:
        if (family := family_of(candidate.scheme)) in families:
            families[family][1].append(candidate)
    return families


def ladder_candidates(
    schemes: Iterable[PipelineConfig],
    candidates: Sequence[Candidate],
    cost: CostModel,
    *,
    num_devices: int,
    max_length: int,
    token_limit: int | None = None,
    has_host: bool = True,
    tile_tokens: int = TILE_TOKENS,
    recomputed: float | None = None,
) -> tuple[Candidate, ...]:
    """What joins ``candidates``, which were made of ``schemes``.

    What joins a family depends on no other of its degree or more, stages or more, or method, and what would join it
    under less recompute, without a host or without tiles joins it too: a larger search space has what a smaller has.

    Args:
        schemes: the families' schemes without offload and tiles; those that hold nothing included.
        candidates: those that hold something, and what other families have.
        cost: prices the schemes.
        num_devices: of the cluster.
        max_length: the longest sequence of the run, in tokens.
        token_limit: most tokens of a micro-batch.
        has_host: whether devices can put anything into host memory.
        tile_tokens: of a feed-forward's tile; 0: no tiles.
        recomputed: the share of layers that every scheme recomputes; None: any.
    """
    families = _families(schemes, candidates)
    asked = RECOMPUTED if recomputed is None else (frozenset({recomputed}),)
    held_by_family, compared = _held_by_family(candidates), ComparedTimes(max_length)
    added: dict[Candidate, None] = {}
    for scheme, members in families.values():
        if scheme.num_devices > num_devices:
            continue
        make = _RungCandidates(
            Candidate(scheme=scheme, cost=cost, num_cluster_devices=num_devices, token_limit=token_limit)
        )
        smaller = [tokens for other, tokens in held_by_family if _is_within(other, scheme)]
        for shares in asked:
            is_any = len(shares) > 1
            of_shares = [candidate for candidate in members if is_any or _share(candidate.scheme) in shares]
            within = (tokens for by_share in smaller for share, tokens in by_share.items() if is_any or share in shares)
            needs_longer = max(within, default=0) < max_length
            present = FastestOfFamily(of_shares, compared, needs_longer=needs_longer)
            for hosts, tiles in product({has_host, False}, {tile_tokens, 0}):
                if not hosts and not (tiles and needs_longer):
                    continue
                rounds = [
                    [make(rung, tiles) for rung in rungs if rung.is_possible(shares, hosts, tiles > 0)]
                    for rungs in (FASTER, MIXED, LEANER if needs_longer else ())
                ]
                added |= dict.fromkeys(_paying(copy(present), [candidates for candidates in rounds if candidates]))
    return tuple(added)


class _RungCandidates:
    """The candidates of one family under rungs of the ladder, each made once; they may hold nothing."""

    def __init__(self, plain: Candidate) -> None:
        self._plain = plain
        self._by_rung: dict[tuple[Rung, int], Candidate] = {}
        self._by_scheme: dict[PipelineConfig, Candidate] = {}

    def __call__(self, rung: Rung, tile_tokens: int) -> Candidate:
        key = rung, tile_tokens if rung.is_tiled else 0
        if key not in self._by_rung:
            scheme = rung.of(self._plain.scheme, tile_tokens=tile_tokens)
            if scheme not in self._by_scheme:
                self._by_scheme[scheme] = replace(self._plain, scheme=scheme)
            self._by_rung[key] = self._by_scheme[scheme]
        return self._by_rung[key]


def _held_by_family(candidates: Iterable[Candidate]) -> list[tuple[PipelineConfig, dict[float, int]]]:
    """A scheme of each family, and the most tokens that its candidates hold, by the share of layers they recompute."""
    by_family: dict[object, tuple[PipelineConfig, dict[float, int]]] = {}
    for candidate in candidates:
        _, by_share = by_family.setdefault(family_of(candidate.scheme), (candidate.scheme, {}))
        share = _share(candidate.scheme)
        by_share[share] = max(candidate.max_tokens, by_share.get(share, 0))
    return list(by_family.values())


def head_group_candidates(
    schemes: Iterable[PipelineConfig],
    candidates: Sequence[Candidate],
    cost: CostModel,
    *,
    num_devices: int,
    num_groups: Callable[[int], Sequence[int]],
    token_limit: int | None = None,
    has_host: bool = True,
    tile_tokens: int = TILE_TOKENS,
    recomputed: float | None = None,
) -> tuple[Candidate, ...]:
    """Candidates whose attention computes groups of heads and which hold more tokens than all of ``candidates``.

    Args:
        schemes: the search space without offload and tiles; those that hold nothing included.
        candidates: with offload and tiles.
        cost: prices the schemes.
        num_devices: of the cluster.
        num_groups: the numbers of groups that the heads of a rank may form, by degree.
        token_limit: most tokens of a micro-batch.
        has_host: whether devices can put anything into host memory.
        tile_tokens: of a feed-forward's tile; 0: no tiles.
        recomputed: the share of layers that every scheme recomputes; None: any.
    """
    shares = RECOMPUTED[0] if recomputed is None else frozenset({recomputed})
    families = {family_of(scheme): scheme for scheme in schemes if HEAD_GROUP_METHODS.issuperset(scheme.methods)}
    rungs = [rung for rung in IN_GROUPS if rung.is_possible(shares, has_host, tile_tokens > 0)]
    made = make_candidates(
        [
            rung.of(scheme, tile_tokens=tile_tokens, head_groups=count)
            for scheme in families.values()
            for count in num_groups(scheme.degree)
            for rung in rungs
        ],
        cost, num_devices=num_devices, token_limit=token_limit,
    )  # fmt: skip
    held_tokens = most_tokens(candidates)
    return tuple(candidate for candidate in made if candidate.max_tokens > held_tokens)


def _paying(fastest: "FastestOfFamily", rounds: Iterable[Iterable[Candidate]]) -> Iterator[Candidate]:
    """The candidates that pay beside those before them, round after round while any does."""
    for candidates in rounds:
        if fastest.needs_no_recompute:
            return
        pays = [candidate for candidate in candidates if fastest.add(candidate)]
        yield from pays
        if not pays and not fastest.needs_longer:
            return


def _share(scheme: PipelineConfig) -> float:
    return scheme.num_recomputed / scheme.num_layers


def _is_within(scheme: PipelineConfig, other: PipelineConfig) -> bool:
    """Whether every search space of ``other``'s degree, stages and method has ``scheme``."""
    methods = {*other.methods, Method.DENSE}
    return (
        scheme.degree <= other.degree
        and scheme.num_stages <= other.num_stages
        and methods.issuperset(scheme.methods)
        and scheme.shard_gradients <= other.shard_gradients
    )


def family_of(scheme: PipelineConfig) -> object:
    """What schemes share that differ in recompute alone."""
    return scheme.degree, scheme.stage_layers, scheme.methods, scheme.weights, scheme.shard_gradients


class ComparedTimes:
    """The seconds of one sequence alone under candidates, at some lengths up to the longest; computed once for each."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.lengths = np.unique(np.geomspace(1, max_length, COMPARED_LENGTHS).astype(np.int64))
        self._times_s: dict[Candidate, np.ndarray] = {}

    def of(self, candidate: Candidate) -> np.ndarray:
        """The seconds at every length, whatever the candidate holds."""
        if candidate not in self._times_s:
            self._times_s[candidate] = candidate.times_s(self.lengths) + candidate.overhead_s
        return self._times_s[candidate]

    def held(self, candidate: Candidate) -> np.ndarray:
        """The seconds at the lengths that the candidate holds; inf at others."""
        return np.where(self.lengths <= candidate.max_tokens, self.of(candidate), np.inf)


class FastestOfFamily:
    """The seconds of one sequence alone under the fastest of a family's candidates, by length."""

    def __init__(self, candidates: Sequence[Candidate], compared: ComparedTimes, *, needs_longer: bool) -> None:
        self._compared = compared
        self._times_s = np.full(len(compared.lengths), np.inf)
        for candidate in candidates:
            self._times_s = np.minimum(self._times_s, compared.held(candidate))
        self.needs_longer = needs_longer
        self._max_tokens = most_tokens(candidates)
        keeping_all = (k for k in candidates if k.scheme.is_plain and not any(k.scheme.recompute))
        self.needs_no_recompute = most_tokens(keeping_all) >= compared.max_length

    def add(self, candidate: Candidate) -> bool:
        """Add a candidate, if it saves :data:`PAYS` at some length, or holds more than all others where that is needed.

        Whether it was added. What holds nothing is not, nor what ``cost`` does not know. What a candidate holds is
        asked for only where it matters: where it is no faster than others at any length, and may not be needed for
        longer sequences, nobody asks.
        """
        limit_s = (1 - PAYS) * self._times_s
        try:
            if not self.needs_longer and not (self._compared.of(candidate) < limit_s).any():
                return False
            times_s = self._compared.held(candidate)
        except InputError:
            return False  # no costs for it: a profile knows what was profiled
        pays = bool((times_s < limit_s).any())
        if self.needs_longer and self._max_tokens < candidate.max_tokens:
            pays = True
        if pays:
            self._times_s = np.minimum(self._times_s, times_s)
            self._max_tokens = max(self._max_tokens, candidate.max_tokens)
        return pays
