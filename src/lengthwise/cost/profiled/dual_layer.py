"""A whole model, of any kind, from measurements of two of its layers: DCP, equations 4 to 6, over curves.

A micro-batch takes L (t_f + t_b) + r t_f + T_C seconds, where t_f and t_b are a l^2 + b l for each sequence and c once;
T_C has no square. It keeps (L - r) m + L m_inp bytes for its backward, and has beside them what the loss takes (M_C),
the backward of the loss, or that of a layer, which where layers are recomputed has one of them in full; all are lines
over its tokens. Where an allocator was not asked at each of these moments, M_C is taken to be there at all of them.
Nothing need be known of the model but how many layers and parameters it has.

What an offloaded layer keeps, of a recomputed one its input, is on the host but for two layers' at a time; copying
takes what is beyond the passes it runs beneath, sequence by sequence.

A stage of a pipeline has these of its own layers, and the last one T_C and M_C, which are those of the head but for an
embedding. Stages send each other m_inp at most. Under 1F1B stage s of S keeps S - s micro-batches; each stage but the
last keeps their outputs as well, and each but the first a gradient that it sends and the embeddings it does not use.
Where backwards are split, it also keeps what those of s more left for later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np

from lengthwise.core.cost import CostError, LinkSpeeds
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import AS_PREPARED, SPLIT_BACKWARD, AttentionSizes, LayerTable, LayerVariant
from lengthwise.core.pipeline_config import Method, PipelineConfig, Strategy, uniform_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.stage_time import slice_bytes
from lengthwise.cost.gradient_reduction import ReductionTime
from lengthwise.cost.links import host_copy_bytes_per_s, with_measured_links
from lengthwise.cost.memory_model import DTYPE_BYTES, gradient_bytes, state_parts
from lengthwise.cost.port_traffic import hold_the_same
from lengthwise.cost.profiled.degree_fit import DegreeFit, LinearBytes, fit_degree
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost, Moment
from lengthwise.cost.profiled.stage_layers import StageLayers
from lengthwise.cost.profiled.stage_moments import num_in_flight, slice_keys, stage_moments
from lengthwise.cost.profiled.unit_gradients import UnitGradients, link_among
from lengthwise.cost.separable import Line, PiecewiseLinearMemory, SchemeCache, SeparableCost

MIXED_S = 1e6
"""Seconds, more than any plan takes, of a step in which ranks would hold more weights than they are priced with."""
_SETTINGS = ("cluster", "gather", "state_on_host", "narrow_gradients", "unit_params", "attention")
LEAST_S = 1e-12
"""Seconds a token takes where all of a profile's rows take the same: sequences must cost something."""


@dataclass(frozen=True, kw_only=True)
class OpaqueModelSpec(ModelSpec):
    """A model that is not ours: layers and parameters are known, all other sizes are 1 and nobody asks for them."""

    trained: int
    """Parameters that are trained."""

    @property
    def num_params(self) -> int:
        """Parameters that have a gradient and optimizer state."""
        return self.trained

    @classmethod
    def of(cls, table: LayerTable) -> "OpaqueModelSpec":
        """The model of a profile."""
        return cls(
            name=table.identity.model_name, family="any", num_layers=table.num_layers, trained=table.num_params,
            hidden_size=1, ffn_size=1, num_heads=1, num_kv_heads=1, head_size=1, vocab_size=1,
        )  # fmt: skip


