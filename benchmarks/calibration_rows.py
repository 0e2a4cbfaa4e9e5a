"""Public measurements of training speed, and what our costs say of the same runs.

Rows of ``public_measurements.csv`` have whole weights or FSDP; Hydraulis' rows come from its published fits. What a
row computes is linear in the reciprocals of the device's shares of peak: a fit takes no costs but the first ones.

FSDP gathers weights twice in bfloat16 and reduces gradients once, in the dtype that the source states. Of that movement
and the computation the longer one is paid in full and of the shorter one a share, which is fitted: collectives take
multiprocessors and memory bandwidth from the kernels that they run beside, and the first gather and the last reduction
of a micro-batch run beside none.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from hydraulis_cost import TABLES, PublishedCost

from lengthwise.core.device_spec import DEVICES, DeviceSpec
from lengthwise.core.pipeline_config import Method, PipelineConfig, uniform_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.links import collective_bytes_per_s

FILE = Path(__file__).parent / "public_measurements.csv"
SOURCES = {
    "1": "https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md",
    "2": "https://pypi.org/project/ai2-olmo-core/1.5.0",
    "3": "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md",
    "4": "https://github.com/huggingface/trl/pull/6846",
    "5": "https://docs.nvidia.com/nemo/automodel/nightly/performance-summary.html",
    "6": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
    "7": "https://github.com/Dao-AILab/flash-attention/blob/0b037c2/training/README.md",
    "9": "https://arxiv.org/abs/2307.08691, Table 1, by its count of operations",
    "8": "https://github.com/PKU-DAIR/Hetu at 9e47240, examples/hydraulis/strategy",
}
OLD_KERNELS = ("llm-foundry", "flash-attention")
"""Systems whose attention is FlashAttention 1 or its Triton form, of 2022 and 2023."""
OLD_SHARES = {"A100": 0.325, "H100": 0.175}
"""Share of the peak that these reach, as published and not fitted: 25 to 40 % on A100s (FlashAttention-2, Dao 2023, its
abstract), and on H100s half of FlashAttention-2's 35 % (FlashAttention-3, Shah et al. 2024), which is twice as fast."""
CONTRADICTED = 0.10
"""How much faster a run that should be no faster may be before the slower one counts as disturbed."""
NEVER = 1e9
"""A share of the peak with which something takes no time."""
DEVICE_OF = {
    "H100-96GB-500W": replace(
        DEVICES["H100-80GB"], name="H100-96GB-500W", flops_per_s=835e12, memory_bytes_per_s=2.4e12
    )
}
"""Torchtitan's H100s have 500 W and HBM2e of 2.4 TB/s; its authors put their peak between the SXM's and the NVL's,
which this is."""
RING_DEGREES = {"trl": 8, "automodel": 2}
"""Ranks that share a sequence."""


def _model(num_layers: int, hidden_size: int, num_heads: int, **others: object) -> ModelSpec:
    sizes = {
        "num_kv_heads": num_heads, "ffn_size": 4 * hidden_size, "gated_ffn": False, "tied_embeddings": True,
        "vocab_size": 50_368, "head_size": hidden_size // num_heads, **others,
    }  # fmt: skip
    return ModelSpec(
        name="generic", family="generic", num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, **sizes
    )


