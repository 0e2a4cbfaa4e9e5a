"""Draft plans: which pipelines compute which sequences, as positions in the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lengthwise.core.batch import filler_lengths
from lengthwise.core.pipeline_config import Strategy
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.problem import PricedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDraft:
    """One pipeline and the packs it computes."""

    candidate: Candidate
    ranks: tuple[int, ...]
    packs: tuple[tuple[int, ...], ...] = ()
    """Positions in the batch of each pack's sequences."""
    runs: tuple[Candidate, ...] = ()
    """The candidate each pack runs as, of the family of ``candidate``; empty: all as ``candidate``."""
    padded_to: tuple[int, ...] = ()
    """Tokens that each pack's sequences are padded to; empty: none is."""
    rows: int = 0
    """Sequences that each padded pack is laid out as, the last ones of padding alone; 0: as many as it has."""
    is_in_order: bool = False
    """Whether packs are issued in the order in which they are here; else as ``issue_order`` says."""


Phase = tuple[PipelineDraft, ...]
"""Pipelines side by side, on the first ranks of the cluster, if not on all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftPlan:
    """Who computes what in one step."""

    phases: tuple[Phase, ...]
    lower_bound_s: float = 0.0
    """Seconds that no plan of the schemes the policy may use is faster than, its update included; 0: none is proven."""


def runs_of(pipeline: PipelineDraft) -> tuple[Candidate, ...]:
    """The candidate that each pack runs as."""
    return pipeline.runs or (pipeline.candidate,) * len(pipeline.packs)


def numbers_by_candidate(runs: Sequence[Candidate]) -> dict[Candidate, list[int]]:
    """Which packs run as each candidate."""
    numbers: dict[Candidate, list[int]] = {}
    first = 0
    for run, same in groupby(runs):
        last = first + len(list(same))
        numbers.setdefault(run, []).extend(range(first, last))
        first = last
    return numbers


def laid_out(priced: PricedBatch, pipeline: PipelineDraft) -> Iterator[tuple[int, int]]:
    """Tokens of each pack, padding of sequences included, and tokens of its longest sequence."""
    for number, pack in enumerate(pipeline.packs):
        if pipeline.padded_to:
            yield pipeline.padded_to[number] * max(pipeline.rows, len(pack)), pipeline.padded_to[number]
        else:
            lengths = [priced.batch.lengths[position] for position in pack]
            yield sum(lengths), max(lengths)


def fillers(priced: PricedBatch, pipeline: PipelineDraft) -> list[int]:
    """Tokens of padding that bring each pack of the pipeline to a size of the lattice; 0 where it fits none."""
    lattice = priced.problem.lattice
    if lattice is None:
        return [0] * len(pipeline.packs)
    tokens = [tokens for tokens, _ in laid_out(priced, pipeline)]
    return [lattice.size_of(num_tokens) - num_tokens if num_tokens <= lattice.sizes[-1] else 0 for num_tokens in tokens]


def longest_first(lengths: Sequence[int], pack: Sequence[int]) -> tuple[int, ...]:
    """Positions of a pack in the order in which slices cut it."""
    return tuple(sorted(pack, key=lambda position: -lengths[position]))


def computed_lengths_of(priced: PricedBatch, pipeline: PipelineDraft, number: int) -> list[int]:
    """The lengths that one pack computes, the longest first, and those of filler."""
    lengths = sorted(lengths_of(priced, pipeline, number), reverse=True)
    filler = fillers(priced, pipeline)[number]
    return [*lengths, *filler_lengths(filler, max(lengths))] if filler else lengths


def lengths_of(priced: PricedBatch, pipeline: PipelineDraft, number: int) -> list[int]:
    """The lengths that one pack computes, filler left out."""
    pack = pipeline.packs[number]
    if pipeline.padded_to:
        return [pipeline.padded_to[number]] * max(pipeline.rows, len(pack))
    return [priced.batch.lengths[position] for position in pack]


def strategy_of(phase: Phase, num_devices: int) -> Strategy:
    """Schemes and ranks of a phase on a cluster of ``num_devices``."""
    return Strategy(
        schemes=tuple(pipeline.candidate.scheme for pipeline in phase),
        ranks=tuple(pipeline.ranks for pipeline in phase),
        num_idle=num_devices - sum(len(pipeline.ranks) for pipeline in phase),
    )
