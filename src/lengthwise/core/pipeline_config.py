"""How one pipeline computes (scheme) and how pipelines tile the cluster (strategy). Names only, not how they run."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, chain

from lengthwise.core.errors import InputError
from lengthwise.core.scheme_types import check_types


class Method(StrEnum):
    """How the p devices of one stage share one layer."""

    DENSE = "dense"
    """One device; nothing is shared."""
    MEGATRON_TS = "megatron_ts"
    """Tensor and sequence parallel: weights split by head and feed-forward column, tokens gathered around them."""
    MEGATRON_CZ = "megatron_cz"
    """Ring context parallel; sharded weights gathered per layer (ZeRO-3)."""
    ULYSSES_Z = "ulysses_z"
    """All-to-all between tokens and heads; sharded weights gathered per layer (ZeRO-3)."""
    COLOSSAL_Z = "colossal_z"
    """Ring self-attention; sharded weights gathered per layer (ZeRO-3)."""
    METP = "metp"
    """Memory-efficient tensor parallel: weight shards broadcast in turn, keys and values in a ring."""
    ULYSSES = "ulysses"
    """All-to-all between tokens and heads; whole weights."""
    RING = "ring"
    """Ring context parallel; whole weights."""
    ULYSSES_RING = "ulysses_ring"
    """Ulysses among neighbouring ranks, rings across them; whole weights."""
    ALL_GATHER = "all_gather"
    """Context parallel by an all-gather of keys and values; whole weights."""


class WeightPlacement(StrEnum):
    """How a stage holds the weights its layers compute with."""

    WHOLE = "whole"
    SHARDED = "sharded"


WEIGHTS_OF = {
    Method.MEGATRON_TS: WeightPlacement.SHARDED,
    Method.MEGATRON_CZ: WeightPlacement.SHARDED,
    Method.ULYSSES_Z: WeightPlacement.SHARDED,
    Method.COLOSSAL_Z: WeightPlacement.SHARDED,
    Method.METP: WeightPlacement.SHARDED,
    Method.ULYSSES: WeightPlacement.WHOLE,
    Method.RING: WeightPlacement.WHOLE,
    Method.ULYSSES_RING: WeightPlacement.WHOLE,
    Method.ALL_GATHER: WeightPlacement.WHOLE,
}
"""What each method needs of the scheme; dense runs with whole weights."""


SPLIT_BACKWARD_METHODS = frozenset(WEIGHTS_OF.keys() | {Method.DENSE}) - {
    method for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.SHARDED
}
"""Methods whose backwards can be split: ranks have the weights whole, and nobody else waits for their gradients."""
HEAD_GROUP_METHODS = frozenset({Method.DENSE, Method.ULYSSES, Method.ULYSSES_Z})
"""Methods under which a rank can attend with some of its heads at a time."""
SLICE_METHODS = frozenset({Method.DENSE, Method.ULYSSES, Method.ULYSSES_Z})
"""Methods under which a rank has the keys and values of whole sequences, and can keep them for later slices."""


def check_methods(methods: tuple[Method, ...], degree: int, weights: WeightPlacement) -> None:
    """Raise ``InputError`` unless every method can run at ``degree`` with ``weights``."""
    for layer, method in enumerate(methods):
        if method is Method.DENSE:
            if degree != 1:
                raise InputError(f"layer {layer}: method dense shares nothing, so degree must be 1, not {degree}")
        elif WEIGHTS_OF[method] is not weights:
            raise InputError(
                f"layer {layer}: method {method} needs {WEIGHTS_OF[method]} weights, the scheme holds them {weights}"
            )


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """The weights that one rank computes with: a range of layers, and one of their shards."""

    first: int
    end: int
    """One past the last layer."""
    num_layers: int
    """Layers of the whole model."""
    shard: int = 0
    num_shards: int = 1
    with_input: bool = False
    """Whether it has what comes before the first layer wherever it begins."""
    with_output: bool = False
    """Whether it has what comes after the last layer wherever it ends."""

    @property
    def has_input(self) -> bool:
        """Whether the shard has what comes before the first layer: embeddings."""
        return self.first == 0 or self.with_input

    @property
    def has_output(self) -> bool:
        """Whether the shard has what comes after the last layer: norm and head."""
        return self.end == self.num_layers or self.with_output


GradientShare = tuple[int, int]
"""Of the gradients of whole weights a rank keeps one of some equal shares of every unit: which one, and of how many."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """One pipeline: devices per stage, layers per stage; per layer a method, and what becomes of its activations."""

    degree: int
    stage_layers: tuple[int, ...]
    """Layers held by each stage, first stage first."""
    methods: tuple[Method, ...]
    """One per layer of the model."""
    recompute: tuple[bool, ...]
    """One per layer: compute the forward again in the backward instead of keeping its activations."""
    weights: WeightPlacement = WeightPlacement.WHOLE
    offload: tuple[bool, ...] = ()
    """One per layer: what its forward saves for the backward (where it is recomputed, its input alone) is in host
    memory meanwhile. Empty: of no layer."""
    tile_tokens: int = 0
    """Tokens that feed-forwards compute at a time, recomputed in the backward; 0: all that a rank has."""
    head_groups: int = 1
    """Groups of heads that layers under dense, ulysses and ulysses_z attend with in turn; 1: with all at once."""
    keep_attention: bool = field(default=False, repr=False)
    """Whether recomputed layers keep what attention gave and compute all else again (selective recompute)."""
    shard_gradients: bool = False
    """Whether the ranks of a stage reduce the gradients of whole weights unit by unit in every backward, each to its
    share of them (as ZeRO stage 2 does), instead of keeping all of them until the step ends."""
    zero_bubble: bool = False
    """Whether stages split the backwards of layers that are not recomputed: gradients of inputs go to the stage before
    at once, products that give gradients of weights are taken later, where a stage would wait (ZB-H1)."""
    slices: int = field(default=1, repr=False)
    """Slices that the tokens of each micro-batch are cut into, which follow one another through the stages: forwards in
    order, backwards in reverse. Keys and values of a slice stay for those behind it."""

    def __hash__(self) -> int:
        """The hash of what tells most schemes apart: planners look up many, and there is one method per layer."""
        return hash((self.degree, self.stage_layers, self.methods[0], self.recompute, self.offload, self.tile_tokens))

    def __post_init__(self) -> None:
        check_types(self)
        if not any(self.offload):
            object.__setattr__(self, "offload", ())  # one spelling of none
        object.__setattr__(self, "keep_attention", self.keep_attention and any(self.recompute))
        if self.degree < 1:
            raise InputError(f"a scheme needs degree >= 1, not {self.degree}")
        if not self.stage_layers or min(self.stage_layers) < 1:
            raise InputError(f"every stage needs at least one layer; got layers per stage {self.stage_layers}")
        if len(self.methods) != self.num_layers or len(self.recompute) != self.num_layers:
            raise InputError(
                f"the stages hold {self.num_layers} layers, but there are {len(self.methods)} methods and "
                f"{len(self.recompute)} recompute flags; give one of each per layer"
            )
        if len(self.offload) not in (0, self.num_layers):
            raise InputError(f"{len(self.offload)} offload flags for {self.num_layers} layers; give one each, or none")
        if self.tile_tokens < 0:
            raise InputError(f"a feed-forward computes tiles of at least 1 token, or 0 for all, not {self.tile_tokens}")
        if self.head_groups < 1 or (self.head_groups > 1 and not HEAD_GROUP_METHODS & set(self.methods)):
            raise InputError(
                f"{self.head_groups} groups of heads: a scheme has at least 1, and more than 1 only with layers under "
                f"{', '.join(sorted(HEAD_GROUP_METHODS))}, not {', '.join(dict.fromkeys(self.methods))} alone"
            )
        if self.shard_gradients and (self.degree == 1 or self.weights is not WeightPlacement.WHOLE):
            raise InputError(
                f"gradients are sharded over the ranks of a stage that hold whole weights, two at least; a scheme of "
                f"degree {self.degree} with {self.weights} weights has shard_gradients=false"
            )
        if self.zero_bubble and (reason := self._why_not_split()):
            raise InputError(f"{reason}; such a scheme has zero_bubble=false")
        if self.slices < 1 or (self.slices > 1 and (reason := self._why_not_sliced())):
            raise InputError(f"{reason if self.slices > 1 else f'{self.slices} slices'}; such a scheme has slices=1")
        check_methods(self.methods, self.degree, self.weights)

    def _why_not_sliced(self) -> str:
        """Why micro-batches cannot be cut into slices; empty: they can."""
        if not SLICE_METHODS.issuperset(self.methods):
            return (
                f"later slices need the keys and values of earlier ones, which ranks keep under "
                f"{', '.join(sorted(SLICE_METHODS))}, not {', '.join(dict.fromkeys(self.methods))}"
            )
        if self.shard_gradients:
            return "ranks reduce gradients to shares once for a micro-batch, not for each of its slices"
        if self.head_groups > 1:
            return "a micro-batch is cut into slices of tokens or into groups of heads, not both"
        return ""

    def _why_not_split(self) -> str:
        """Why backwards cannot be split; empty: they can."""
        if self.num_stages == 1:
            return "backwards are split for the stages before, and a scheme of 1 stage has none"
        if not SPLIT_BACKWARD_METHODS.issuperset(self.methods):
            return (
                "backwards are split where ranks have the weights whole, under "
                f"{', '.join(sorted(SPLIT_BACKWARD_METHODS))}, not {', '.join(dict.fromkeys(self.methods))}"
            )
        if self.shard_gradients:
            return "a split backward has no gradients of weights that ranks could reduce to shares"
        if not self.is_plain or self.head_groups > 1:
            return "backwards are not split with activations on the host, tiles, groups of heads or slices"
        return ""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.stage_layers)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stage_layers)

    @property
    def num_devices(self) -> int:
        """Devices one pipeline of this scheme occupies."""
        return self.degree * self.num_stages

    @property
    def num_recomputed(self) -> int:
        """Layers whose forward runs again in the backward."""
        return sum(self.recompute)

    @property
    def num_offloaded(self) -> int:
        """Layers whose saved tensors are in host memory between forward and backward."""
        return sum(self.offload)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is offloaded, layers compute all tokens and heads at once, and recomputed ones all again."""
        is_whole = not self.tile_tokens and self.head_groups == 1 and self.slices == 1
        return is_whole and not self.offload and not self.keep_attention

    def is_offloaded(self, layer: int) -> bool:
        """Whether what ``layer`` saves is in host memory between its forward and its backward."""
        return bool(self.offload) and self.offload[layer]

    @property
    def name(self) -> str:
        """Degree x stages, methods, then layers recomputed (r; s: all of them but attention) and offloaded (o), tokens
        of a feed-forward's tile (t), groups of heads (g), slices of micro-batches (c), sharded gradients (z2) and split
        backwards (zb), as tables show it: ``<8,2> ulysses r16``, ``<8,1> ulysses r32 o32 t4096``.
        """
        methods = "+".join(dict.fromkeys(self.methods))
        groups = self.head_groups if self.head_groups > 1 else 0
        counts = [("s" if self.keep_attention else "r", self.num_recomputed), ("o", self.num_offloaded)]
        slices = self.slices if self.slices > 1 else 0
        counts += [("t", self.tile_tokens), ("g", groups), ("c", slices), ("z", 2 if self.shard_gradients else 0)]
        words = f"<{self.degree},{self.num_stages}> {methods}" + "".join(f" {key}{n}" for key, n in counts if n)
        return f"{words} zb" if self.zero_bubble else words

    def layers_of_stage(self, stage: int) -> range:
        """The layers that ``stage`` holds."""
        ends = (0, *accumulate(self.stage_layers))
        return range(ends[stage], ends[stage + 1])

    def holding(self, stage: int, place: int) -> "WeightShard":
        """The weights that the rank at ``place`` of the ``degree`` ranks of ``stage`` computes with."""
        is_split = self.weights is WeightPlacement.SHARDED and self.degree > 1
        shard, num_shards = (place, self.degree) if is_split else (0, 1)
        layers = self.layers_of_stage(stage)
        return WeightShard(
            first=layers.start, end=layers.stop, num_layers=self.num_layers, shard=shard, num_shards=num_shards
        )

    def gradient_share(self, place: int) -> GradientShare | None:
        """What the rank at ``place`` of a stage keeps of gradients; None: those of all weights that it holds."""
        return (place, self.degree) if self.shard_gradients else None


