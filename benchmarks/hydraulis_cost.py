"""Costs as Hydraulis published them for LLaMA2 on A800 80 GB: fitted times, and the memory model of its appendix B.1.

Source of the constants: github.com/PKU-DAIR/Hetu at 9e47240,
examples/hydraulis/strategy/generate_strategy_{7b,13b,32b}.py. Milliseconds of one pipeline stage, forward and backward,
Megatron tensor and sequence parallel, no recompute; fitted by its authors to
T(l) = a l^2 + b l per sequence + c per micro-batch.

Left out: the 32B fits of degree 1 with two stages (a = 0) and of degree 2 with one (a is eight times its neighbours');
neither scheme fits a device on any number of them.
"""

from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ClusterSpec, cluster_preset, model_preset
from lengthwise.core.wording import nearest
from lengthwise.cost.separable import Line, PiecewiseLinearMemory, SchemeCache, SeparableCost

GRANULE_TOKENS = 128
"""The published planner fills micro-batches in steps of this many tokens."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One model's constants."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    fits_ms: dict[tuple[int, int], tuple[float, float, float]]
    """(degree, stages) -> a per squared token, b per token, c per micro-batch."""
    activation: dict[int, int]
    """Degree -> A, bytes per layer and token over hidden size / degree."""
    states: int
    """B, bytes of model state per layer over hidden size squared."""
    margin_bytes: int
    """Left free for what the model does not know."""
    util_tokens: dict[int, int]
    """Degree -> UtilLen, tokens at which a micro-batch reaches 85 % of the best throughput."""
    sharded: float = 0.75
    """alpha, the part of the state that the optimizer shards over all devices."""
    gap_bytes: int = 5000 * MIB
    """Taken by communicators and the allocator."""
    device_memory_bytes: int = 81_252 * MIB


TABLES = {
    "llama-7b": PublishedTable(
        hidden_size=4_096,
        num_layers=32,
        vocab_size=30_592,
        fits_ms={
            (1, 2): (1.37240947e-06, 0.094647781, 15.047058823529596),
            (1, 4): (9.55466937e-07, 0.0455224977, 14.273684210526312),
            (1, 8): (4.71839253e-07, 0.0237632988, 7.743478260869608),
            (2, 1): (2.05448457e-06, 0.0967076442, 65.1789772727277),
            (2, 2): (1.02663458e-06, 0.0490736142, 31.866721513780817),
            (2, 4): (5.24734001e-07, 0.0249896203, 17.471602082128697),
            (2, 8): (2.61470756e-07, 0.0132181135, 8.658958432871657),
            (4, 1): (1.0304334e-06, 0.0564777342, 56.697764041516166),
            (4, 2): (5.16172276e-07, 0.0285116473, 28.989771080846594),
            (4, 4): (2.579195e-07, 0.0146761838, 14.982966035778986),
            (8, 1): (5.06885473e-07, 0.0366182377, 44.317477753058256),
            (8, 2): (2.53715597e-07, 0.0184675589, 22.976470588235316),
            (16, 1): (3.01808129e-07, 0.0292311085, 65.23634593993279),
        },
        activation={1: 38, 2: 39, 4: 42, 8: 48, 16: 61},
        states=210,
        margin_bytes=6144 * MIB,
        util_tokens={1: 384, 2: 512, 4: 768, 8: 1024, 16: 1280},
    ),
    "llama-13b": PublishedTable(
        hidden_size=5_120,
        num_layers=40,
        vocab_size=30_592,
        fits_ms={
            (1, 1): (1.03359006e-05, 0.312262914, 91.37538699690367),
            (1, 2): (2.33212956e-06, 0.168111063, 37.86567681070392),
            (1, 4): (1.25504641e-06, 0.0851150701, 20.19215142652746),
            (1, 8): (7.57890093e-07, 0.0424526643, 13.324264844697922),
            (2, 1): (2.93719955e-06, 0.180090146, 75.87395881841167),
            (2, 2): (1.53436151e-06, 0.0900918438, 40.48058869844306),
            (2, 4): (7.97420826e-07, 0.0452101722, 23.26089691411994),
            (2, 8): (4.03752453e-07, 0.0233333496, 11.803803239246747),
            (4, 1): (1.62871921e-06, 0.0997626395, 76.43818547098908),
            (4, 2): (8.12710963e-07, 0.0500755835, 39.53936966798551),
            (4, 4): (3.94357054e-07, 0.0259475095, 18.2104987061378),
            (8, 1): (6.59233262e-07, 0.0666817542, 50.37694379271386),
        },
        activation={1: 38, 2: 39, 4: 39, 8: 48},
        states=210,
        margin_bytes=8192 * MIB,
        util_tokens={1: 640, 2: 896, 4: 1280, 8: 1536},
    ),
    "llama-32b": PublishedTable(
        hidden_size=6_656,
        num_layers=60,
        vocab_size=30_592,
        fits_ms={
            (1, 4): (9.39192752e-07, 0.212596087, 35.99468155683377),
            (2, 2): (3.73416233e-06, 0.213060059, 80.71665943745563),
            (2, 4): (1.97033746e-06, 0.106558744, 42.94488582340546),
            (2, 6): (1.31605318e-06, 0.0718051676, 28.616273292576068),
            (4, 1): (3.86950049e-06, 0.238996833, 120.69476474631483),
            (4, 2): (2.04563898e-06, 0.118301177, 65.4239195557368),
            (4, 4): (1.05779156e-06, 0.0592119769, 35.33534922208071),
            (4, 6): (7.02993498e-07, 0.039850898, 24.07199162618781),
            (8, 1): (2.12548718e-06, 0.141411593, 122.91021345581066),
            (8, 2): (1.06789378e-06, 0.071058246, 61.76782590869129),
            (8, 3): (6.85518086e-07, 0.0482754236, 38.06972982282218),
            (8, 4): (4.91076016e-07, 0.0370804063, 25.442409002069667),
            (16, 1): (1.37779723e-06, 0.102435387, 145.74761115393085),
        },
        activation={1: 36, 2: 36, 4: 37, 8: 42, 16: 50},
        states=201,
        margin_bytes=10240 * MIB,
        util_tokens={1: 384, 2: 512, 4: 768, 8: 1024, 16: 1280},
    ),
}
"""Model preset -> its constants."""


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
        return (Line(states + table.gap_bytes + table.margin_bytes, per_token),)

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
