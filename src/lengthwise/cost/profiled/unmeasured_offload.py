"""What offload, tiles, groups of heads and slices change in a scheme that was measured without, by closed forms."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.separable import SchemeCache

LENGTHS = np.unique(np.geomspace(1, 1 << 24, 600).astype(np.int64))
"""Lengths, 3 % apart, at which added seconds are known; between them they are interpolated."""
MANY_TOKENS = 1 << 24
"""Tokens of a micro-batch whose bytes are those that grow with tokens."""


def without_offload_and_tiles(scheme: PipelineConfig) -> PipelineConfig:
    """Return the scheme whose layers keep on the device what they save, and compute all tokens and heads at once."""
    return replace(scheme, offload=(), tile_tokens=0, head_groups=1, keep_attention=False, slices=1)


class UnmeasuredOffload:
    """Seconds that closed forms add for offload, tiles, groups of heads and slices, and the share of bytes left.

    Times are differences, so that the rates which a profile measured stay; a copy is hidden by the pass of the data
    sheet. Bytes are a share of those measured beside the model state, as fast as they grow with tokens.
    """

    def __init__(
        self, analytic: AnalyticCost, measured_times_s: Callable[[np.ndarray, PipelineConfig], np.ndarray]
    ) -> None:
        """``measured_times_s``: the seconds of sequences under a scheme without either."""
        self._analytic, self._measured_times_s = analytic, measured_times_s
        self._plain = SchemeCache(without_offload_and_tiles)
        self._times = SchemeCache(self._find_times)
        self._shares = SchemeCache(self._find_share)

    def times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence takes longer; the shape of ``lengths``."""
        return np.interp(lengths, LENGTHS, self._times(scheme))

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch takes longer, whatever its sequences."""
        return max(0.0, self._analytic.overhead_s(scheme) - self._analytic.overhead_s(self._plain(scheme)))

    def kept_share(self, scheme: PipelineConfig) -> float:
        """The share of the bytes that grow with tokens which stays on the device."""
        return self._shares(scheme)

    def host_bytes_per_token(self, scheme: PipelineConfig) -> float:
        """Bytes per token of a micro-batch in the host's memory."""
        few, many = self._analytic.host_bytes([0, MANY_TOKENS], scheme, num_devices=self._analytic.cluster.num_devices)
        return float(many - few) / MANY_TOKENS

    def _find_times(self, scheme: PipelineConfig) -> np.ndarray:
        """Seconds added at ``LENGTHS``; copies that attention hides add none; a longer one takes no less."""
        plain = self._plain(scheme)
        times_s, plain_s = (self._analytic.sequence_times_s(LENGTHS, variant) for variant in (scheme, plain))
        measured_s = self._measured_times_s(LENGTHS, plain)
        return np.maximum.accumulate(measured_s + np.maximum(times_s - plain_s, 0.0)) - measured_s

    def _find_share(self, scheme: PipelineConfig) -> float:
        slope, plain = (self._slope(variant) for variant in (scheme, self._plain(scheme)))
        return min(1.0, slope / plain)

    def _slope(self, scheme: PipelineConfig) -> float:
        sizes = [MANY_TOKENS, 2 * MANY_TOKENS]
        few, many = self._analytic.peak_bytes(sizes, scheme, num_devices=self._analytic.cluster.num_devices)
        return float(many - few)
