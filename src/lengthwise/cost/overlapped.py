"""Updates that run beneath computation: what plans reckon with where pushes and pulls are hidden by passes."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.cost import CostModel, error_of
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import UpdateParts, exposed_update_s, largest_parts
from lengthwise.core.pipeline_config import PipelineConfig, Strategy


class OverlappedCost:
    """``base`` with updates that run beneath computation. A :class:`~lengthwise.core.cost.CostModel`.

    How much of one is hidden follows from its parts (:class:`~lengthwise.core.one_f_one_b.UpdateParts`) and from the
    passes of each pipeline, unless a share is given.
    """

    def __init__(self, base: CostModel, overlap: float | None = None) -> None:
        """``overlap``: a share of every update, from 0 to 1, as far as passes are long enough (``exposed_update_s``);
        None: as its parts and the passes say. Nothing is hidden of updates whose parts ``base`` does not know.

        Raises:
            InputError: it is no share.
        """
        if overlap is not None and not 0 <= overlap <= 1:
            raise InputError(f"overlap is a share of the update between 0 and 1, not {overlap}")
        self.base, self.overlap, self.error = base, overlap, error_of(base)

    def __getattr__(self, name: str) -> Any:
        """What ``base`` knows beyond a cost model, such as of the host's memory."""
        if name.startswith("_") or name == "base":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.base, name)

    def update_s(self, strategy: Strategy) -> float:
        """Seconds that are exposed at least, however long the passes are."""
        if self.overlap is None:
            return self._parts(strategy).least_s
        return (1.0 - self.overlap) * self.base.update_s(strategy)

    def whole_update_s(self, strategy: Strategy) -> float:
        """Seconds of the update where nothing is hidden; no step is shorter."""
        return self._parts(strategy).whole_s if self.overlap is None else self.base.update_s(strategy)

    def exposed_s(self, strategies: Sequence[Strategy], cover_s: float) -> float:
        """Seconds that a share leaves of the update of a step of some phases, with ``cover_s`` of passes to hide it."""
        assert self.overlap is not None, "there is a share"
        return max(exposed_update_s(self.base.update_s(strategy), cover_s, self.overlap) for strategy in strategies)

    def update_parts(self, strategies: Sequence[Strategy]) -> UpdateParts:
        """The parts of the update of a step of some phases."""
        return largest_parts([self._parts(strategy) for strategy in strategies])

    def _parts(self, strategy: Strategy) -> UpdateParts:
        parts_of = getattr(self.base, "update_parts", None)
        if parts_of is None:
            update_s = self.base.update_s(strategy)
            return UpdateParts(pull_s=0.0, push_s=0.0, first_pull_s=0.0, last_push_s=0.0, rest_s=update_s)
        parts: UpdateParts = parts_of(strategy)
        return parts

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


def with_overlap(cost: CostModel, overlap: float | None) -> CostModel:
    """Costs of which passes hide a part of every update: a share ``overlap``; None: as far as its parts are known."""
    if overlap == 0 or (overlap is None and not hasattr(cost, "update_parts")):
        return cost
    return OverlappedCost(cost, overlap)


def hides_updates(cost: CostModel) -> TypeGuard[OverlappedCost]:
    """Whether passes hide as much of an update as its parts say."""
    return isinstance(cost, OverlappedCost) and cost.overlap is None
