"""Cost as in ParaDySe: a random forest within what was profiled, a polynomial beyond, and a margin before memory ends.

The forest learns, from (sum of l, sum of l^2), how a micro-batch's seconds differ from those of the fit
T = a l^2 + b l + c of :mod:`lengthwise.cost.profiled.fitted`. It is not additive, and planners need times that are: a
sequence costs what the forest says of a micro-batch of it alone, less the overhead c of the fit, never less than a
shorter one. A pack costs its sequences and c.

What is put right against the published code: there is one forest per model and scheme, so the number of layers cannot
be mixed up (theirs is fed hidden size, heads and length, not layers); whether a length fits is decided for that length
alone (theirs, once it saw one that does not, refuses all that follow); the limit is the device's memory less a margin
(theirs is the largest memory seen while profiling).
"""

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.polynomial.polynomial import polyval

from lengthwise.core.cost import ProfileTable
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.profiled.fitted import features, fit
from lengthwise.cost.profiled.measured_schemes import ProfiledCost, Tables
from lengthwise.cost.profiled.monotone_curve import Curve, choose_polynomial, grow_forest, make_curve

LEAST_S = 1e-9
"""Seconds of a sequence whose micro-batch the forest says to take no longer than the overhead."""
MEMORY_MARGIN = 0.05
"""Share of a device's memory left free for what the forest does not know."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedForests:
    """Forests and polynomials learned from one profile."""

    time_s: Curve
    """Seconds of a micro-batch of one sequence, by its length."""
    overhead_s: float
    kept_bytes: Curve
    """Bytes beyond the model state, by tokens of the micro-batch."""

    def sequence_times_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds that a sequence adds to a micro-batch."""
        return np.maximum(self.time_s(length) - self.overhead_s, LEAST_S)

    def pack_time_s(self, lengths: tuple[int, ...]) -> float:
        """Seconds of a micro-batch."""
        return float(self.sequence_times_s(np.asarray(lengths, dtype=np.float64)).sum()) + self.overhead_s


def learn(table: ProfileTable) -> LearnedForests:
    """Forests and polynomials of a profile; the same table always teaches the same.

    Raises:
        InputError: too few rows, too few of them with one sequence alone, or scikit-learn is missing.
    """
    columns = np.stack([features(row.lengths) for row in table.rows])
    squares, tokens, _ = columns.T
    times_s = np.array([row.time_s for row in table.rows])
    sizes = np.array([row.kept_bytes for row in table.rows], dtype=np.float64)
    is_lone = np.array([len(row.lengths) == 1 for row in table.rows])
    fitted, size_polynomial = fit(table), choose_polynomial(tokens, sizes)
    coefficients = np.array([fitted.a_s, fitted.b_s, fitted.c_s])
    return LearnedForests(
        time_s=make_curve(
            grow_forest(np.stack([tokens, squares], axis=1), times_s / (columns @ coefficients)),
            num_powers=2,
            last=float(tokens[is_lone].max(initial=0.0)),
            base=coefficients[::-1],
            polynomial=choose_polynomial(tokens[is_lone], times_s[is_lone]),
        ),
        overhead_s=fitted.c_s,
        kept_bytes=make_curve(
            grow_forest(tokens[:, None], sizes / polyval(tokens, size_polynomial)),
            num_powers=1,
            last=float(tokens.max()),
            base=size_polynomial,
            polynomial=size_polynomial,
        ),
    )


class HybridCost(ProfiledCost):
    """Learned times and bytes of one profiled model, one set of forests per profiled scheme. Times never fall, and
    stay level where the forest does."""

    def __init__(self, tables: Tables, *, model: ModelSpec, cluster: ClusterSpec) -> None:
        super().__init__(tables, model=model, cluster=cluster)
        self._learned = {scheme: learn(table) for scheme, table in self.tables.items()}

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """What a micro-batch of each sequence alone takes, less the overhead."""
        length = np.asarray(lengths, dtype=np.float64)
        return np.sum([share * forests.sequence_times_s(length) for forests, share in self._of(scheme)], axis=0)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch before its first token: ``c`` of the profile's fit."""
        return fsum(share * forests.overhead_s for forests, share in self._of(scheme))

    @property
    def memory_limit_bytes(self) -> float:
        """The device's memory less ``MEMORY_MARGIN``."""
        return self.cluster.device.memory_bytes * (1 - MEMORY_MARGIN)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        kept_bytes = np.sum([share * forests.kept_bytes(tokens) for forests, share in self._of(scheme)], axis=0)
        kept_bytes = np.maximum(kept_bytes, tokens)
        return max(self._state_bytes(scheme, num_devices)) + kept_bytes

    def _of(self, scheme: PipelineConfig) -> list[tuple[LearnedForests, float]]:
        """Forests of the methods of a scheme's layers, and the share of layers with each."""
        return [(self._learned[part], share) for part, share in self._parts(scheme).items()]
