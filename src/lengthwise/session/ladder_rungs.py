"""The memory ladder: the longest sequence with each thing in turn that frees memory, and what each costs in time.

A rung adds to what the ones before it do: sharded gradients where these hold more, recompute of all but attention, then
of attention too, feed-forwards in tiles, what layers save on the host, methods that shard weights, the optimizer's
state on the host, attention by groups of heads where that holds more, and slices in time where those do. On each, the
scheme that holds the longest sequence is shown, and how long a sequence takes that the rung before still holds, under
the fastest scheme of either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate, make_candidates, most_tokens
from lengthwise.plan.space.memory_ladder import LEANER, MIXED, TILE_TOKENS, Rung
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.session.length_candidates import LengthSearch, groups_of_heads, holding_more, schemes_of

PLAIN = Rung(recomputed=0, offloaded=0)
SELECTIVE = Rung(recomputed=1, offloaded=0, keeps_attention=True)
RECOMPUTE = Rung(recomputed=1, offloaded=0)
TILES = Rung(recomputed=1, offloaded=0, is_tiled=True)


@dataclass(frozen=True, kw_only=True)
class LadderRung:
    """The longest sequence of one rung, and what it takes."""

    name: str
    longest: Candidate
    """The scheme that holds the longest sequence; its ``max_tokens`` may be 0."""
    longest_s: float
    """Seconds of that sequence alone, forward, backward and update; 0 where none fits."""
    at_tokens: int
    """The longest sequence of the rung before, which this one holds too; 0 where none fitted there."""
    slowdown: float
    """Seconds of a sequence that long under the fastest scheme that is of this rung alone, over those on the rung
    before; 0 where none fitted there."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the longest sequence alone."""
        return self.longest.max_tokens / self.longest_s if self.longest_s else 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes per device in the host's memory, at the longest sequence."""
        return self.longest.host_bytes(self.longest.max_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rung": self.name,
            "scheme": self.longest.scheme.name,
            "max_tokens": self.longest.max_tokens,
            "time_s": self.longest_s,
            "tokens_per_s": self.tokens_per_s,
            "host_gib": self.host_bytes / GIB,
            "state_gib": self.longest.state_bytes / GIB,
            "at_tokens": self.at_tokens,
            "slowdown": self.slowdown,
        }


def memory_ladder(search_space: SearchSpace, cost: AnalyticCost, on_host: AnalyticCost) -> tuple[LadderRung, ...]:
    """The rungs of the model and cluster of ``cost``, with the methods of ``search_space``, each longer than those
    before, up to the positions that a model has learned; of the host where there is one: ``on_host`` is the cost with
    the optimizer's state there.

    Where ``search_space`` names no methods, those that shard weights are a rung of their own.
    """
    rungs: list[LadderRung] = []
    fastest_before: list[Candidate] = []
    for name, candidates in _candidates_of_rungs(search_space, cost, on_host):
        at_tokens = rungs[-1].longest.max_tokens if rungs else 0
        if 0 < cost.model.max_positions <= at_tokens:
            break  # no sequence is longer
        if most_tokens(candidates) <= at_tokens:
            continue  # it reaches no further
        longest = max(candidates, key=lambda candidate: candidate.max_tokens)
        before_s, now_s = (_fastest_s(of, at_tokens) for of in (fastest_before, candidates))
        rungs.append(
            LadderRung(
                name=name,
                longest=longest,
                longest_s=_alone_s(longest, longest.max_tokens),
                at_tokens=at_tokens,
                slowdown=now_s / before_s if at_tokens and now_s < np.inf else 0.0,
            )
        )
        fastest_before = candidates
    return tuple(rungs)


def _candidates_of_rungs(
    search_space: SearchSpace, cost: AnalyticCost, on_host: AnalyticCost
) -> list[tuple[str, list[Candidate]]]:
    """The name of each rung and the candidates that have what it adds."""
    device = cost.cluster.device
    has_host = device.host_bytes_per_s > 0 and device.host_memory_bytes > 0
    steps: list[tuple[str, tuple[Rung, ...]]] = [
        ("selective recompute", (SELECTIVE,)),
        ("recompute", (RECOMPUTE,)),
        ("feed-forward tiles", (TILES,)),
    ]
    every, costs = (*MIXED, *LEANER), (cost, on_host) if has_host else (cost,)
    if has_host:
        steps.append(("activations on host", tuple(rung for rung in every if rung.offloaded)))
    made_by_rung = [*_without_recompute(search_space, cost), *_steps(steps, search_space, cost)]
    if search_space.methods is None:
        made_by_rung += _steps([("sharded weights", every if has_host else (TILES,))], search_space.widest, cost)
    if has_host:
        made_by_rung += _steps([("optimizer on host", every)], search_space.widest, on_host)
    beside = [candidate for _, candidates in made_by_rung for candidate in candidates]
    in_groups = [candidate for of in costs for candidate in groups_of_heads(search_space.widest, of, beside=beside)]
    search, before = LengthSearch(search_space=search_space.widest, costs=costs), most_tokens((*beside, *in_groups))
    sliced = [option for option in holding_more(search.sliced_for, before) if option.max_tokens > before]
    return [*made_by_rung, ("attention by groups of heads", in_groups), ("slices in time", sliced)]


def _without_recompute(search_space: SearchSpace, cost: AnalyticCost) -> Iterator[tuple[str, list[Candidate]]]:
    """Candidates as they are, and with sharded gradients where these may be chosen and hold longer sequences."""
    if search_space.shard_gradients is not GradientSharding.AUTO or not search_space.has_whole_weights:
        yield from _steps([("as it is", (PLAIN,))], search_space, cost)
        return
    with_whole, with_shares = (
        candidates
        for choice in (GradientSharding.NONE, GradientSharding.ALL)
        for _, candidates in _steps([("", (PLAIN,))], replace(search_space, shard_gradients=choice), cost)
    )
    yield "as it is", with_whole
    longest, before = (most_tokens(of) for of in (with_shares, with_whole))
    if longest > before:
        yield "sharded gradients", with_shares


def _steps(
    steps: Sequence[tuple[str, tuple[Rung, ...]]], search_space: SearchSpace, cost: AnalyticCost
) -> Iterator[tuple[str, list[Candidate]]]:
    schemes = schemes_of(search_space, cost, recomputed=(0,))
    for name, rungs in steps:
        made = [_of(rung, scheme) for scheme in schemes for rung in rungs]
        yield name, list(make_candidates(made, cost, num_devices=cost.cluster.num_devices))


def _of(rung: Rung, scheme: PipelineConfig) -> PipelineConfig:
    return rung.of(scheme, tile_tokens=TILE_TOKENS)


def _alone_s(candidate: Candidate, length: int) -> float:
    """Seconds of a step of one sequence: through all stages, and the update."""
    return _passes_s(candidate, length) + candidate.update_s


def _passes_s(candidate: Candidate, length: int) -> float:
    """Seconds of one sequence through all stages."""
    stage_s = float(candidate.times_s(np.array([length]))[0]) + candidate.overhead_s
    return stage_s * candidate.flow_stages


def _fastest_s(candidates: Sequence[Candidate], length: int) -> float:
    """Seconds of a step of one sequence of ``length`` under the fastest that holds it; inf where none does."""
    fastest_s = np.inf
    if length:
        passes = [(_passes_s(c, length), c) for c in candidates if c.max_tokens >= length]
        for passes_s, candidate in sorted(passes, key=lambda item: item[0]):
            if passes_s >= fastest_s:
                break  # before updates, which take longer to price, are added
            fastest_s = min(fastest_s, passes_s + candidate.update_s)
    return fastest_s