def uniform_scheme(
    num_layers: int,
    *,
    degree: int = 1,
    stages: int = 1,
    method: Method = Method.DENSE,
    recomputed: int = 0,
    offloaded: int = 0,
    tile_tokens: int = 0,
    head_groups: int = 1,
    head_layers: float = 0.0,
) -> PipelineConfig:
    """One method for every layer; layers, and those recomputed and offloaded, spread evenly over the stages.

    The last stage also computes the head, which costs as much as ``head_layers`` layers, and holds fewer layers for it.
    Where the others do not divide, the first ones hold one more.

    Raises:
        InputError: more stages, recomputed or offloaded layers than layers, or a method that ``degree`` excludes.
    """
    if not 1 <= stages <= num_layers or not 0 <= recomputed <= num_layers or not 0 <= offloaded <= num_layers:
        raise InputError(
            f"{num_layers} layers cannot form {stages} stages with {recomputed} of them recomputed and {offloaded} "
            "offloaded"
        )
    return PipelineConfig(
        degree=degree,
        stage_layers=split_layers(num_layers, stages, head_layers=head_layers),
        methods=(method,) * num_layers,
        recompute=spread(recomputed, num_layers),
        offload=spread(offloaded, num_layers),
        tile_tokens=tile_tokens,
        head_groups=head_groups,
        weights=WEIGHTS_OF.get(method, WeightPlacement.WHOLE),
    )


