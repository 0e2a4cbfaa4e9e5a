"""What every cost model of the form T = sum of f(l) + c per micro-batch shares: pricing packs and finding what fits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.cost import CostError
from lengthwise.core.one_f_one_b import most_weights_in
from lengthwise.core.pipeline_config import PipelineConfig, Strategy
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.gradient_reduction import ReductionTime, reduction_time, whole_units
from lengthwise.cost.memory_model import gradient_bytes, host_state_bytes, state_bytes
from lengthwise.cost.weight_shards import WeightTraffic, held_params

PROBES = 128
"""Parts in which a range of tokens is cut while the most that fits is searched."""

UTIL_SHARE = 0.85
"""The threshold of Hydraulis, appendix C."""
UTIL_LENGTHS = np.unique(np.geomspace(1, 1 << 20, 512).astype(np.int64))
"""Lengths, 3 % apart, among which UtilLen is looked for."""

Made = TypeVar("Made")


class Line(NamedTuple):
    """Bytes of one stage at one moment, as a function of the tokens of its micro-batches."""

    fixed: float
    per_token: float
    chunk: float = 0.0
    """Bytes per token of what is computed in chunks of at most ``chunk_tokens``."""
    chunk_tokens: float = 0.0

    def at(self, tokens: Any) -> Any:
        """Bytes for micro-batches of ``tokens``, a number or an array."""
        num_bytes = self.fixed + self.per_token * tokens
        return num_bytes + self.chunk * np.minimum(tokens, self.chunk_tokens) if self.chunk else num_bytes

    def at_whole(self, tokens: int) -> float:
        """Bytes for a micro-batch of ``tokens``, the same as :meth:`at` answers."""
        num_bytes = self.fixed + self.per_token * tokens
        return num_bytes + self.chunk * min(tokens, self.chunk_tokens) if self.chunk else num_bytes

    def is_within(self, other: "Line") -> bool:
        """Whether ``other`` is no less for any number of tokens."""
        is_chunk_within = not self.chunk or (self.chunk <= other.chunk and self.chunk_tokens == other.chunk_tokens)
        return is_chunk_within and self.fixed <= other.fixed and self.per_token <= other.per_token

    def of_share(self, share: float) -> "Line":
        """The line for micro-batches of which a share is computed at once."""
        if share == 1:
            return self
        return Line(self.fixed, self.per_token * share, self.chunk * share, self.chunk_tokens / share)

    def plus(self, beside: "Line") -> "Line":
        """The line with what is ``beside`` it, which has no chunks."""
        return Line(self.fixed + beside.fixed, self.per_token + beside.per_token, self.chunk, self.chunk_tokens)

    def most_tokens(self, limit_bytes: float) -> float:
        """About the most tokens within a limit; 0 if none are."""
        beyond = limit_bytes - self.fixed - self.chunk * self.chunk_tokens
        if beyond >= self.per_token * self.chunk_tokens:
            return beyond / self.per_token if self.per_token else np.inf
        return max(0.0, (limit_bytes - self.fixed) / (self.per_token + self.chunk or 1.0))


class SchemeCache(Generic[Made]):
    """A cache of what ``make`` returns for a scheme.

    Planners ask for the same few objects many thousands of times, and hashing a scheme touches every layer of it, so
    schemes are found by identity first.
    """

    MAX_OBJECTS = 4096

    def __init__(self, make: Callable[[PipelineConfig], Made]) -> None:
        self._make = make
        self._by_id: dict[int, tuple[PipelineConfig, Made]] = {}
        self._made: dict[PipelineConfig, Made] = {}

    def __call__(self, scheme: PipelineConfig) -> Made:
        """The cached value of ``scheme``. What ``make`` raises is raised every time."""
        cached = self._by_id.get(id(scheme))
        if cached is not None and cached[0] is scheme:  # an id is used again once its object is gone or unpickled
            return cached[1]
        if scheme not in self._made:
            self._made[scheme] = self._make(scheme)
        if len(self._by_id) >= self.MAX_OBJECTS:
            self._by_id.clear()
        self._by_id[id(scheme)] = (scheme, self._made[scheme])
        return self._made[scheme]


class PiecewiseLinearMemory:
    """Bytes that are the largest of a few lines over the tokens of a micro-batch, of stages and moments; made once."""

    def __init__(self, make: Callable[..., tuple[Line, ...]]) -> None:
        """``make`` takes a scheme and the keyword ``num_devices``."""
        self._make = make
        self._lines: dict[int, SchemeCache[tuple[Line, ...]]] = {}

    def __call__(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device on a cluster of ``num_devices``; the shape of ``tokens``."""
        return np.maximum.reduce([line.at(tokens) for line in self._of(scheme, num_devices)])

    def most_tokens(self, limit_bytes: float, scheme: PipelineConfig, *, num_devices: int) -> int:
        """The most tokens of a micro-batch whose bytes, rounded down, are within a limit; 0 if none are."""
        lines = self._of(scheme, num_devices)
        about = min(line.most_tokens(limit_bytes) for line in lines)

        def fits(tokens: int) -> bool:
            return int(min(max([line.at_whole(tokens) for line in lines]), MAX_BYTES)) <= limit_bytes

        near_tokens = int(min(about, limit_bytes))
        for tokens in (near_tokens, near_tokens + 1, near_tokens - 1):  # closed forms round
            if 0 <= tokens < limit_bytes and (tokens == 0 or fits(tokens)) and not fits(tokens + 1):
                return tokens
        needed = partial(self, scheme=scheme, num_devices=num_devices)
        return most_tokens(lambda tokens: whole_bytes(needed(tokens)), limit_bytes, about=about)

    def _of(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        """The lines of which some number of tokens may take the most bytes."""
        if num_devices not in self._lines:
            self._lines[num_devices] = SchemeCache(partial(self._make_largest, num_devices=num_devices))
        return self._lines[num_devices](scheme)

    def _make_largest(self, scheme: PipelineConfig, num_devices: int) -> tuple[Line, ...]:
        largest: list[Line] = []
        for line in self._make(scheme, num_devices=num_devices):
            if not any(line.is_within(other) for other in largest):
                largest = [other for other in largest if not other.is_within(line)] + [line]
        return tuple(largest)


MAX_BYTES = 2.0**62
"""More bytes than any device has, and fewer than overflow an integer."""


def whole_bytes(num_bytes: np.ndarray) -> np.ndarray:
    """Bytes, rounded down to integers."""
    return np.minimum(num_bytes, MAX_BYTES).astype(np.int64)


def most_tokens(needed: Callable[[np.ndarray], np.ndarray], limit_bytes: float, *, about: float | None = None) -> int:
    """Most tokens whose ``needed`` bytes, never fewer for more tokens, are within a limit; 0 if none are.

    A token needs at least a byte. ``about``: how many there may be, which are tried first.
    """
    fits, too_many = 0, int(limit_bytes) + 1
    between = np.arange(-1, 3) + int(min(about or 0.0, limit_bytes))
    between = between[(between > fits) & (between < too_many)]
    while too_many - fits > 1:
        if not len(between):
            between = np.unique(fits + (too_many - fits) * np.arange(1, PROBES) // PROBES)
            between = between[between > fits]
        number = int(np.searchsorted(needed(between), limit_bytes, side="right"))
        limits = [fits, *between.tolist(), too_many]
        fits, too_many, between = limits[number], limits[number + 1], between[:0]
    return fits


class SeparableCost(ABC):
    """A :class:`~lengthwise.core.cost.CostModel` of one model in one dtype on one cluster.

    Subclasses say what sequences and micro-batches cost, in seconds and in bytes.
    """

    error: CostError | None = None
    """How far predictions are from measurements; None: not known."""

    def __init__(
        self, *, model: ModelSpec, cluster: ClusterSpec, dtype: str, state_on_host: bool = False,
        narrow_gradients: bool = False,
    ) -> None:  # fmt: skip
        """Price with the model state where and as precise as it is.

        Args:
            model: what is computed.
            cluster: where.
            dtype: what it is computed in.
            state_on_host: master weights and optimizer state are in host memory, and are updated there; of a CPU, whose
                memory is the host's, this changes nothing.
            narrow_gradients: gradients are added up in ``dtype``, not in float32.
        """
        state_on_host = state_on_host and cluster.device.host_bytes_per_s > 0
        self.model = model
        self.cluster = cluster
        self.dtype = dtype
        self.state_on_host = state_on_host
        self.narrow_gradients = narrow_gradients
        self._util_tokens = SchemeCache(self._find_util_tokens)
        self._reductions = SchemeCache(
            partial(reduction_time, model, cluster=cluster, dtype=dtype, narrow_gradients=narrow_gradients)
        )
        self.mover = WeightTraffic(
            model=model, cluster=cluster, dtype=dtype, state_on_host=state_on_host, narrow_gradients=narrow_gradients
        )

    @abstractmethod
    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds, forward and backward, that each sequence adds to a micro-batch (one stage of ``scheme``)."""

    @abstractmethod
    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch costs before its first token."""

    @abstractmethod
    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device for micro-batches of ``tokens``: the same shape, never fewer for more tokens."""

    def time_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``, forward and backward."""
        time_s = float(self.sequence_times_s(np.asarray(lengths), scheme).sum()) + self.overhead_s(scheme)
        return max(time_s, self.launch_s(scheme))

    def launch_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch takes at least, since its kernels are launched; 0 if unknown."""
        return 0.0

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in exposed communication; 0, since this model does not know them."""
        return np.zeros(len(lengths))

    def weight_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in the gradients of weights of layers that are not recomputed.

        Of what is computed, the share by FLOPs: of the products as much as a forward's, of attention nothing.
        """
        length, model = np.asarray(lengths, dtype=np.float64), self.model
        attention_flops = 4.0 * model.num_heads * model.head_size * (0.5 if model.causal else 1.0) * model.reach(length)
        products_flops = 2.0 * model.layer_matmul_params
        share = most_weights_in(scheme.recompute) * products_flops / (products_flops + attention_flops)
        return (self.sequence_times_s(length, scheme) - self.comm_times_s(length, scheme)) * share

    def sent_s(self, scheme: PipelineConfig) -> tuple[float, float]:
        """Seconds of a stage per token, and per micro-batch, in messages to and from its neighbours; 0 if unknown."""
        return 0.0, 0.0

    def update_s(self, strategy: Strategy) -> float:
        """Seconds of a step outside its micro-batches: push, clip, optimizer, pull."""
        return self.mover.update_s(strategy)

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Seconds to move weights and gradients between two phases of one step; 0 where nothing moves."""
        return self.mover.switch_s(before, after)

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """UtilLen: the shortest sequence computed alone at ``UTIL_SHARE`` of the tokens a second of the best length."""
        return self._util_tokens(scheme)

    def _find_util_tokens(self, scheme: PipelineConfig) -> int:
        times_s = self.sequence_times_s(UTIL_LENGTHS, scheme) + self.overhead_s(scheme)
        rates = UTIL_LENGTHS / np.maximum(times_s, self.launch_s(scheme))
        return int(UTIL_LENGTHS[np.argmax(rates >= UTIL_SHARE * rates.max())])

    def peak_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device while micro-batches of ``num_tokens`` are computed on a cluster of ``num_devices``."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        return whole_bytes(np.asarray(self._bytes(tokens, scheme, num_devices=num_devices)))

    def host_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes of the host per device: what is put there of micro-batches of ``num_tokens``, and of the model state.

        The shape is that of ``num_tokens``.
        """
        fixed, per_token = self._host_line(scheme, num_devices)
        return np.ceil(fixed + per_token * np.asarray(num_tokens, dtype=np.float64))

    def _host_line(self, scheme: PipelineConfig, num_devices: int) -> tuple[float, float]:
        """Bytes of the host per device at no token, and per token of a micro-batch."""
        return self._host_state_bytes(num_devices), 0.0

    def _host_state_bytes(self, num_devices: int) -> float:
        """Bytes of the model state that are in the host's memory, per device."""
        if not self.state_on_host:
            return 0.0
        return float(host_state_bytes(self.model, num_devices=num_devices, dtype=self.dtype))

    def without_offload(self) -> "SeparableCost":
        """Return the same costs on hosts that hold nothing but the model state, as far as that is there."""
        other, device = copy(self), self.cluster.device
        state_bytes = int(self._host_state_bytes(self.cluster.num_devices))
        other.cluster = replace(self.cluster, device=replace(device, host_memory_bytes=state_bytes))
        return other

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device and its share of the host; 0 if not even the state does."""
        on_device = self._most_on_device(scheme, num_devices)
        return min(on_device, self.max_host_tokens(scheme, num_devices=num_devices))

    def _most_on_device(self, scheme: PipelineConfig, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device."""
        return most_tokens(
            lambda tokens: self.peak_bytes(tokens, scheme, num_devices=num_devices), self.memory_limit_bytes
        )

    def max_host_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Most tokens of a micro-batch of which the host holds what is put there; no limit where nothing is."""
        fixed, per_token = self._host_line(scheme, num_devices)
        free = self.cluster.device.host_memory_bytes - fixed
        if free < 0 < fixed:
            return 0
        return int(min(free / per_token, MAX_BYTES)) if per_token else int(MAX_BYTES)

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes that a micro-batch and everything beside it may take."""
        return self.cluster.device.memory_bytes

    def reduction(self, scheme: PipelineConfig) -> ReductionTime | None:
        """Seconds of a micro-batch in reducing gradients to shares; None where whole ones are kept."""
        return self._reductions(scheme)

    def _state_bytes(self, scheme: PipelineConfig, num_devices: int) -> tuple[int, ...]:
        """Bytes of the model state on a device of each stage, with the whole gradients of two units, if not of all."""
        width = gradient_bytes(self.dtype, is_narrow=self.narrow_gradients)
        return tuple(
            state_bytes(
                self.model, num_devices=num_devices, dtype=self.dtype,
                num_held=held_params(self.model, scheme, stage=stage), on_host=self.state_on_host,
                narrow_gradients=self.narrow_gradients,
                gradient_shares=scheme.degree if scheme.shard_gradients else 1,
            ) + int(width * max(whole_units(self.model, scheme, stage)))
            for stage in range(scheme.num_stages)
        )  # fmt: skip
