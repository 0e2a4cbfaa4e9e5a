"""What every cost model of the form T = sum of f(l) + c per micro-batch shares: pricing packs and finding what fits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.scheme import Method, Scheme, Strategy
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.memory import state_bytes


class SeparableCost(ABC):
    """A :class:`~lengthwise.core.cost.CostModel` for dense schemes, of one model in one dtype on one cluster."""

    def __init__(self, *, model: ModelSpec, cluster: ClusterSpec, dtype: str) -> None:
        self.model = model
        self.cluster = cluster
        self.dtype = dtype

    @abstractmethod
    def sequence_times_s(self, lengths: np.ndarray, scheme: Scheme) -> np.ndarray:
        """Seconds, forward and backward, that each sequence adds to a micro-batch."""

    @abstractmethod
    def overhead_s(self, scheme: Scheme) -> float:
        """Seconds that a micro-batch costs before its first token."""

    @abstractmethod
    def update_s(self, strategy: Strategy) -> float:
        """Seconds of a step outside its micro-batches."""

    @abstractmethod
    def _activation_bytes(self, scheme: Scheme) -> tuple[float, float]:
        """Bytes of a micro-batch: a constant, and what each token adds."""

    def time_s(self, lengths: Sequence[int], scheme: Scheme) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``, forward and backward."""
        return float(self.sequence_times_s(np.asarray(lengths), scheme).sum()) + self.overhead_s(scheme)

    def peak_bytes(self, num_tokens: int, scheme: Scheme, *, num_devices: int) -> int:
        """Bytes per device while a micro-batch of ``num_tokens`` is computed on a cluster of ``num_devices``."""
        fixed, per_token = self._activation_bytes(scheme)
        return int(self._state_bytes(num_devices) + fixed + per_token * num_tokens)

    def max_tokens(self, scheme: Scheme, *, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device; 0 if not even the model state does."""
        fixed, per_token = self._activation_bytes(scheme)
        free = self.cluster.device.memory_bytes - self._state_bytes(num_devices) - fixed
        return max(0, int(free / per_token))

    def _state_bytes(self, num_devices: int) -> int:
        return state_bytes(self.model, num_devices=num_devices, dtype=self.dtype)


def check_dense(scheme: Scheme) -> None:
    """Raise ``InputError`` for schemes this version has no costs for, naming the field."""
    if scheme.degree != 1 or scheme.num_stages != 1 or set(scheme.methods) != {Method.DENSE}:
        raise InputError(
            f"no costs yet for degree {scheme.degree}, {scheme.num_stages} stages and methods "
            f"{sorted(set(scheme.methods))}; only dense schemes of one device are priced"
        )