def split_layers(num_layers: int, stages: int, *, head_layers: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, so that the largest, the head counted to the last one, is as small as possible."""
    if stages == 1:
        return (num_layers,)

    def largest(last: int) -> float:
        return max(-(-(num_layers - last) // (stages - 1)), last + head_layers)

    last = min(range(num_layers // stages, 0, -1), key=largest)
    num_per_stage, more = divmod(num_layers - last, stages - 1)
    return (*(num_per_stage + (stage < more) for stage in range(stages - 1)), last)


@lru_cache(maxsize=4096)
def spread(count: int, total: int) -> tuple[bool, ...]:
    """``count`` of ``total`` flags set, at even distances."""
    return tuple((place + 1) * count // total > place * count // total for place in range(total))


def dense_scheme(num_layers: int, *, recompute: bool = False) -> PipelineConfig:
    """The whole model on one device."""
    return uniform_scheme(num_layers, recomputed=num_layers if recompute else 0)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The pipelines of one step: schemes and the ranks that run each; the last ranks may be in none."""

    schemes: tuple[PipelineConfig, ...]
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each scheme, stage by stage: stage s of degree p is ``ranks[s * p : (s + 1) * p]``."""
    num_idle: int = 0
    """Ranks after these that compute nothing; they keep their share of master weights and optimizer state."""

    def __post_init__(self) -> None:
        if len(self.schemes) != len(self.ranks):
            raise InputError(f"{len(self.schemes)} schemes but {len(self.ranks)} rank lists")
        for scheme, ranks in zip(self.schemes, self.ranks):
            if len(ranks) != scheme.num_devices:
                raise InputError(
                    f"a scheme of degree {scheme.degree} and {scheme.num_stages} stages needs {scheme.num_devices} "
                    f"ranks, not {len(ranks)}"
                )
        used = sorted(chain.from_iterable(self.ranks))
        if used != list(range(len(used))):
            raise InputError(f"schemes must tile ranks 0..{len(used) - 1}, each used once; they use {used}")
        if self.num_idle < 0:
            raise InputError(f"pipelines use {len(used)} ranks, the cluster has {len(used) + self.num_idle}")

    @property
    def num_devices(self) -> int:
        """Devices of the cluster, idle ones included."""
        return sum(map(len, self.ranks)) + self.num_idle

    @property
    def distinct_schemes(self) -> tuple[PipelineConfig, ...]:
        """Each scheme once, in the order of its first pipeline."""
        objects = {id(scheme): scheme for scheme in self.schemes}  # of thousands mostly a few, and hashing one is slow
        return tuple(dict.fromkeys(objects.values()))

    @property
    def is_homogeneous(self) -> bool:
        """Whether these are pipelines of one scheme on consecutive ranks, as :func:`homogeneous` makes them."""
        used = self.num_devices - self.num_idle
        return len(self.distinct_schemes) == 1 and list(chain.from_iterable(self.ranks)) == list(range(used))


def homogeneous(scheme: PipelineConfig, num_devices: int, *, num_idle: int = 0) -> Strategy:
    """The strategy of as many pipelines of one scheme as ``num_devices`` holds, on consecutive ranks.

    Raises:
        InputError: more devices are left over than the ``num_idle`` last ones.
    """
    used = num_devices - num_idle
    if used % scheme.num_devices:
        raise InputError(
            f"{used} devices cannot be tiled by pipelines of {scheme.num_devices}; "
            "choose a degree and a number of stages whose product divides the number of devices"
        )
    starts = range(0, used, scheme.num_devices)
    return Strategy(
        schemes=(scheme,) * len(starts),
        ranks=tuple(tuple(range(start, start + scheme.num_devices)) for start in starts),
        num_idle=num_idle,
    )
