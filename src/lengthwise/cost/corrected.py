"""A cost model corrected online by measured steps: a factor on seconds and one on bytes, per degree."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.pipeline_config import PipelineConfig, Strategy
from lengthwise.cost.gradient_reduction import ReductionTime
from lengthwise.cost.separable import SeparableCost, most_tokens


class CorrectedCost:
    """``base`` times factors of each degree. A :class:`~lengthwise.core.cost.CostModel`."""

    def __init__(
        self,
        base: SeparableCost,
        *,
        time_factors: Mapping[int, float] | None = None,
        bytes_factors: Mapping[int, float] | None = None,
    ) -> None:
        """``time_factors``: by degree, of seconds in micro-batches; ``bytes_factors``: of bytes beyond the model state.
        Degrees without one keep 1.
        """
        self.base, self.error = base, base.error
        self.time_factors = dict(time_factors or {})
        self.bytes_factors = dict(bytes_factors or {})

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence adds, times the degree's factor."""
        return self.base.sequence_times_s(lengths, scheme) * self.time_factors.get(scheme.degree, 1.0)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch before its first token, times the degree's factor."""
        return self.base.overhead_s(scheme) * self.time_factors.get(scheme.degree, 1.0)

    def time_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``."""
        time_s = float(self.sequence_times_s(np.asarray(lengths), scheme).sum()) + self.overhead_s(scheme)
        return max(time_s, self.launch_s(scheme))

    def launch_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch takes at least, times the degree's factor."""
        return self.base.launch_s(scheme) * self.time_factors.get(scheme.degree, 1.0)

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in exposed communication, times the degree's factor."""
        return self.base.comm_times_s(lengths, scheme) * self.time_factors.get(scheme.degree, 1.0)

    def weight_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in gradients of weights, times the degree's factor."""
        return self.base.weight_times_s(lengths, scheme) * self.time_factors.get(scheme.degree, 1.0)

    def reduction(self, scheme: PipelineConfig) -> ReductionTime | None:
        """Seconds of a micro-batch in reducing gradients to shares, times the degree's factor."""
        reduction, factor = self.base.reduction(scheme), self.time_factors.get(scheme.degree, 1.0)
        if reduction is None:
            return None
        return replace(reduction, whole_s=reduction.whole_s * factor, last_s=reduction.last_s * factor)

    def sent_s(self, scheme: PipelineConfig) -> tuple[float, float]:
        """Seconds per token, and per micro-batch, of what stages send each other, times the degree's factor."""
        per_token_s, per_call_s = self.base.sent_s(scheme)
        factor = self.time_factors.get(scheme.degree, 1.0)
        return per_token_s * factor, per_call_s * factor

    @property
    def prices_split_backwards(self) -> bool:
        """Whether schemes may split backwards, as the base says."""
        return bool(getattr(self.base, "prices_split_backwards", True))

    @property
    def prices_slices(self) -> bool:
        """Whether schemes may cut micro-batches into slices, as the base says."""
        return bool(getattr(self.base, "prices_slices", False))

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks, as the base says."""
        counts: tuple[int, ...] = self.base.head_groups(degree) if hasattr(self.base, "head_groups") else ()
        return counts

    def largest_pack(self, scheme: PipelineConfig) -> int:
        """Tokens of the largest micro-batch that was measured, as the base says; 0: none was."""
        return int(self.base.largest_pack(scheme)) if hasattr(self.base, "largest_pack") else 0

    def update_s(self, strategy: Strategy) -> float:
        """Seconds of a step outside its micro-batches, as the base says."""
        return self.base.update_s(strategy)

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Seconds to move weights between two phases, as the base says."""
        return self.base.switch_s(before, after)

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """Fewest tokens of a micro-batch that use a device well, as the base says."""
        return self.base.util_tokens(scheme)

    def peak_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """The model state as in the base, and beyond it the base's bytes times the degree's factor."""
        state = self.base.peak_bytes(0, scheme, num_devices=num_devices)
        beyond = self.base.peak_bytes(num_tokens, scheme, num_devices=num_devices) - state
        return (state + beyond * self.bytes_factors.get(scheme.degree, 1.0)).astype(np.int64)

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device; 0 if not even the model state does."""
        on_device = most_tokens(
            lambda tokens: self.peak_bytes(tokens, scheme, num_devices=num_devices), self.base.memory_limit_bytes
        )
        return min(on_device, self.base.max_host_tokens(scheme, num_devices=num_devices))
