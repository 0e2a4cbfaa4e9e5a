"""Cost from measurements: T = a l^2 + b l per sequence + c per micro-batch, never negative, fitted to a profile.

The form is that of Hydraulis (section 4.2) with c charged per micro-batch, which is what its own runtime does.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.scheme import Scheme, Strategy
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.separable import SeparableCost, check_dense

MIN_ROWS = 3
"""Three coefficients need three measurements."""
ROUNDS = 10
NEGLIGIBLE = 0.01
"""Relative errors below this are noise and count alike."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients and how well they reproduce the rows they come from."""

    a_s: float
    """Seconds per squared token of a sequence."""
    b_s: float
    """Seconds per token."""
    c_s: float
    """Seconds per micro-batch."""
    fixed_bytes: float
    bytes_per_token: float
    time_residuals: tuple[float, ...]
    """Predicted over measured time, minus one, per row."""
    bytes_residuals: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median absolute relative error of the times."""
        return float(np.median(np.abs(self.time_residuals)))


def fit(table: ProfileTable) -> Fit:
    """Least relative errors with non-negative coefficients, so times and bytes grow with every length.

    Raises:
        InputError: too few rows.
    """
    if len(table.rows) < MIN_ROWS:
        raise InputError(f"the profile has {len(table.rows)} rows; fitting a, b and c needs at least {MIN_ROWS}")
    times = np.array([row.time_s for row in table.rows])
    sizes = np.array([row.kept_bytes for row in table.rows], dtype=float)
    tokens = np.array([sum(row.lengths) for row in table.rows], dtype=float)
    squares = np.array([sum(length**2 for length in row.lengths) for row in table.rows], dtype=float)
    ones = np.ones(len(tokens))
    (a, b, c), time_residuals = _fit_relative(np.stack([squares, tokens, ones], axis=1), times)
    (fixed, per_token), bytes_residuals = _fit_relative(np.stack([ones, tokens], axis=1), sizes)
    return Fit(
        a_s=a, b_s=b, c_s=c, fixed_bytes=fixed, bytes_per_token=per_token,
        time_residuals=time_residuals, bytes_residuals=bytes_residuals,
    )  # fmt: skip


def _fit_relative(features: np.ndarray, target: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Non-negative weights whose products come closest to ``target`` in relative terms, and their relative errors.

    Least absolute errors by repeated least squares, weighted by the error of the round before: a row that a busy moment
    of the machine spoiled does not pull the others along.
    """
    scale = features.max(axis=0)  # columns differ by ten orders of magnitude
    relative = features / scale / target[:, None]
    trust = np.ones(len(target))
    for _ in range(ROUNDS):
        weights = nnls(relative * trust[:, None], trust)[0]
        errors = relative @ weights - 1.0
        trust = 1.0 / np.sqrt(np.maximum(np.abs(errors), NEGLIGIBLE))
    return tuple(map(float, weights / scale)), tuple(map(float, errors))


class FittedCost(SeparableCost):
    """The fitted times and bytes of one profiled model on one kind of device."""

    def __init__(self, table: ProfileTable, *, model: ModelSpec, cluster: ClusterSpec) -> None:
        if table.model_digest != model.digest:
            raise InputError(
                f"the profile is of model {table.model_name} ({table.model_digest}), the run trains {model.name} "
                f"({model.digest}); profile this model with: lengthwise profile"
            )
        super().__init__(model=model, cluster=cluster, dtype=table.dtype)
        self.table = table
        self.fit = fit(table)

    def sequence_times_s(self, lengths: np.ndarray, scheme: Scheme) -> np.ndarray:
        """``a l^2 + b l`` of each sequence."""
        self._check(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        return (self.fit.a_s * length + self.fit.b_s) * length

    def overhead_s(self, scheme: Scheme) -> float:
        """``c``."""
        self._check(scheme)
        return self.fit.c_s

    def update_s(self, strategy: Strategy) -> float:
        """As measured on the profile's number of ranks."""
        return self.table.update_s

    def _activation_bytes(self, scheme: Scheme) -> tuple[float, float]:
        self._check(scheme)
        return self.fit.fixed_bytes, max(self.fit.bytes_per_token, 1.0)

    def _check(self, scheme: Scheme) -> None:
        check_dense(scheme)
        if set(scheme.recompute) != {self.table.recompute}:
            raise InputError(
                f"the profile was taken with recompute={str(self.table.recompute).lower()}; "
                "profile again with the run's plan.recompute"
            )
