"""A measured training run, and what our costs say of it.

What a run computes is linear in the reciprocals of the device's shares of peak: a fit takes no costs but the first
ones.

FSDP gathers weights twice in bfloat16 and reduces gradients once, in the dtype that the source states; a sharded
optimizer alone (ZeRO-1) reduces gradients and gathers weights once a step. Of that movement, and of what the source
says to run beneath products, and the computation the longer one is paid in full and of the shorter one a share, which
is fitted: collectives take multiprocessors and memory bandwidth from the kernels that they run beside, and the first
gather and the last reduction of a micro-batch run beside none.

S stages that each hold V chunks of layers take M + (S - 1) / V times a micro-batch's seconds for M of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from calibration_models import FIRST_SOURCES

from lengthwise.core.device_spec import DeviceSpec
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.links import LINK_EFFICIENCY, host_copy_bytes_per_s
from lengthwise.cost.weight_shards import held_params

ATTENTION_LIMITS = {("fa1", "A100"): 0.325, ("fa1", "H100"): 0.175, ("fa2", "H100"): 0.35 * 3 / 3.5}
"""Share of the peak that older kernels reach, as published and not fitted: FlashAttention 1 and its Triton form 25 to
40 % on A100s (FlashAttention-2, Dao 2023, its abstract), and on H100s half of FlashAttention-2's 35 %
(FlashAttention-3, Shah et al. 2024), which is twice as fast."""
NEVER = 1e9
"""A share of the peak with which something takes no time."""
UPDATE_BYTES = 32
"""Of a parameter, that the optimizer reads and writes."""


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
    """Of the ranks that share a sequence; of tensor and context parallelism both, the ranks of the first."""
    lengths: tuple[int, ...]
    accumulation: int
    sharding: str
    """``fsdp``, ``hsdp`` (whole weights in every node), ``zero1`` (the optimizer alone), ``none``, or ``one`` and
    ``one-fused`` for one device in pure bfloat16, the latter with updates in the backward."""
    reduced_bytes: int
    """Of a gradient as it is sent."""
    is_unfused: bool
    """Whether the source says that operations between products are not fused (``torch.compile`` or kernels)."""
    tokens_per_s: float
    """Of each device, as measured; 0: only memory was."""
    source: str
    attention: str = ""
    """Kernels older than a device's best: ``fa1`` or ``fa2``."""
    is_attention_repeated: bool = False
    """Whether attention, and nothing else, is computed again in the backward."""
    context: int = 1
    """Ranks that share a sequence beside tensor parallelism."""
    chunks: int = 1
    """Parts of the layers that a stage holds."""
    is_overlapped: bool = False
    """Whether the source says that what tensor parallelism and stages send runs beneath products."""
    host: frozenset[str] = frozenset()
    """What is in the host's memory: ``optimizer``, ``weights``, ``activations``."""
    memory_gib: float = 0.0
    """Peak memory as the source prints it; 0: it does not."""
    memory_kind: str = ""
    """``allocated`` for tensors, ``reserved`` by the allocator, ``device`` for all of the process, ``stated`` where
    that is not said, or ``longest`` where the length is the longest that fitted."""
    loss: str = "whole"
    """``whole``, ``copied`` where float32 logits stay beside it, ``chunked`` of whole logits, or ``tiled`` with the
    head."""
    assumed: str = ""
    """What the source leaves open."""

    @property
    def chip(self) -> str:
        """The chip by which constants are fitted: an A800 is an A100, an H200 an H100, a GB200 a B200."""
        return {"A": "A100", "H": "H100"}.get(self.device.name[0], "B200")

    @property
    def is_first(self) -> bool:
        """Whether presets were fitted to the row."""
        return self.source in FIRST_SOURCES

    @property
    def attention_limit(self) -> float:
        """Share of the peak that the run's attention reaches at most."""
        return ATTENTION_LIMITS.get((self.attention, self.chip), 1.0)

    def predicted(self, constants: Constants) -> float:
        """Tokens per second and device under ``constants``."""
        return float(Columns.of([self]).predicted(constants)[0])

    def error(self, constants: Constants) -> float:
        """Relative error of the predicted rate."""
        return self.predicted(constants) / self.tokens_per_s - 1

    def should_be_as_fast_as(self, other: "Row") -> bool:
        """Whether ``other`` trains the same on no better devices, with no less work a token, in no larger parts."""
        is_same = self._kind == other._kind
        return (
            is_same
            and other.device.flops_per_s <= self.device.flops_per_s
            and other.device.memory_bytes_per_s <= self.device.memory_bytes_per_s
            and other.num_devices >= self.num_devices
            and other.lengths[0] >= self.lengths[0]
            and sum(other.lengths) <= sum(self.lengths)
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        return (
            self.system, self.model, self.scheme, self.is_unfused, self.context, self.chunks, self.sharding, self.host,
        )  # fmt: skip

    def is_forced(self, rows: Sequence["Row"]) -> bool:
        """Whether one sequence is more tokens than the same table gives a micro-batch of this model on these devices
        at any shorter length, where it could: of half its length, it takes one and not two.
        """
        shorter = {
            other.lengths[0]: sum(other.lengths)
            for other in rows
            if (*self._kind, self.device, self.num_devices) == (*other._kind, other.device, other.num_devices)
            and other.lengths[0] < self.lengths[0]
        }
        half = self.lengths[0] // 2
        return len(self.lengths) == 1 and shorter.get(half) == half and max(shorter.values()) < self.lengths[0]

    def above_chord(self, rows: Sequence["Row"]) -> float:
        """How much longer a token took than between the nearest shorter and longer run of one sequence on the same
        devices: a token's seconds are c / l + b + a l of its sequence's length l, which is convex."""
        kind = (*self._kind, self.device, self.num_devices, len(self.lengths))
        same = {
            other.lengths[0]: 1 / other.tokens_per_s
            for other in rows
            if kind == (*other._kind, other.device, other.num_devices, len(other.lengths))
        }
        length = self.lengths[0]
        before, after = (max, [size for size in same if size < length]), (min, [size for size in same if size > length])
        if len(self.lengths) > 1 or not before[1] or not after[1]:
            return 0.0
        shorter, longer = (pick(sizes) for pick, sizes in (before, after))
        chord = same[shorter] + (same[longer] - same[shorter]) * (length - shorter) / (longer - shorter)
        return 1 / self.tokens_per_s / chord - 1

    @property
    def num_ranks(self) -> int:
        """Ranks that compute a micro-batch."""
        return self.scheme.num_devices * self.context

    @property
    def device_tokens(self) -> float:
        """Tokens of a micro-batch, per device."""
        return sum(self.lengths) / self.num_ranks

    @cached_property
    def parts(self) -> tuple[float, ...]:
        """Seconds of a micro-batch's products at the peak, one pass of its activations, attention at the peak, rest,
        moved weights, a ring's hops and copies to and from the host, stages waiting for each other included; of a
        step's update."""
        scheme, attention = self.scheme, 4 / 3 if self.is_attention_repeated else 1.0
        resident = replace(scheme, offload=(False,) * scheme.num_layers)
        with_hops_s = self._micro_batch_s(resident, NEVER, NEVER, 0.0)
        rest_s = self._micro_batch_s(resident, NEVER, NEVER, 0.0, has_hops=False)
        matmul_s = self._micro_batch_s(resident, 1.0, NEVER, 0.0, has_hops=False) - rest_s
        pass_s = self._micro_batch_s(resident, NEVER, NEVER, 1.0, has_hops=False) - rest_s
        attention_s = self._micro_batch_s(resident, NEVER, 1.0, 0.0, has_hops=False) - rest_s
        hops_s, moved_s = with_hops_s - rest_s, self._moved_s
        copied_s = self._micro_batch_s(scheme, NEVER, NEVER, 0.0) - with_hops_s
        if self.is_overlapped:
            sent_s, handed_s = self._sent_s
            rest_s, moved_s = rest_s - sent_s, moved_s + sent_s + (self.chunks - 1) * handed_s
        if self.is_unfused:
            rest_s += self._unfused_bytes / self.device.memory_bytes_per_s
        return matmul_s, pass_s, attention_s * attention, rest_s, moved_s, hops_s, copied_s, self._update_s

    @property
    def waits(self) -> float:
        """Seconds of a stage for each second of its micro-batches."""
        return 1 + (self.scheme.num_stages - 1) / self.chunks / self.accumulation

    @property
    def _sent_s(self) -> tuple[float, float]:
        """Seconds of a micro-batch that the slowest stage spends in what tensor parallelism and stages send, and those
        of the latter: a stage of several parts hands over as often."""
        cost = AnalyticCost(model=self.model, cluster=self.cluster(replace(self.device, matmul_share=NEVER)))
        per_token_s, per_call_s = cost.sent_s(self.scheme)
        handed_s = per_token_s * sum(self.lengths) / self.context + per_call_s
        sent_s = float(cost.comm_times_s(np.array(self.lengths), self.scheme).sum()) / self.context
        return sent_s * self.waits, handed_s * self.waits

    @property
    def _moved_s(self) -> float:
        """Seconds of weights and gradients that move beneath a micro-batch."""
        cluster, num_devices, num_params = self.cluster(self.device), self.num_devices, self.model.num_params
        gathered = 2 * 2 * num_params  # for both passes in bfloat16
        moved_s = 0.0
        if self.sharding == "zero1":
            group = num_devices // self.num_model_ranks
            return self._group_s(group, (2 + self.reduced_bytes) * self.held_params) / self.accumulation
        if self.sharding in ("fsdp", "hsdp"):
            group = num_devices if self.sharding == "fsdp" else min(num_devices, cluster.devices_per_node)
            moved_s = self._group_s(group, gathered + self.reduced_bytes * num_params)
            if group < num_devices:  # the nodes add up their shares of the gradients
                nodes = num_devices // group
                summed = 2 * self.reduced_bytes * num_params / group * (nodes - 1) / nodes
                moved_s += summed / self.device.network_bytes_per_s / LINK_EFFICIENCY / self.accumulation
        if "weights" in self.host:
            moved_s += gathered / num_devices / host_copy_bytes_per_s(cluster)
        return moved_s

    @property
    def num_model_ranks(self) -> int:
        """Ranks with different weights: neighbours in a ring have the same."""
        by_tensors = self.scheme.methods[0] is Method.MEGATRON_TS
        return self.scheme.num_devices // (1 if by_tensors else self.scheme.degree)

    @property
    def held_params(self) -> int:
        """Parameters of the last stage that a rank holds whole."""
        return held_params(self.model, self.scheme, stage=self.scheme.num_stages - 1)

    def _group_s(self, size: int, num_bytes: float) -> float:
        """Seconds of collectives of a group of ``size`` with as many ranks between its members as share tensors."""
        device, per_node = self.device, self.cluster(self.device).devices_per_node
        spread = self.num_model_ranks // self.scheme.num_stages
        rate = device.link_bytes_per_s
        if size * spread > per_node:
            rate = min(rate, device.network_bytes_per_s * max(1, per_node // spread))
        return num_bytes * (size - 1) / size / rate / LINK_EFFICIENCY

    @property
    def _update_s(self) -> float:
        device, num_params = self.device, self.model.num_params
        if self.sharding == "none":
            return 0.0
        if self.sharding.startswith("one"):  # weights, gradients and moments in bfloat16
            return UPDATE_BYTES / 2 * num_params / device.memory_bytes_per_s
        owned = num_params / self.num_devices
        if "optimizer" in self.host:
            copies_s = (2 + self.reduced_bytes) * owned / host_copy_bytes_per_s(self.cluster(device))
            return UPDATE_BYTES * owned / device.host_memory_bytes_per_s / LINK_EFFICIENCY + copies_s
        return UPDATE_BYTES * owned / device.memory_bytes_per_s

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

    def cluster(self, device: DeviceSpec) -> ClusterSpec:
        """The row's devices as nodes of ``device``."""
        per_node = device.devices_per_node
        return ClusterSpec(num_nodes=-(-self.num_devices // per_node), devices_per_node=per_node, device=device)

    def _micro_batch_s(
        self,
        scheme: PipelineConfig,
        matmul_share: float,
        attention_share: float,
        passes: float,
        *,
        has_hops: bool = True,
    ) -> float:
        device = replace(
            self.device, matmul_share=matmul_share, attention_share=attention_share, activation_passes=passes
        )
        if not has_hops and scheme.methods[0] is Method.RING:
            device = replace(device, link_bytes_per_s=np.inf, network_bytes_per_s=np.inf)
        cost = AnalyticCost(model=self.model, cluster=self.cluster(device))
        overhead_s = cost.overhead_s(scheme)
        tokens_s = cost.time_s(self.lengths, scheme) - overhead_s
        return (tokens_s / self.context + overhead_s) * self.waits


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What predictions need of many rows, one number a row."""

    parts: np.ndarray
    """As ``Row.parts``, [8, rows]; of updates, what falls on one micro-batch."""
    device_tokens: np.ndarray
    tokens_per_s: np.ndarray
    """As measured."""
    attention_limit: np.ndarray
    """Share of the peak that attention reaches at most: as published for older kernels, else 1."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        """The columns of ``rows``."""
        return cls(
            parts=np.array([(*row.parts[:-1], row.parts[-1] / row.accumulation) for row in rows]).T,
            device_tokens=np.array([row.device_tokens for row in rows]),
            tokens_per_s=np.array([row.tokens_per_s for row in rows]),
            attention_limit=np.array([row.attention_limit for row in rows]),
        )

    def predicted(self, constants: Constants) -> np.ndarray:
        """Tokens per second and device under ``constants``."""
        matmul_s, pass_s, attention_s, rest_s, moved_s, hops_s, copied_s, update_s = self.parts
        attention = np.minimum(self.attention_limit, constants.attention_share)
        computed_s = matmul_s / constants.matmul_share + constants.activation_passes * pass_s
        computed_s = np.maximum(computed_s + np.maximum(attention_s / attention, hops_s) + rest_s, copied_s)
        exposed_s = constants.exposed_share * np.minimum(computed_s, moved_s)
        return self.device_tokens / (np.maximum(computed_s, moved_s) + exposed_s + update_s)

    def errors(self, constants: Constants) -> np.ndarray:
        """Relative error of every predicted rate."""
        return self.predicted(constants) / self.tokens_per_s - 1
