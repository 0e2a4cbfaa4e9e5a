"""Cost as in ParaDySe: a random forest within what was profiled, a polynomial beyond, and a margin before memory ends.

The forest learns, from (sum of l, sum of l^2), how a micro-batch's seconds differ from those of the fit
T = a l^2 + b l + c of :mod:`lengthwise.cost.profiled.fitted`. It is not additive, and planners need times that are: a
sequence costs what the forest says of a micro-batch of it alone, less the overhead c of the fit, never less than a
shorter one. A pack costs its sequences and c. Bytes are lines over tokens, as in the fit.

What is put right against the published code: there is one forest per model and scheme, so the number of layers cannot
be mixed up (theirs is fed hidden size, heads and length, not layers); whether a length fits is decided for that length
alone (theirs, once it saw one that does not, refuses all that follow); the limit is the device's memory less a margin
(theirs is the largest memory seen while profiling).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.cost import ProfileTable
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.profiled.fitted import FittedCost, features, fit_rows
from lengthwise.cost.profiled.measured_schemes import Tables
from lengthwise.cost.profiled.monotone_curve import MIN_POINTS, Curve, choose_polynomial, grow_forest, make_curve

LEAST_S = 1e-9
"""Seconds of a sequence whose micro-batch the forest says to take no longer than the overhead."""
MEMORY_MARGIN = 0.05
"""Share of a device's memory left free for what the profile does not show."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedForests:
    """The times that one profile teaches."""

    time_s: Curve
    """Seconds of a micro-batch of one sequence, by its length."""
    overhead_s: float
    left_out: tuple[np.ndarray, ...]
    """Polynomials chosen without each row of one sequence in turn."""

    def sequence_times_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds that a sequence adds to a micro-batch."""
        return np.maximum(self.time_s(length) - self.overhead_s, LEAST_S)

    def pack_time_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a micro-batch."""
        return float(self.sequence_times_s(np.asarray(lengths, dtype=np.float64)).sum()) + self.overhead_s

    def pack_range_s(self, lengths: Sequence[int]) -> tuple[float, float]:
        """The range of seconds predicted for a micro-batch when any one row of one sequence is left out.

        A point within the profile; beyond it, where the polynomial decides, as wide as that hangs on one row.
        """
        curves = (replace(self.time_s, polynomial=polynomial) for polynomial in self.left_out)
        others = (replace(self, time_s=curve).pack_time_s(lengths) for curve in curves)
        times_s = [self.pack_time_s(lengths), *others]
        return min(times_s), max(times_s)


def learn(table: ProfileTable) -> LearnedForests:
    """Forests and polynomials of a profile; the same table always teaches the same.

    Raises:
        InputError: too few rows with one sequence alone, or scikit-learn is missing.
    """
    columns = np.stack([features(row.lengths) for row in table.rows])
    squares, tokens, _ = columns.T
    times_s = np.array([row.time_s for row in table.rows])
    is_lone = np.array([len(row.lengths) == 1 for row in table.rows])
    fitted = fit_rows(table)
    coefficients = np.array([fitted.a_s, fitted.b_s, fitted.c_s])
    lone, lone_s = tokens[is_lone], times_s[is_lone]
    others = [np.arange(len(lone)) != row for row in range(len(lone))] if len(lone) > MIN_POINTS else []
    return LearnedForests(
        time_s=make_curve(
            grow_forest(np.stack([tokens, squares], axis=1), times_s / (columns @ coefficients)),
            num_powers=2,
            last=float(lone.max(initial=0.0)),
            base=coefficients[::-1],
            polynomial=choose_polynomial(lone, lone_s),
        ),
        overhead_s=fitted.c_s,
        left_out=tuple(choose_polynomial(lone[rest], lone_s[rest]) for rest in others)
        or tuple(np.array(coefficients_of_rest)[::-1] for coefficients_of_rest in fitted.left_out),
    )


class HybridCost(FittedCost):
    """Learned times of one profiled model, one forest per profiled scheme; overheads and bytes are those of the fits.

    Times never fall, and stay level where the forest does.
    """

    def __init__(
        self, tables: Tables, *, model: ModelSpec, cluster: ClusterSpec, narrow_gradients: bool = False
    ) -> None:
        super().__init__(tables, model=model, cluster=cluster, narrow_gradients=narrow_gradients)
        self._learned = {scheme: learn(table) for scheme, table in self.tables.items()}
        self.error = None  # a forest has seen every row, so that how close it comes to them says nothing

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """What a micro-batch of each sequence alone takes, less the overhead."""
        length = np.asarray(lengths, dtype=np.float64)
        parts = self._parts(scheme).items()
        times_s: np.ndarray = np.sum(
            [share * self._learned[part].sequence_times_s(length) for part, share in parts], axis=0
        )
        return times_s if scheme.is_plain else times_s + self._offload.times_s(length, scheme)

    def time_range_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> tuple[float, float]:
        """The range of seconds predicted for a micro-batch when any one row is left out."""
        ranges_s = [(share, self._learned[part].pack_range_s(lengths)) for part, share in self._parts(scheme).items()]
        added_s = self._added_s(lengths, scheme)
        low_s, high_s = (sum(share * ends[end] for share, ends in ranges_s) for end in (0, 1))
        return low_s + added_s, high_s + added_s

    @property
    def memory_limit_bytes(self) -> float:
        """The device's memory less ``MEMORY_MARGIN``."""
        return self.cluster.device.memory_bytes * (1 - MEMORY_MARGIN)
