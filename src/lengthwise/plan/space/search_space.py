"""Which schemes a cluster offers, what a run's batches look like: the planning problem they make."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.garbage import collection_paused
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig, WeightPlacement
from lengthwise.core.specs import ClusterSpec
from lengthwise.data.sampler import Sampler
from lengthwise.plan.space.balanced_steps import pays
from lengthwise.plan.space.candidate import Candidate, degrees_of, make_candidates, most_tokens, schemes_of, stages_of
from lengthwise.plan.space.fewest_recomputed import with_fewest_recomputed
from lengthwise.plan.space.memory_ladder import (
    TILE_TOKENS,
    OffloadMode,
    head_group_candidates,
    ladder_candidates,
    selective_candidates,
)
from lengthwise.plan.space.nothing_fits import nothing_fits
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.sharded_gradients import GradientSharding, paying_schemes, sharded, with_sharded
from lengthwise.plan.space.sliced_packs import Slices, with_slices
from lengthwise.plan.space.split_backwards import ZeroBubble, with_split_backwards

DEFAULT_METHODS = (Method.ULYSSES, Method.RING, Method.MEGATRON_TS)
SHARDED_METHODS = tuple(method for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.SHARDED)
"""The five methods of ParaDySe, which layers of one pack can mix."""
NUM_SAMPLES = 32
"""Batches that proposals and tuning look at: fewer overfit heavy tails."""
FEWEST_SAMPLES, SAMPLED_SEQUENCES = 8, 1 << 20
"""Fewer batches, but these at least, where all of them together hold more than so many sequences."""
SAMPLES_SEED = 1 << 63
"""Added to the run's seed: typical batches, but not the ones that are then planned."""
RECOMPUTE_STEPS = 8
"""Levels of recompute between none and all that `auto` may choose."""


