"""Updates of which computation hides a share: what plans reckon with where pushes and pulls run beneath passes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.cost import CostModel, error_of
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import exposed_update_s
from lengthwise.core.pipeline_config import PipelineConfig, Strategy


class OverlappedCost:
    """``base`` with updates that run beneath computation by a share. A :class:`~lengthwise.core.cost.CostModel`."""

    def __init__(self, base: CostModel, overlap: float) -> None:
        """``overlap``: the share, from 0 to 1, as far as passes are long enough; see ``exposed_update_s``.

        Raises:
            InputError: it is no share.
        """
        if not 0 <= overlap <= 1:
            raise InputError(f"overlap is a share of the update between 0 and 1, not {overlap}")
        self.base, self.overlap, self.error = base, overlap, error_of(base)

    def update_s(self, strategy: Strategy) -> float:
        """Seconds that are exposed at least, however long the passes are."""
        return (1.0 - self.overlap) * self.base.update_s(strategy)

    def exposed_s(self, strategy: Strategy, cover_s: float) -> float:
        """Seconds that nothing hides where ``cover_s`` seconds of passes may."""
        return exposed_update_s(self.base.update_s(strategy), cover_s, self.overlap)

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence adds, as the base says; and so in all that follows."""
        return self.base.sequence_times_s(lengths, scheme)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch before its first token."""
        return self.base.overhead_s(scheme)

    def time_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``."""
        return self.base.time_s(lengths, scheme)

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of each sequence in exposed communication."""
        return self.base.comm_times_s(lengths, scheme)

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Seconds to move weights between two phases."""
        return self.base.switch_s(before, after)

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """Fewest tokens of a micro-batch that use a device well."""
        return self.base.util_tokens(scheme)

    def peak_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device at most."""
        return self.base.peak_bytes(num_tokens, scheme, num_devices=num_devices)

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device; 0 if not even the model state does."""
        return self.base.max_tokens(scheme, num_devices=num_devices)
