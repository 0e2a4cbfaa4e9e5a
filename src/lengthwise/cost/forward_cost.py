"""What forwards without a backward cost: for scores and other answers of a model that is not trained by them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import PipelineConfig, Strategy

FORWARD_SHARE = 1 / 3
"""Of the seconds of forward and backward: each product of a forward has two in the backward."""


@dataclass(frozen=True, kw_only=True)
class ForwardOnlyCost:
    """The seconds of the forward alone, and bytes that it needs at most: those where every layer recomputes.

    Such a layer keeps its input until the backward, on the device or the host, which a forward alone does not; all else
    is there in both. Nothing is copied to a host.
    """

    training: CostModel
    """The cost of forward and backward."""

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence adds to a micro-batch, by :data:`FORWARD_SHARE`."""
        return FORWARD_SHARE * self.training.sequence_times_s(lengths, _kept(scheme))

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch costs before its first token."""
        return FORWARD_SHARE * self.training.overhead_s(_kept(scheme))

    def time_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``."""
        return FORWARD_SHARE * self.training.time_s(lengths, _kept(scheme))

    def launch_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch takes at least, as far as the cost of training knows them."""
        launch_s = getattr(self.training, "launch_s", None)
        return 0.0 if launch_s is None else FORWARD_SHARE * float(launch_s(_kept(scheme)))

    def update_s(self, strategy: Strategy) -> float:
        """Seconds of an update, of which there is none."""
        return 0.0

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of ``sequence_times_s`` in communication that computation does not hide."""
        return FORWARD_SHARE * self.training.comm_times_s(lengths, _kept(scheme))

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Seconds to move weights between two phases."""
        return self.training.switch_s(before, after)

    def peak_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device at most."""
        return self.training.peak_bytes(num_tokens, _recomputed(scheme), num_devices=num_devices)

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Tokens of a micro-batch that fits a device, at least."""
        return self.training.max_tokens(_recomputed(scheme), num_devices=num_devices)

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks, as in training."""
        groups = getattr(self.training, "head_groups", None)
        return () if groups is None else tuple(groups(degree))

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """Tokens of a micro-batch below which more micro-batches are not worth a try, as in training."""
        return self.training.util_tokens(_kept(scheme))


def _kept(scheme: PipelineConfig) -> PipelineConfig:
    return replace(scheme, recompute=(False,) * scheme.num_layers, offload=())


def _recomputed(scheme: PipelineConfig) -> PipelineConfig:
    return replace(scheme, recompute=(True,) * scheme.num_layers)