class RecomputeMode(StrEnum):
    """Which layers schemes may recompute in the backward."""

    AUTO = "auto"
    NONE = "none"
    ALL = "all"

    def levels(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of recomputed layers: none, all, or both and every eighth of the layers between them."""
        if self is RecomputeMode.AUTO:
            return tuple(sorted({num_layers * k // RECOMPUTE_STEPS for k in range(RECOMPUTE_STEPS + 1)}))
        return (0,) if self is RecomputeMode.NONE else (num_layers,)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Limits of the schemes that policies may use; None: none but the cluster's."""

    max_degree: int | None = None
    max_stages: int | None = None
    methods: tuple[Method, ...] | None = None
    """How devices share a layer; None: by ``DEFAULT_METHODS``, or by ``SHARDED_METHODS`` too, where the former do not
    hold the longest sequence, or typical steps gain by them."""
    recompute: RecomputeMode = RecomputeMode.AUTO
    degree: int | None = None
    """Exactly so many devices per stage."""
    head_layers: float = 0.0
    """Layers that cost as much as the head; the last stage holds fewer for it."""
    offload: OffloadMode = OffloadMode.AUTO
    """Whose saved tensors are on the host between forward and backward; auto: no layer's, and others' where that pays
    or longer sequences need it."""
    shard_gradients: GradientSharding = GradientSharding.NONE
    """Whether ranks of a stage with whole weights shard the gradients of every micro-batch; auto: where that pays."""
    zero_bubble: ZeroBubble = ZeroBubble.NONE
    """Whether stages split backwards, to fill their waits with gradients of weights; auto: whatever is faster."""
    slices: Slices = Slices.NONE
    """Whether pipelines of several stages may cut micro-batches into slices of tokens; auto: whatever is faster."""
    local_sequences: bool = False
    """Whether `auto` may have sequences whole on one rank of a stage, where it then sends nothing of them."""
    tile_tokens: int | None = None
    """Tokens that feed-forwards compute at a time, 0 for all; None: all, and tiles where longer sequences need them."""
    planned_tile: int = TILE_TOKENS
    """Tokens of the tiles that plans choose."""
    has_selective: bool = True
    """Whether recomputed layers may keep what attention gave (selective recompute), where that pays."""
    has_head_groups: bool = True
    """Whether attention may compute groups of heads, where nothing else holds the longest sequence."""

    def __post_init__(self) -> None:
        for name, limit in (("max_degree", self.max_degree), ("max_stages", self.max_stages)):
            if limit is not None and limit < 1:
                raise InputError(f"{name} must be at least 1, not {limit}")
        if self.tile_tokens is not None and self.tile_tokens < 0:
            raise InputError(f"a tile has at least 1 token, or 0 for all, not {self.tile_tokens}")
        if self.shard_gradients is GradientSharding.ALL and not self.has_whole_weights:
            raise InputError(
                f"{Setting.SHARD_GRADIENTS}=all, and by {', '.join(self.methods or ())} ranks hold shards of weights "
                "and gradients anyway; leave it out"
            )

    @property
    def has_whole_weights(self) -> bool:
        """Whether several devices of a stage may hold whole weights."""
        return any(WEIGHTS_OF.get(method) is not WeightPlacement.SHARDED for method in self.methods or DEFAULT_METHODS)

    @property
    def widest(self) -> "SearchSpace":
        """The space with the methods that hold longer sequences too, unless methods are given."""
        return (
            self if self.methods else replace(self, methods=tuple(dict.fromkeys((*DEFAULT_METHODS, *SHARDED_METHODS))))
        )

    def schemes(
        self, num_layers: int, cluster: ClusterSpec, *, recomputed: Sequence[int] | None = None
    ) -> list[PipelineConfig]:
        """Every scheme within the limits on ``cluster``; with these numbers of recomputed layers, if given.

        Raises:
            InputError: what layers save is to be on the host, and the devices can put nothing there.
        """
        degrees = [self.degree] if self.degree else degrees_of(cluster.num_devices, cluster.devices_per_node)
        stages = stages_of(cluster.num_devices, num_layers)
        schemes = schemes_of(
            num_layers,
            degrees=[degree for degree in degrees if degree <= (self.max_degree or degree)],
            stages=[count for count in stages if count <= (self.max_stages or count)],
            methods=self.methods or DEFAULT_METHODS,
            recomputed=self.recompute.levels(num_layers) if recomputed is None else recomputed,
            head_layers=self.head_layers,
        )
        fields = self._activations(num_layers, cluster)
        schemes = [replace(scheme, **fields) for scheme in schemes] if fields else schemes
        return list(map(sharded, schemes)) if self.shard_gradients is GradientSharding.ALL else schemes

    def rungs_on(self, cluster: ClusterSpec) -> dict[str, Any]:
        """Which rungs of the memory ladder may join on ``cluster``, as :func:`ladder_candidates` takes them."""
        return {
            "has_host": self.offload is not OffloadMode.NONE and cluster.device.host_bytes_per_s > 0,
            "tile_tokens": self.planned_tile if self.tile_tokens is None else 0,
            "recomputed": {RecomputeMode.NONE: 0.0, RecomputeMode.ALL: 1.0}.get(self.recompute),
        }

    def refusal(
        self, costs: Sequence[CostModel], cluster: ClusterSpec, num_layers: int, *, subject: str = ""
    ) -> InfeasibleError:
        """The error that not even one token fits ``cluster``, with what the leanest scheme takes.

        Args:
            costs: with the optimizer's state on the device, and in host memory where it may be.
            cluster: the devices.
            num_layers: of the model.
            subject: what the schemes are of, for the beginning of the message.
        """
        others = replace(
            self, max_degree=self.degree and self.max_degree, max_stages=None,
            methods=tuple(dict.fromkeys((*(self.methods or ()), *DEFAULT_METHODS, *SHARDED_METHODS))),
            recompute=RecomputeMode.AUTO,
            shard_gradients=max(self.shard_gradients, GradientSharding.AUTO, key=list(GradientSharding).index),
        )  # fmt: skip
        allowed, wider = (space._every_scheme(num_layers, cluster) for space in (self, others))
        return nothing_fits(allowed, costs, cluster, wider=wider, methods=self.methods, subject=subject)

    def _every_scheme(self, num_layers: int, cluster: ClusterSpec) -> list[PipelineConfig]:
        """Schemes with every method that may join, with sharded gradients too where these may be chosen."""
        schemes = self.widest.schemes(num_layers, cluster)
        return with_sharded(schemes) if self.shard_gradients is GradientSharding.AUTO else schemes

    def _activations(self, num_layers: int, cluster: ClusterSpec) -> dict[str, Any]:
        """The fields of every scheme that say what becomes of its activations."""
        fields: dict[str, Any] = {"tile_tokens": self.tile_tokens} if self.tile_tokens else {}
        if self.offload is OffloadMode.ALL:
            if not cluster.device.host_bytes_per_s:
                raise InputError(
                    f"{Setting.OFFLOAD}=all, and nothing of a {cluster.device.name} can be put into host memory; leave "
                    "it out, or name devices that have a link to their host"
                )
            fields["offload"] = (True,) * num_layers
        return fields


@collection_paused()
def make_problem(
    cost: CostModel,
    *,
    cluster: ClusterSpec,
    num_layers: int,
    max_length: int,
    search_space: SearchSpace,
    samples: Iterable[np.ndarray] = (),
    token_limit: int | None = None,
    spare: CostModel | None = None,
) -> PlanningProblem:
    """Make the planning problem of every policy, with the schemes that ``cost`` knows and a device can hold.

    Args:
        cost: prices the schemes.
        cluster: the devices that plans must tile.
        num_layers: of the model.
        max_length: the longest sequence of the run, in tokens.
        search_space: limits of the schemes.
        samples: lengths of typical global batches.
        token_limit: most tokens of a micro-batch, where fewer than memory holds are wanted.
        spare: prices the schemes with the optimizer's state in host memory; used where the longest sequence does not
            fit otherwise, and longer ones do then.

    Raises:
        InfeasibleError: under no scheme does even the model state fit.
    """
    samples = tuple(samples)
    _, candidates = _schemes_and_candidates(
        (cost,) if spare is None else (cost, spare), cluster, num_layers, max_length, search_space, token_limit, samples
    )
    if not candidates:
        raise search_space.refusal((cost,) if spare is None else (cost, spare), cluster, num_layers)
    return PlanningProblem(
        candidates=candidates,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        memory_bytes=cluster.device.memory_bytes,
        host_memory_bytes=cluster.device.host_memory_bytes,
        max_length=max_length,
        samples=samples,
        local_sequences=search_space.local_sequences,
    )


def _schemes_and_candidates(
    costs: Sequence[CostModel],
    cluster: ClusterSpec,
    num_layers: int,
    max_length: int,
    search_space: SearchSpace,
    token_limit: int | None,
    samples: Sequence[np.ndarray],
) -> tuple[list[PipelineConfig], tuple[Candidate, ...]]:
    """The schemes and candidates under the first cost under which the longest sequence fits, first with all heads at
    once, then in groups of heads; else those that hold the most tokens: where all refuse, the limit that is told is the
    one to train at. Groups of heads join too where slices alone hold the longest sequence: some policies have none.
    """
    best: tuple[list[PipelineConfig], tuple[Candidate, ...]] = [], ()
    tried = []
    for cost in costs:
        made = _candidates(cost, cluster, num_layers, max_length, search_space, token_limit, samples)
        tried.append((cost, *made))
        if not tried[1:] or most_tokens(made[1]) > most_tokens(best[1]):
            best = made
        if most_tokens(best[1]) >= max_length:
            break
    for cost, schemes, candidates in tried:
        if most_tokens(_uncut(best[1])) >= max_length:
            break
        joined = candidates + _in_head_groups(cost, cluster, schemes, _uncut(candidates), search_space, token_limit)
        holds_more = most_tokens(_uncut(joined)) > most_tokens(_uncut(best[1]))
        if holds_more and most_tokens(joined) >= min(most_tokens(best[1]), max_length):
            best = schemes, joined
    return best


def _uncut(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose micro-batches have no slices."""
    return [candidate for candidate in candidates if candidate.scheme.slices == 1]


def _in_head_groups(
    cost: CostModel,
    cluster: ClusterSpec,
    schemes: Sequence[PipelineConfig],
    candidates: Sequence[Candidate],
    search_space: SearchSpace,
    token_limit: int | None,
) -> tuple[Candidate, ...]:
    """Candidates whose attention computes groups of heads, and which hold more than ``candidates``; with sharded
    gradients too, where these may be chosen.
    """
    num_groups = getattr(cost, "head_groups", None)
    if not search_space.has_head_groups or num_groups is None:
        return ()
    if search_space.shard_gradients is GradientSharding.AUTO:
        schemes = with_sharded(schemes)
    made = head_group_candidates(
        schemes, candidates, cost, num_devices=cluster.num_devices, num_groups=num_groups, token_limit=token_limit,
        **search_space.rungs_on(cluster),
    )  # fmt: skip
    is_all = search_space.offload is OffloadMode.ALL
    return tuple(candidate for candidate in made if not is_all or all(candidate.scheme.offload or (False,)))


def _candidates(
    cost: CostModel,
    cluster: ClusterSpec,
    num_layers: int,
    max_length: int,
    search_space: SearchSpace,
    token_limit: int | None,
    samples: Sequence[np.ndarray],
) -> tuple[list[PipelineConfig], tuple[Candidate, ...]]:
    """The schemes of the search space, offload and tiles left out, and the candidates with them, under ``cost``."""
    make = partial(make_candidates, cost=cost, num_devices=cluster.num_devices, token_limit=token_limit)
    add_rungs = partial(
        _rungs, cost=cost, cluster=cluster, max_length=max_length, search_space=search_space, token_limit=token_limit
    )
    schemes = search_space.schemes(num_layers, cluster)
    candidates = make(schemes)
    if search_space.methods is None and most_tokens(candidates) < max_length:
        schemes = search_space.widest.schemes(num_layers, cluster)
        candidates = make(schemes)
    plain, candidates = candidates, candidates + add_rungs(schemes, candidates)

    def with_rungs(others: Sequence[PipelineConfig]) -> tuple[Candidate, ...]:
        return (made := make(others)) + add_rungs(others, made, beside=plain)

    typical: dict[str, Any] = {"num_devices": cluster.num_devices, "max_length": max_length, "samples": samples}
    if search_space.shard_gradients is GradientSharding.AUTO:
        more, paying = paying_schemes(schemes, candidates, with_rungs, **typical)
        schemes, candidates = schemes + more, candidates + paying
    if search_space.methods is None:
        present = set(schemes)
        more = [scheme for scheme in search_space.widest.schemes(num_layers, cluster) if scheme not in present]
        if pays(others := with_rungs(more), candidates, **typical):
            schemes, candidates = schemes + more, candidates + others
    candidates = with_split_backwards(candidates, search_space.zero_bubble)
    return schemes, with_slices(candidates, search_space.slices, samples=samples, max_length=max_length)


def _rungs(
    schemes: Sequence[PipelineConfig],
    candidates: tuple[Candidate, ...],
    beside: tuple[Candidate, ...] = (),
    *,
    cost: CostModel,
    cluster: ClusterSpec,
    max_length: int,
    search_space: SearchSpace,
    token_limit: int | None,
) -> tuple[Candidate, ...]:
    """What joins ``candidates``, which were made of ``schemes``: finer recompute, offload, tiles, selective recompute.

    ``beside``: other candidates of the search space.
    """
    options: dict[str, Any] = {
        "num_devices": cluster.num_devices, "max_length": max_length, "token_limit": token_limit,
    }  # fmt: skip
    joined = with_fewest_recomputed(candidates, cost, **options)
    if search_space.recompute is RecomputeMode.AUTO and search_space.has_selective:
        joined += selective_candidates(schemes, joined, cost, **options)
    if search_space.offload is not OffloadMode.ALL:
        joined += ladder_candidates(schemes, joined + beside, cost, **options, **search_space.rungs_on(cluster))
    return joined[len(candidates) :]


def make_sampler(lengths: LengthIndex, *, tokens_per_step: int, seed: int) -> Sampler:
    """The stream of global batches within a token budget."""
    return Sampler(lengths, seed=seed, tokens_per_step=tokens_per_step)


def sample_lengths(lengths: LengthIndex, *, tokens_per_step: int, seed: int) -> Iterator[np.ndarray]:
    """Lengths of typical batches that are not those of ``seed``."""
    other = (seed + SAMPLES_SEED) % (1 << 64)
    return lengths_of(make_sampler(lengths, tokens_per_step=tokens_per_step, seed=other))


def lengths_of(batches: Iterable[GlobalBatch]) -> Iterator[np.ndarray]:
    """Lengths of the first ``NUM_SAMPLES`` batches; of fewer where they are large, for which a few are typical."""
    num_sequences = 0
    for number, batch in enumerate(islice(batches, NUM_SAMPLES)):
        if number >= FEWEST_SAMPLES and num_sequences >= SAMPLED_SEQUENCES:
            return
        num_sequences += len(batch.lengths)
        yield np.array(batch.lengths, dtype=np.int64)


def first_batches(lengths: LengthIndex, *, tokens_per_step: int, seed: int, steps: int) -> list[GlobalBatch]:
    """The first ``steps`` batches of the run."""
    return list(islice(make_sampler(lengths, tokens_per_step=tokens_per_step, seed=seed), steps))
