"""A whole model from a profile of two of its layers, and how many layers to recompute. DCP, section 3.4 and 3.5.

L layers of which r are recomputed; t_f and t_b seconds of one layer's forward and backward, m bytes that it keeps,
m_inp bytes of its input; T_C and M_C what does not depend on layers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec, needed_and_available
from lengthwise.cost.separable import SchemeCache, SeparableCost


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What one layer and all else cost for one micro-batch shape on one number of devices."""

    forward_s: float
    """t_f."""
    backward_s: float
    """t_b."""
    constant_s: float
    """T_C: embedding, loss and whatever else happens once."""
    kept_bytes: float
    """m: what a layer keeps for its backward beside its input."""
    input_bytes: float
    """m_inp."""
    constant_bytes: float
    """M_C: model state and buffers."""

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s, self.constant_s) < 0:
            raise InputError(f"a layer profile cannot have negative times: {self}; profile again")
        if self.kept_bytes <= 0 or self.input_bytes < 0 or self.constant_bytes < 0:
            raise InputError(f"a layer keeps something and nothing is negative in a layer profile: {self}")

    def time_s(self, num_layers: int, recomputed: int) -> float:
        """Equations 4 and 5: L (t_f + t_b) + r t_f + T_C."""
        once_s = num_layers * (self.forward_s + self.backward_s)
        return once_s + recomputed * self.forward_s + self.constant_s

    def peak_bytes(self, num_layers: int, recomputed: int) -> float:
        """Equation 6, and the layer it leaves out: (L - r) m + L m_inp + M_C, + m while one of the r is alive again.

        So recomputing one layer saves nothing.
        """
        alive = num_layers - recomputed + (recomputed > 0)
        return alive * self.kept_bytes + num_layers * self.input_bytes + self.constant_bytes

    def fewest_recomputed(self, num_layers: int, memory_bytes: float) -> int:
        """The smallest r that fits ``memory_bytes``, and so the fastest.

        What Algorithm 1 is after. As printed it counts the layers that are *not* recomputed and stops at the first
        count that fits, which is always 1.

        Raises:
            InfeasibleError: not even recomputing every layer fits.
        """
        if self.peak_bytes(num_layers, 0) <= memory_bytes:
            return 0
        fixed = num_layers * self.input_bytes + self.constant_bytes
        fewest = num_layers + 1 - int(max(0.0, memory_bytes - fixed) / self.kept_bytes)
        if fewest > num_layers:
            needed, available = needed_and_available(self.peak_bytes(num_layers, num_layers), memory_bytes)
            raise InfeasibleError(
                f"{num_layers} layers need {needed} with every one recomputed; there are {available}. "
                "Use a higher degree or a smaller micro-batch."
            )
        return fewest


def from_two_layers(
    *,
    iteration_s: float,
    peak_bytes: float,
    forward_s: float,
    backward_s: float,
    kept_bytes: float,
    input_bytes: float,
) -> LayerProfile:
    """The profile behind an iteration of two layers, both recomputed; per-layer values are those of the second.

    T_C is what two layers, forward twice and backward once each, leave of the iteration; M_C what the peak leaves after
    two inputs and the one layer alive. (The published code counts that layer's input twice.)

    Raises:
        InputError: two layers alone take longer, or more, than the iteration did.
    """
    return LayerProfile(
        forward_s=forward_s,
        backward_s=backward_s,
        constant_s=iteration_s - 2 * (2 * forward_s + backward_s),
        kept_bytes=kept_bytes,
        input_bytes=input_bytes,
        constant_bytes=peak_bytes - 2 * input_bytes - kept_bytes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Layer profiles of one degree over the tokens of a sequence; linear between them, and from 0 to the first."""

    tokens: np.ndarray
    profiles: tuple[LayerProfile, ...]

    def values(self, of: list[float]) -> np.ndarray:
        """Measured values, with 0 at no token, made never to fall."""
        return np.maximum.accumulate([0.0, *of])

    def at(self, tokens: np.ndarray, of: list[float]) -> np.ndarray:
        """Values at ``tokens``; past the last row, value per token goes on growing as between the last two."""
        values = self.values(of)
        inside = np.interp(tokens, self.tokens, values)
        last, rate = self.tokens[-1], values[-1] / self.tokens[-1]
        before = values[-2] / self.tokens[-2] if len(values) > 2 else rate
        growth = max(0.0, rate - before) / (last - self.tokens[-2])
        return np.where(tokens > last, tokens * (rate + growth * (tokens - last)), inside)


class TwoLayerCost(SeparableCost):
    """Costs of single-stage schemes from layer profiles of lone sequences: degree -> length in tokens -> profile.

    A sequence adds L (t_f + t_b) + r t_f; a micro-batch costs the smallest T_C of its degree. Bytes follow equation 6.
    The profiles hold the model state of the cluster they were taken on, so the number of devices does not matter.
    """

    def __init__(
        self,
        profiles: Mapping[int, Mapping[int, LayerProfile]],
        *,
        model: ModelSpec,
        cluster: ClusterSpec,
        dtype: str = "bfloat16",
        method: Method = Method.ULYSSES,
    ) -> None:
        if not profiles or not all(profiles.values()):
            raise InputError("two-layer costs need at least one profile of every degree")
        super().__init__(model=model, cluster=cluster, dtype=dtype)
        self.method = method
        self._rows = {
            degree: _Rows(
                tokens=np.array([0.0, *sorted(rows)]), profiles=tuple(rows[tokens] for tokens in sorted(rows))
            )
            for degree, rows in profiles.items()
        }
        self._found = SchemeCache(self._find)

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """L (t_f + t_b) + r t_f of each sequence."""
        rows = self._found(scheme)
        seconds = [p.time_s(scheme.num_layers, scheme.num_recomputed) - p.constant_s for p in rows.profiles]
        return rows.at(np.asarray(lengths, dtype=np.float64), seconds)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch outside its layers, T_C."""
        return min(profile.constant_s for profile in self._found(scheme).profiles)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        rows = self._found(scheme)
        constant = max(profile.constant_bytes for profile in rows.profiles)
        kept_bytes = [p.peak_bytes(scheme.num_layers, scheme.num_recomputed) - p.constant_bytes for p in rows.profiles]
        return constant + np.maximum(rows.at(tokens, kept_bytes), tokens)

    def _find(self, scheme: PipelineConfig) -> _Rows:
        check_measured(scheme, self._rows, method=self.method, num_layers=self.model.num_layers)
        return self._rows[scheme.degree]


def check_measured(scheme: PipelineConfig, degrees: Iterable[int], *, method: Method, num_layers: int) -> None:
    """Raise ``InputError`` unless ``scheme`` is one stage of ``num_layers`` under ``method`` at one of ``degrees``."""
    expected, measured = {Method.DENSE} if scheme.degree == 1 else {method}, sorted(degrees)
    is_measured = scheme.degree in measured and scheme.num_stages == 1 and set(scheme.methods) == expected
    if not is_measured or scheme.num_layers != num_layers:
        raise InputError(
            f"no layer profile for scheme {scheme.name}; there are single-stage {method} (dense at degree 1) of "
            f"degrees {', '.join(map(str, measured))} with {num_layers} layers"
        )
