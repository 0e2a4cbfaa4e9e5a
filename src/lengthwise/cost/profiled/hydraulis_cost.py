"""Costs as Hydraulis published them: fitted times, and the memory model of its appendix B.1."""

from dataclasses import replace

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ClusterSpec, cluster_preset, model_preset
from lengthwise.core.wording import nearest
from lengthwise.cost.profiled.hydraulis_constants import TABLES
from lengthwise.cost.separable import Line, PiecewiseLinearMemory, SchemeCache, SeparableCost

GRANULE_TOKENS = 128
"""The published planner fills micro-batches in steps of this many tokens."""


class PublishedCost(SeparableCost):
    """T = a l^2 + b l + c of Hydraulis' own tables for ``llama-7b``, ``llama-13b`` or ``llama-32b`` on A800s.

    Schemes: ``megatron_ts`` (``dense`` at degree 1), every layer kept, whose degree and number of stages were measured;
    others raise ``InputError``. What is not published, update and switch, comes from the closed forms.
    """

    def __init__(self, name: str, *, cluster: ClusterSpec | None = None) -> None:
        if name not in TABLES:
            raise InputError(f"no published costs for model {name!r}; {nearest(name, TABLES)}")
        self.table = TABLES[name]
        model = replace(model_preset(name), vocab_size=self.table.vocab_size)
        super().__init__(model=model, cluster=cluster or cluster_preset("8x8xA800-80GB"), dtype="bfloat16")
        self._fits = SchemeCache(self._find)
        self._memory = PiecewiseLinearMemory(self._make_lines)

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence adds: ``a l^2 + b l``."""
        a_s, b_s, _ = self._fits(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        return (a_s * length + b_s) * length

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch before its first token: ``c``."""
        return self._fits(scheme)[2]

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """UtilLen of appendix C: tokens at which a micro-batch reaches 85 % of the best throughput."""
        self._fits(scheme)
        return self.table.util_tokens[scheme.degree]

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """MaxLen of appendix B.1, in whole steps of ``GRANULE_TOKENS``."""
        max_tokens = super().max_tokens(scheme, num_devices=num_devices)
        return max_tokens // GRANULE_TOKENS * GRANULE_TOKENS

    @property
    def memory_limit_bytes(self) -> float:
        """The published bound of an 80 GB device, or the cluster's where that is less."""
        return min(self.table.device_memory_bytes, self.cluster.device.memory_bytes)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        return self._memory(tokens, scheme, num_devices=num_devices)

    def _make_lines(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        """Appendix B.1 with what its code adds; D hidden size, L layers, V vocabulary, N devices.

        States of the layers and of two V x D embeddings, the optimizer's part over N; a single stage holds both
        embeddings, the first of several one. Then what communicators take, the margin, and L D A / TP per token: the
        first of PP stages keeps PP micro-batches of L / PP layers.
        """
        self._fits(scheme)
        table, p, stages = self.table, scheme.degree, scheme.num_stages
        layers = table.num_layers * table.hidden_size**2 * table.states
        embedding = 16 * table.hidden_size * table.vocab_size
        sharded = (layers + 2 * embedding) * table.sharded / num_devices
        whole_bytes = (layers / stages + (2 if stages == 1 else 1) * embedding) * (1 - table.sharded) / p
        states = sharded + whole_bytes
        per_token = table.num_layers * table.hidden_size / p * table.activation[p]
        return ((states + table.gap_bytes + table.margin_bytes, per_token),)

    def _find(self, scheme: PipelineConfig) -> tuple[float, float, float]:
        expected = Method.DENSE if scheme.degree == 1 else Method.MEGATRON_TS
        place = (scheme.degree, scheme.num_stages)
        if (
            place not in self.table.fits_ms
            or scheme.num_layers != self.table.num_layers
            or set(scheme.methods) != {expected}
            or any(scheme.recompute)
        ):
            profiled = ", ".join(f"<{degree},{stages}>" for degree, stages in self.table.fits_ms)
            raise InputError(
                f"no published costs of {self.model.name} for scheme {scheme.name} with {scheme.num_layers} layers; "
                f"there are megatron_ts (dense at degree 1) without recompute for <degree,stages> {profiled}"
            )
        a_ms, b_ms, c_ms = self.table.fits_ms[place]
        return a_ms / 1e3, b_ms / 1e3, c_ms / 1e3