_LLAMA_3 = {"num_kv_heads": 8, "gated_ffn": True, "vocab_size": 128_256, "tied_embeddings": False}
_LLAMA_2 = {"gated_ffn": True, "vocab_size": 32_000, "tied_embeddings": False}
_OLMO = {"gated_ffn": True, "vocab_size": 100_352, "tied_embeddings": False}
MODELS = {
    "mpt-760m": _model(24, 1536, 12), "mpt-1b": _model(24, 2048, 16), "mpt-3b": _model(32, 2560, 20),
    "mpt-7b": _model(32, 4096, 32), "mpt-13b": _model(40, 5120, 40), "mpt-30b": _model(48, 7168, 56),
    "mpt-70b": _model(80, 8192, 64), "gpt3-125m": _model(12, 768, 12), "gpt3-355m": _model(24, 1024, 16),
    "gpt3-760m": _model(24, 1536, 16), "gpt3-1.3b": _model(24, 2048, 16), "gpt3-2.7b": _model(32, 2560, 20),
    "llama-3-8b": _model(32, 4096, 32, ffn_size=14_336, **_LLAMA_3),
    "llama-3-70b": _model(80, 8192, 64, ffn_size=28_672, **_LLAMA_3),
    "llama-2-13b": _model(40, 5120, 40, ffn_size=13_824, **_LLAMA_2),
    "llama-2-70b": _model(80, 8192, 64, ffn_size=28_672, **{**_LLAMA_2, "num_kv_heads": 8}),
    "olmo-1b": _model(18, 2048, 16, ffn_size=8192, **_OLMO), "olmo-7b": _model(32, 4096, 32, ffn_size=11_008, **_OLMO),
    "olmo-13b": _model(40, 5120, 40, ffn_size=13_824, **_OLMO),
    "qwen3-8b": _model(36, 4096, 32, ffn_size=12_288, **{**_LLAMA_3, "vocab_size": 151_936}, head_size=128),
}  # fmt: skip
"""Sizes from the models' own configurations; MPT's agree with the numbers of parameters in its table."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is fitted of a chip."""

    matmul_share: float
    activation_passes: float
    attention_share: float
    exposed_share: float
    """Of the shorter of computation and moved weights, what is not hidden beneath the longer; ships with nothing."""

    def on(self, device: DeviceSpec) -> DeviceSpec:
        """The device with these constants."""
        return replace(
            device,
            matmul_share=self.matmul_share,
            activation_passes=self.activation_passes,
            attention_share=self.attention_share,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run."""

    system: str
    device: DeviceSpec
    num_devices: int
    label: str
    """Model, length, micro-batch and recompute, in words."""
    model: ModelSpec
    scheme: PipelineConfig
    lengths: tuple[int, ...]
    accumulation: int
    is_fsdp: bool
    reduced_bytes: int
    """Of a gradient as it is sent."""
    is_unfused: bool
    """Whether the source says that operations between products are not fused (``torch.compile`` or kernels)."""
    tokens_per_s: float
    """Of each device, as measured."""
    source: str

    @property
    def chip(self) -> str:
        """The chip by which constants are fitted: an A800 is an A100."""
        return "A100" if self.device.name.startswith("A") else "H100"

    @property
    def is_old(self) -> bool:
        """Whether the run had attention kernels of 2023."""
        return self.system in OLD_KERNELS

    def predicted(self, constants: Constants) -> float:
        """Tokens per second and device under ``constants``."""
        return float(Columns.of([self]).predicted(constants)[0])

    def error(self, constants: Constants) -> float:
        """Relative error of the predicted rate."""
        return self.predicted(constants) / self.tokens_per_s - 1

    def should_be_as_fast_as(self, other: "Row") -> bool:
        """Whether ``other`` trains the same on no better devices, with no less work a token, in no larger parts."""
        is_same = (self.system, self.model, self.scheme, self.is_unfused) == (
            other.system, other.model, other.scheme, other.is_unfused,
        )  # fmt: skip
        return (
            is_same
            and other.device.flops_per_s <= self.device.flops_per_s
            and other.device.memory_bytes_per_s <= self.device.memory_bytes_per_s
            and other.num_devices >= self.num_devices
            and other.lengths[0] >= self.lengths[0]
            and sum(other.lengths) <= sum(self.lengths)
        )

    def is_forced(self, rows: Sequence["Row"]) -> bool:
        """Whether one sequence is more tokens than the same table gives a micro-batch of this model on these devices
        at any shorter length, where it could: of half its length, it takes one and not two.
        """
        shorter = {
            other.lengths[0]: sum(other.lengths)
            for other in rows
            if (self.system, self.model, self.scheme, self.device, self.num_devices)
            == (other.system, other.model, other.scheme, other.device, other.num_devices)
            and other.lengths[0] < self.lengths[0]
        }
        half = self.lengths[0] // 2
        return len(self.lengths) == 1 and shorter.get(half) == half and max(shorter.values()) < self.lengths[0]

    @property
    def device_tokens(self) -> float:
        """Tokens of a micro-batch, per device."""
        return sum(self.lengths) / self.scheme.num_devices

    @cached_property
    def parts(self) -> tuple[float, float, float, float, float, float]:
        """Seconds of a micro-batch's products at the peak, one pass of its activations, attention at the peak, rest and
        moved weights; of a step's update."""
        rest_s = self._micro_batch_s(NEVER, NEVER, 0.0)
        matmul_s = self._micro_batch_s(1.0, NEVER, 0.0) - rest_s
        pass_s = self._micro_batch_s(NEVER, NEVER, 1.0) - rest_s
        attention_s = self._micro_batch_s(NEVER, 1.0, 0.0) - rest_s
        moved_s = update_s = 0.0
        if self.is_unfused:
            rest_s += self._unfused_bytes / self.device.memory_bytes_per_s
        if self.is_fsdp:  # gathered for both passes in bfloat16
            num_bytes = 2 * 2 + self.reduced_bytes
            moved = num_bytes * self.model.num_params * (self.num_devices - 1) / self.num_devices
            moved_s = moved / collective_bytes_per_s(self.num_devices, self._cluster(self.device))
            update_s = 32 * self.model.num_params / self.num_devices / self.device.memory_bytes_per_s
        return matmul_s, pass_s, attention_s, rest_s, moved_s, update_s

    @property
    def _unfused_bytes(self) -> float:
        """Bytes that a Llama reads and writes beyond fused kernels, of which shares of products know.

        Counted per token and layer of a forward, operation by operation: two norms in float32, rotary embeddings in
        float32, the gated activation, sums with the residual. A backward moves twice as many.
        """
        model = self.model
        heads = (model.num_heads + model.num_kv_heads) * model.head_size
        forward = 68 * model.hidden_size + 20 * heads + 4 * model.ffn_size
        return forward * self.device_tokens * (3 * model.num_layers + sum(self.scheme.recompute))

    def _cluster(self, device: DeviceSpec) -> ClusterSpec:
        return ClusterSpec(num_nodes=-(-self.num_devices // 8), devices_per_node=8, device=device)

    def _micro_batch_s(self, matmul_share: float, attention_share: float, passes: float) -> float:
        device = replace(
            self.device, matmul_share=matmul_share, attention_share=attention_share, activation_passes=passes
        )
        cost = AnalyticCost(model=self.model, cluster=self._cluster(device))
        return cost.time_s(self.lengths, self.scheme) * self.scheme.num_stages


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What predictions need of many rows, one number a row."""

    parts: np.ndarray
    """As ``Row.parts``, [6, rows]; of updates, what falls on one micro-batch."""
    device_tokens: np.ndarray
    tokens_per_s: np.ndarray
    """As measured."""
    attention_limit: np.ndarray
    """Share of the peak that attention reaches at most: as published for kernels of 2023, else 1."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        """The columns of ``rows``."""
        return cls(
            parts=np.array([(*row.parts[:-1], row.parts[-1] / row.accumulation) for row in rows]).T,
            device_tokens=np.array([row.device_tokens for row in rows]),
            tokens_per_s=np.array([row.tokens_per_s for row in rows]),
            attention_limit=np.array([OLD_SHARES[row.chip] if row.is_old else 1.0 for row in rows]),
        )

    def predicted(self, constants: Constants) -> np.ndarray:
        """Tokens per second and device under ``constants``."""
        matmul_s, pass_s, attention_s, rest_s, moved_s, update_s = self.parts
        attention = np.minimum(self.attention_limit, constants.attention_share)
        computed_s = matmul_s / constants.matmul_share + constants.activation_passes * pass_s
        computed_s += attention_s / attention + rest_s
        exposed_s = constants.exposed_share * np.minimum(computed_s, moved_s)
        return self.device_tokens / (np.maximum(computed_s, moved_s) + exposed_s + update_s)

    def errors(self, constants: Constants) -> np.ndarray:
        """Relative error of every predicted rate."""
        return self.predicted(constants) / self.tokens_per_s - 1


def read_rows() -> list[Row]:
    """All rows of the table, and Hydraulis' fits at lengths of 8K and 32K."""
    with FILE.open() as file:
        rows = [_row(fields) for fields in csv.DictReader(file)]
    return [*rows, *(row for name in TABLES for row in _hydraulis_rows(name))]


def why_not_scored(row: Row, rows: Sequence[Row]) -> str:
    """Why no law could predict the row beside its own table, or what it measures is no training; empty: neither."""
    if row.system == "hydraulis":
        return "a fit of profiled micro-batches, no training run: without updates, data and other ranks to wait for"
    if row.is_forced(rows):
        return "one sequence is more than its own table gives a micro-batch where it could: memory is all but full"
    faster = max(other.tokens_per_s for other in rows if row.should_be_as_fast_as(other)) / row.tokens_per_s - 1
    if faster > CONTRADICTED:
        return f"its own table has it {100 * faster:.0f} % faster with as many devices or more, none better"
    return ""


def _row(fields: dict[str, str]) -> Row:
    model, length = MODELS[fields["model"]], int(fields["length"])
    degree = RING_DEGREES.get(fields["system"], 1)
    recomputed = {"all": model.num_layers, "half": model.num_layers // 2, "none": 0}[fields["recompute"]]
    method = Method.RING if degree > 1 else Method.DENSE
    return Row(
        system=fields["system"],
        device=DEVICE_OF.get(fields["device"]) or DEVICES[fields["device"]],
        num_devices=int(fields["gpus"]),
        label=f"{fields['model']}, {length:,} x {fields['micro_batch']}, recompute {fields['recompute']}"
        + f", {fields['pointwise']}" * bool(fields["pointwise"]),
        model=model,
        scheme=uniform_scheme(model.num_layers, degree=degree, method=method, recomputed=recomputed),
        lengths=(length,) * int(fields["micro_batch"]),
        accumulation=int(fields["accumulation"]),
        is_fsdp=True,
        reduced_bytes={"bfloat16": 2, "float32": 4}[fields["reduced_in"]],
        is_unfused=fields["pointwise"] == "unfused",
        tokens_per_s=float(fields["tokens_per_s"]),
        source=fields["source"],
    )


def _hydraulis_rows(name: str) -> list[Row]:
    published, rows = PublishedCost(name), []
    model = replace(model_preset(name), vocab_size=published.table.vocab_size)
    for degree, stages in published.table.fits_ms:
        method = Method.MEGATRON_TS if degree > 1 else Method.DENSE
        scheme = uniform_scheme(model.num_layers, degree=degree, stages=stages, method=method)
        for length in (8192, 32768):
            measured_s = published.time_s((length,), scheme) * stages
            rows.append(
                Row(
                    system="hydraulis",
                    device=DEVICES["A800-80GB"],
                    num_devices=64,
                    label=f"{name}, {length:,}, {scheme.name}",
                    model=model,
                    scheme=scheme,
                    lengths=(length,),
                    accumulation=1,
                    is_fsdp=False,
                    reduced_bytes=0,
                    is_unfused=False,
                    tokens_per_s=length / degree / stages / measured_s,
                    source="8",
                )
            )
    return rows