class DualLayerCost(SeparableCost):
    """Costs of schemes of the profiled degrees and methods, with any stages and any number of recomputed layers."""

    def __init__(
        self,
        table: LayerTable,
        *,
        cluster: ClusterSpec,
        gather: LayerGatherCost | None = None,
        state_on_host: bool = False,
        narrow_gradients: bool = False,
        unit_params: tuple[int, ...] = (),
        attention: AttentionSizes | None = None,
    ) -> None:
        """Fit curves to every degree and method of ``table``; model state is that of ``cluster``'s devices.

        ``gather``: what weights cost that are gathered one layer at a time, or of several stages those of a stage for a
        whole step; None: every rank holds them all. ``unit_params``: the trained parameters before the layers, of each
        layer, and after them, of which gradients may be sharded; empty: they are not known, and none may.
        ``attention``: of layers whose micro-batches may be cut into slices; None: they may not.

        Raises:
            InputError: the profile was taken in a dtype whose size is not known.
        """
        if table.identity.dtype not in DTYPE_BYTES:
            raise InputError(
                f"the profile of {table.identity.model_name} was taken in {table.identity.dtype}; model state is known "
                f"in {', '.join(DTYPE_BYTES)}. Cast the model to one of these"
            )
        cluster = with_measured_links(cluster, LinkSpeeds(within=None, across=None, host=table.host))
        super().__init__(
            model=OpaqueModelSpec.of(table), cluster=cluster, dtype=table.identity.dtype, state_on_host=state_on_host,
            narrow_gradients=narrow_gradients,
        )  # fmt: skip
        self.table, self.gather, self.unit_params, self.attention = table, gather, unit_params, attention
        self._variants = {variant: _fits(table, variant) for variant in table.variants}
        self.fits = self._variants[AS_PREPARED]
        self._selective_fits = self._variants.get(LayerVariant(keep_attention=True), {})
        self._split = min(self._variants.get(SPLIT_BACKWARD, {}).items(), default=None)
        """Ranks, method and curves of split backwards; what they leave depends on a rank's tokens alone."""
        self.prices_split_backwards = self._split is not None
        """Whether schemes may split backwards: as was measured."""
        self.error = CostError.of([residual for fit in self.fits.values() for residual in fit.time_residuals])
        self._stages = SchemeCache(self._find)
        self._units = UnitGradients(unit_params, gradient_bytes(self.dtype, is_narrow=narrow_gradients))
        self._unit_reductions = SchemeCache(partial(self._units.reduction, links=table.links, cluster=cluster))
        self._memory = PiecewiseLinearMemory(self._make_lines)

    def with_table(self, table: LayerTable) -> "DualLayerCost":
        """Return the same costs of another profile of the model."""
        return self._changed(table=table)

    @property
    def tile_tokens(self) -> int:
        """Slots of the tiles of feed-forwards that were measured too; 0: none."""
        return self.table.tile_tokens

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks: as was measured too."""
        return self.table.head_groups(degree)

    def with_state_on_host(self) -> "DualLayerCost":
        """Return the same costs with master weights and optimizer in host memory, but for the seconds of an update."""
        gather = None if self.gather is None else replace(self.gather, state_on_host=True)
        return self._changed(gather=gather, state_on_host=True)

    def with_gather(self, gather: LayerGatherCost) -> "DualLayerCost":
        """Return the same costs where weights are gathered."""
        return self._changed(gather=gather)

    def with_attention(self, attention: AttentionSizes | None) -> "DualLayerCost":
        """Return the same costs where micro-batches may be cut into slices; None: where they may not."""
        return self._changed(attention=attention)

    @property
    def prices_slices(self) -> bool:
        """Whether schemes may cut micro-batches into slices."""
        return self.attention is not None

    def _changed(self, **changes: Any) -> "DualLayerCost":
        same = {name: getattr(self, name) for name in _SETTINGS}
        return DualLayerCost(**{"table": self.table, **same, **changes})

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """L (t_f + t_b) + r t_f of each sequence, and what it adds to T_C, on the stage it costs most; c left out.

        Methods may differ by layer.
        """
        length = np.asarray(lengths, dtype=np.float64)
        per_token_s = LEAST_S + self.sent_s(scheme)[0] + self._slices_s(scheme)
        return np.maximum.reduce([_times_s(length, layers) for layers in self._stages(scheme)]) + per_token_s * length

    def weight_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in gradients of weights that wait, on the stage but the first that has fewest."""
        length = np.asarray(lengths, dtype=np.float64)
        stages = map(scheme.layers_of_stage, range(1, scheme.num_stages))
        counts = [len(layers) - sum(scheme.recompute[layers.start : layers.stop]) for layers in stages]
        if self._split is None or not counts:
            return np.zeros_like(length)
        (degree, _), fit = self._split
        return min(counts) * fit.weights.of_sequences(length * degree / scheme.degree)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """c of every layer, forward and backward, and of the rest, and messages of stages, as often as the scheme has
        slices; and the gathering of weights.
        """
        gather_s = 0.0 if self.gather is None or scheme.num_stages > 1 else self.gather.micro_batch_s(self.cluster)
        of_stages = [sum(part.fixed_s for part in layers) for layers in self._stages(scheme)]
        reduction = self.reduction(scheme)
        reduced_s = 0.0 if reduction is None else reduction.least_s
        return gather_s + (max(of_stages) + self.sent_s(scheme)[1]) * scheme.slices + reduced_s

    def launch_s(self, scheme: PipelineConfig) -> float:
        """Seconds of the stage whose kernels take longest to launch, as often as the scheme has slices."""
        return max(sum(part.launch_s for part in layers) for layers in self._stages(scheme)) * scheme.slices

    def largest_pack(self, scheme: PipelineConfig) -> int:
        """Tokens of the largest micro-batch that was measured under every method of ``scheme``; more is a guess."""
        rows = (self.table.of_degree(scheme.degree, method) for method in set(scheme.methods))
        return min(max((row.num_tokens for row in of_method), default=0) for of_method in rows)

    def _slices_s(self, scheme: PipelineConfig) -> float:
        """Seconds per token in which slices add to gradients of keys and values, and merge what they attended to."""
        if self.attention is None or scheme.slices == 1:
            return 0.0
        num_bytes = max(scheme.stage_layers) * slice_bytes(self.attention, scheme, self.dtype)
        return num_bytes / self.cluster.device.memory_bytes_per_s

    def reduction(self, scheme: PipelineConfig) -> ReductionTime | None:
        """Seconds of a micro-batch in reducing gradients to shares; None where whole ones are kept."""
        return self._unit_reductions(scheme)

    def sent_s(self, scheme: PipelineConfig) -> tuple[float, float]:
        """Seconds per token, and per micro-batch, of the outputs and gradients that stages send each other."""
        if scheme.num_stages == 1:
            return 0.0, 0.0
        num_bytes = 2 * self._stages(scheme)[0][0].fit.inputs.per_token
        bytes_per_s, latency_s = link_among(scheme.num_devices, self.table.links, self.cluster)
        return num_bytes / bytes_per_s, 2 * latency_s

    @cached_property
    def head_layers(self) -> float:
        """Layers that take as long as T_C, the median over measured packs of the lowest degree."""
        rows = self.table.of_degree(*self.table.shared[0])
        return float(np.median([row.constant_s / (row.forward_s + row.backward_s) for row in rows]))

    def update_s(self, strategy: Strategy) -> float:
        """Measured seconds of a step outside its micro-batches.

        Where weights are gathered by layer, too many for pipelines of one stage beside others: they would hold all.
        """
        is_mixed = len({scheme.num_stages == 1 for scheme in strategy.schemes}) > 1
        return MIXED_S if self.gather is not None and is_mixed else self.table.update_s

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Nothing moves between strategies: a rank holds all weights in both, or too many where these are of stages.

        A step has one layout of gradients, so that strategies which shard them otherwise do not follow one another.
        """
        strategies = (*before.distinct_schemes, *after.distinct_schemes)
        if any(scheme.shard_gradients for scheme in strategies):
            return 0.0 if hold_the_same(before, after, of_gradients=True) else MIXED_S
        is_staged = any(scheme.num_stages > 1 for scheme in (*before.schemes, *after.schemes))
        holds_more = self.gather is not None and is_staged and not hold_the_same(before, after)
        return MIXED_S if holds_more else 0.0

    def holds(self, longest: int, *, recompute: bool = True) -> bool:
        """Whether a sequence of ``longest`` tokens fits on some number of ranks, every layer recomputed, or none."""
        num_layers, num_devices = self.table.num_layers, self.cluster.num_devices
        schemes = [
            uniform_scheme(num_layers, degree=degree, method=method, recomputed=num_layers if recompute else 0)
            for degree, method in self.fits
        ]
        return any(self.max_tokens(scheme, num_devices=num_devices) >= longest for scheme in schemes)

    def micro_batch_bytes(self, num_tokens: int, scheme: PipelineConfig) -> float:
        """Bytes above those of the model state, of the stage and at the moment that need most."""
        lines = (line for moments in self._lines_of(scheme) for line in moments.values())
        return max(line.at(num_tokens) for line in lines)

    def stage_state(
        self, num_tokens: int, scheme: PipelineConfig, stage: int, *, num_devices: int, num_kept: int = 0
    ) -> tuple[tuple[int, int, int], float]:
        """Bytes of weights, gradients and optimizer at the peak of one stage, and what is there beside them.

        ``num_kept``: the last layers that stay whole where weights are gathered by layer.
        """
        states = self._parts_of_stage(scheme, stage, num_devices, num_kept=num_kept)
        beside = {moment: line.at(num_tokens) for moment, line in self._lines_of(scheme)[stage].items()}
        peak = max(beside, key=lambda moment: sum(states[moment]) + beside[moment])
        return states[peak], beside[peak]

    def predict(
        self, lengths: Sequence[int], degree: int, recomputed: int, method: Method = Method.ULYSSES
    ) -> tuple[float, float]:
        """Seconds of a micro-batch, and its bytes above those of the model state."""
        method = Method.DENSE if degree == 1 else method
        scheme = uniform_scheme(self.table.num_layers, degree=degree, method=method, recomputed=recomputed)
        return self.time_s(lengths, scheme), self.micro_batch_bytes(sum(lengths), scheme)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        state = max(self._state_bytes(scheme, num_devices))
        return np.where(tokens > 0, np.ceil(self._memory(tokens, scheme, num_devices=num_devices)), state)

    def _make_lines(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        lines = []
        for stage, moments in enumerate(self._lines_of(scheme)):
            states, others = self._parts_of_stage(scheme, stage, num_devices), self._other_bytes
            for moment, line in moments.items():
                lines.append(Line(sum(states[moment]) + others + line.fixed, max(line.per_token, 1.0)))
        return tuple(lines)

    def _lines_of(self, scheme: PipelineConfig) -> list[dict[Moment, Line]]:
        """What each stage has above the model state: equation 6, and what it leaves out, at each moment."""
        return [
            stage_moments(scheme, stage, layers, slice_keys(self.attention, scheme, layers, self.dtype))
            for stage, layers in enumerate(self._stages(scheme))
        ]

    def _host_line(self, scheme: PipelineConfig, num_devices: int) -> tuple[float, float]:
        """What layers put on the host, of the stage that puts most there."""
        fixed = per_token = 0.0
        for stage, layers in enumerate(self._stages(scheme)):
            counts = [(part.offloaded, part.fit.kept_layer) for part in layers]
            counts += [(part.offloaded + part.inputs_offloaded, part.fit.inputs) for part in layers]
            in_flight = num_in_flight(scheme, stage)
            fixed = max(fixed, in_flight * sum(count * line.fixed for count, line in counts))
            per_token = max(per_token, in_flight * sum(count * line.per_token for count, line in counts))
        return self._host_state_bytes(num_devices) + fixed, per_token

    def _state_bytes(self, scheme: PipelineConfig, num_devices: int) -> tuple[int, ...]:
        """Weights and gradients, gathered or all on every stage; the optimizer in equal parts; what is not trained."""
        stages = (self._parts_of_stage(scheme, stage, num_devices) for stage in range(scheme.num_stages))
        return tuple(max(map(sum, moments.values())) + self._other_bytes for moments in stages)

    @property
    def _other_bytes(self) -> int:
        """Bytes of what is not trained and not gathered."""
        gathered = 0 if self.gather is None else sum(self.gather.unit_frozen_bytes)
        return max(0, self.table.other_bytes - gathered)

    def _parts_of_stage(
        self, scheme: PipelineConfig, stage: int, num_devices: int, *, num_kept: int = 0
    ) -> dict[Moment, tuple[int, int, int]]:
        """Bytes of weights, gradients and optimizer at each moment of a stage."""
        if self.gather is not None and scheme.num_stages == 1:
            return self.gather.state_parts(num_devices, num_kept=num_kept)
        if self.gather is not None:
            parts = self.gather.stage_parts(num_devices, scheme.layers_of_stage(stage))
        else:
            weights, gradients, optimizer = state_parts(
                self.model, num_devices=num_devices, dtype=self.dtype, on_host=self.state_on_host,
                narrow_gradients=self.narrow_gradients,
                gradient_shares=scheme.degree if scheme.shard_gradients else 1,
            )  # fmt: skip
            parts = weights, gradients + self._units.whole_bytes(scheme, stage), optimizer
        return dict.fromkeys(Moment, parts)

    def _find(self, scheme: PipelineConfig) -> tuple[tuple[StageLayers, ...], ...]:
        """The layers of each stage of ``scheme`` by method.

        Raises:
            InputError: ``scheme`` has other layers than the profile, or was not measured; or it has tiles, groups of
                heads or kept attention, which were not.
        """
        keeps = "layers that keep attention, neither offloaded nor in tiles" if self._selective_fits else "no others"
        is_in_turn = scheme.tile_tokens or scheme.head_groups > 1 or scheme.num_offloaded
        is_selective_alone = not is_in_turn and bool(self._selective_fits)
        if _variant_of(scheme) not in self._variants or (scheme.keep_attention and not is_selective_alone):
            tiles = f"tiles of {self.tile_tokens:,} tokens" if self.tile_tokens else "no tiles of feed-forwards"
            counts = {f"{variant.head_groups} groups of heads" for variant in self._variants if variant.head_groups > 1}
            groups = " and ".join(sorted(counts)) or "no groups of heads"
            others = f"{groups}, recompute as the model was prepared, and {keeps}"
            raise InputError(f"no layer profile for scheme {scheme.name}; there are {tiles}, {others}")
        if scheme.shard_gradients and (self.gather is not None or not self.unit_params):
            raise InputError(f"no costs of scheme {scheme.name}: its gradients are not of layers with whole weights")
        fits = self._variants[_variant_of(scheme)]
        fits = {key: fits[key] for key in fits if not scheme.keep_attention or key in self._selective_fits}
        is_measured = all((scheme.degree, method) in fits for method in set(scheme.methods))
        if not is_measured or scheme.num_layers != self.table.num_layers:
            measured = ", ".join(f"{method} of degree {degree}" for degree, method in self.fits)
            raise InputError(
                f"no layer profile for scheme {scheme.name}; there are {measured} with {self.table.num_layers} layers"
            )
        return tuple(self._layers_of(scheme, stage) for stage in range(scheme.num_stages))

    def _split_line(self, degree: int) -> LinearBytes | None:
        """What the split backward of a layer keeps of a pack that ``degree`` ranks share; None: it was not measured."""
        if self._split is None:
            return None
        (measured, _), fit = self._split
        return replace(fit.kept_layer, per_token=fit.kept_layer.per_token * measured / degree)

    def _layers_of(self, scheme: PipelineConfig, stage: int) -> tuple[StageLayers, ...]:
        layers = scheme.layers_of_stage(stage)
        methods = scheme.methods[layers.start : layers.stop]
        recomputed = Counter(compress(methods, scheme.recompute[layers.start : layers.stop]))
        offloaded = Counter((scheme.methods[n], scheme.recompute[n]) for n in layers if scheme.is_offloaded(n))
        copied_per_s = host_copy_bytes_per_s(self.cluster) if offloaded else 0.0
        rest = float(stage == scheme.num_stages - 1)
        fits = self._variants[_variant_of(scheme)]
        return tuple(
            StageLayers(
                fits[scheme.degree, method], count, recomputed[method], rest * count / len(layers),
                offloaded[method, False], offloaded[method, True], copied_per_s,
                self._selective_fits[scheme.degree, method] if scheme.keep_attention else None,
                self._split_line(scheme.degree) if scheme.zero_bubble and stage else None,
            )
            for method, count in Counter(methods).items()
        )  # fmt: skip


def _variant_of(scheme: PipelineConfig) -> LayerVariant:
    """How layers of a scheme compute, kept attention left out."""
    return LayerVariant(tile_tokens=scheme.tile_tokens, head_groups=scheme.head_groups)


def _fits(table: LayerTable, variant: LayerVariant) -> Mapping[tuple[int, Method], DegreeFit]:
    """Curves of every degree and method that was measured with such layers."""
    rows = {key: table.of_degree(*key, variant=variant) for key in table.shared}
    return {(degree, Method(method)): fit_degree(of) for (degree, method), of in rows.items() if of}


def _times_s(length: np.ndarray, layers: Sequence[StageLayers]) -> np.ndarray:
    """Seconds that each sequence adds to a stage."""
    return sum((part.times_s(length) for part in layers), start=np.zeros_like(length))
