"""Cost from measurements: T = a l^2 + b l per sequence + c per micro-batch, never negative, fitted to a profile.

The form is that of Hydraulis (section 4.2) with c charged per micro-batch, which is what its own runtime does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np

from lengthwise.core.cost import CostError, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.profiled.launch_bound import launch_bound_rows
from lengthwise.cost.profiled.measured_schemes import ProfiledCost, Tables
from lengthwise.cost.separable import Line, SchemeCache

MIN_ROWS = 3
"""Three coefficients need three measurements, of packs that differ."""
LEAST_SPREAD = 1.5
"""Times as many tokens as the smallest pack of a profile has, its largest needs at least: what times grow by between
packs of almost the same size is noise."""
ROUNDS = 10
NEGLIGIBLE = 0.01
"""Relative errors below this are noise and count alike."""
LEAST_B_S = 1e-12
"""Seconds a token takes where all of a profile's rows take the same: sequences must cost something."""


ONE_TERM = (np.array([1.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0]))
"""Columns of fits with a and c alone, and with b and c."""
COEFFICIENTS = ("a_s", "b_s", "c_s", "launch_s")
"""Fields of a fit that are averaged over the layers of a scheme with several methods."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients and how well they reproduce the rows they come from."""

    a_s: float
    """Seconds per squared token of a sequence."""
    b_s: float
    """Seconds per token."""
    c_s: float
    """Seconds per micro-batch."""
    launch_s: float
    """Seconds that a micro-batch takes at least, of rows that are launch-bound; 0: none is."""
    memory: tuple[Line, ...]
    """Bytes over the tokens of a micro-batch, beyond the model state, are the largest of these."""
    time_residuals: tuple[float, ...]
    """Predicted over measured time, minus one, per row; of launch-bound rows those beside the floor under them."""
    left_out: tuple[tuple[float, float, float], ...]
    """a, b and c fitted without each row in turn; where sequences hardly differ, also with a or b alone."""

    @property
    def bytes_per_token(self) -> float:
        """What each token adds, beyond the most that were measured."""
        return max(line.per_token for line in self.memory)

    def kept_bytes(self, tokens: np.ndarray) -> np.ndarray:
        """Bytes of micro-batches of ``tokens`` beyond the model state."""
        return np.maximum.reduce([line.at(tokens) for line in self.memory])

    @property
    def median_error(self) -> float:
        """Median absolute relative error of the times."""
        return float(np.median(np.abs(self.time_residuals)))

    def time_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a micro-batch."""
        return max(self.launch_s, float(features(lengths) @ (self.a_s, self.b_s, self.c_s)))

    def confidence(self, lengths: Sequence[int]) -> tuple[float, float]:
        """The range of seconds predicted for a micro-batch when any one row is left out.

        Narrow where many rows agree, wide where the prediction hangs on one of them, as beyond the longest measured,
        or on whether times of sequences that hardly differ grow with their length or its square.
        """
        times = np.array([*self.left_out, (self.a_s, self.b_s, self.c_s)]) @ features(lengths)
        times = np.maximum(times, self.launch_s)
        return float(times.min()), float(times.max())


def features(lengths: Sequence[int]) -> np.ndarray:
    """What a, b and c multiply: sum of l^2, sum of l, 1."""
    length = np.asarray(lengths, dtype=np.float64)
    return np.array([np.square(length).sum(), length.sum(), 1.0])


def fit(table: ProfileTable) -> Fit:
    """Least relative errors with non-negative coefficients, so times and bytes grow with every length.

    Coefficients are those of rows that are not launch-bound, which give what a micro-batch takes at least.

    Raises:
        InputError: too few rows, too few of them differ, or all packs are of almost the same size.
    """
    if reason := too_alike([row.lengths for row in table.rows]):
        raise InputError(f"the profile has {reason}; measure more lengths with: lengthwise profile")
    return fit_rows(table)


def too_alike(packs: Sequence[tuple[int, ...]]) -> str:
    """Why no curve of lengths can be fitted to measurements of ``packs``, in words; empty where one can."""
    different = {tuple(features(pack).tolist()) for pack in packs}
    if len(different) < MIN_ROWS:
        return f"{len(packs)} rows, {len(different)} of them different; fitting a, b and c needs at least {MIN_ROWS}"
    smallest, largest = min(map(sum, packs)), max(map(sum, packs))
    if largest < LEAST_SPREAD * smallest:
        return (
            f"packs of {smallest:,} to {largest:,} tokens alone; fitting a, b and c needs one of at least "
            f"{LEAST_SPREAD:g} times as many tokens as another"
        )
    return ""


def fit_rows(table: ProfileTable) -> Fit:
    """:func:`fit` of part of a profile, however few rows there are and however alike."""
    times = np.array([row.time_s for row in table.rows])
    tokens = np.array([sum(row.lengths) for row in table.rows], dtype=float)
    sizes = np.array([row.kept_bytes for row in table.rows], dtype=float)
    columns = np.stack([features(row.lengths) for row in table.rows])
    is_launched = launch_bound_rows(columns, times)
    a, b, c = _fit_relative(columns[~is_launched], times[~is_launched])
    launch_s = float(np.median(times[is_launched])) if is_launched.any() else 0.0
    predicted = np.maximum(columns @ (a, b, c), launch_s)
    left_out = [
        _fit_relative(columns[rest], times[rest])
        for rest in (~is_launched & (np.arange(len(times)) != row) for row in np.flatnonzero(~is_launched))
    ]
    means = columns[~is_launched, 0] / columns[~is_launched, 1]
    if means.max() < LEAST_SPREAD * means.min():  # l^2 and l tell the same rows apart, and beyond them they differ
        left_out += [_fit_relative(columns[~is_launched] * terms, times[~is_launched]) for terms in ONE_TERM]
    return Fit(
        a_s=a, b_s=b, c_s=c, launch_s=launch_s, memory=memory_lines(tokens, sizes),
        time_residuals=tuple((predicted / times - 1.0).tolist()),
        left_out=tuple(left_out),
    )  # fmt: skip


ROUNDING = 4 * float(np.finfo(float).eps)
"""Relative, of a sum whose parts all but cancel."""


def memory_lines(tokens: np.ndarray, num_bytes: np.ndarray) -> tuple[Line, ...]:
    """Lines whose largest is at no measured number of tokens below what was measured there.

    A peak is the largest of several moments, and each grows with the tokens: up to some length the weights that a layer
    gathers decide, beyond it what tokens keep. One line through such rows would be far too low for longer ones; so the
    lines are the edges of the lower convex hull, raised by what any row exceeds it.
    """
    x, place = np.unique(tokens, return_inverse=True)
    y = np.zeros(len(x))
    np.maximum.at(y, place, num_bytes)
    y = np.maximum.accumulate(y)
    hull: list[int] = []
    for point in range(len(x)):
        while len(hull) > 1:
            first, last = hull[-2:]
            if (y[last] - y[first]) * (x[point] - x[first]) < (y[point] - y[first]) * (x[last] - x[first]):
                break
            hull.pop()
        hull.append(point)
    slopes = [(y[b] - y[a]) / (x[b] - x[a]) for a, b in pairwise(hull)] or [y[0] / x[0]]
    lines = [Line(y[point] - slope * x[point], slope) for point, slope in zip(hull, slopes)]
    raised = max(1.0, float((y / np.maximum.reduce([line.at(x) for line in lines])).max()))
    return tuple(
        Line(raised * line.fixed + ROUNDING * abs(line.fixed), max(raised * line.per_token, 1.0)) for line in lines
    )


def _fit_relative(columns: np.ndarray, target: np.ndarray) -> tuple[float, float, float]:
    """Non-negative weights whose products come closest to ``target`` in relative terms.

    Least absolute errors by repeated least squares, weighted by the error of the round before: a row that a busy moment
    of the machine spoiled does not pull the others along.
    """
    from scipy.optimize import nnls  # slow to import, and needed where there is a profile alone

    scale = np.maximum(columns.max(axis=0), 1e-300)  # columns differ by ten orders of magnitude
    relative = columns / scale / target[:, None]
    trust = np.ones(len(target))
    for _ in range(ROUNDS):
        weights = nnls(relative * trust[:, None], trust)[0]
        errors = relative @ weights - 1.0
        trust = 1.0 / np.sqrt(np.maximum(np.abs(errors), NEGLIGIBLE))
    a, b, c = (weights / scale).tolist()
    return a, b, c


class FittedCost(ProfiledCost):
    """The fitted times and bytes of one profiled model on one kind of device, one fit per profiled scheme."""

    prices_slices = True
    """Whether schemes may cut micro-batches into slices."""

    def __init__(
        self, tables: Tables, *, model: ModelSpec, cluster: ClusterSpec, narrow_gradients: bool = False
    ) -> None:
        super().__init__(tables, model=model, cluster=cluster, narrow_gradients=narrow_gradients)
        self.fits = {scheme: fit(table) for scheme, table in self.tables.items()}
        self.error: CostError | None = CostError.of(
            [residual for fit in self.fits.values() for residual in fit.time_residuals]
        )
        self._fits = SchemeCache(self._find)

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds that each sequence adds: ``a l^2 + b l``."""
        fit = self._fits(scheme)
        length = np.asarray(lengths, dtype=np.float64)
        times_s = (fit.a_s * length + max(fit.b_s, LEAST_B_S)) * length
        return times_s if scheme.is_plain else times_s + self._offload.times_s(length, scheme)

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch before its first token: ``c``, and what reducing its gradients to shares adds."""
        reduction = self.reduction(scheme)
        reduced_s = 0.0 if reduction is None else reduction.least_s
        return self._fits(scheme).c_s + reduced_s + (0.0 if scheme.is_plain else self._offload.overhead_s(scheme))

    def launch_s(self, scheme: PipelineConfig) -> float:
        """Seconds in which a micro-batch's kernels are launched, as far as rows tell."""
        return self._fits(scheme).launch_s * scheme.slices

    def time_range_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> tuple[float, float]:
        """The range of seconds predicted for a micro-batch when any one row is left out."""
        ranges_s = [(share, self.fits[part].confidence(lengths)) for part, share in self._parts(scheme).items()]
        added_s = self._added_s(lengths, scheme)
        low_s, high_s = (sum(share * ends[end] for share, ends in ranges_s) for end in (0, 1))
        return low_s + added_s, high_s + added_s

    def _added_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of a micro-batch that offload and tiles add."""
        if scheme.is_plain:
            return 0.0
        return float(self._offload.times_s(np.asarray(lengths), scheme).sum()) + self._offload.overhead_s(scheme)

    def _bytes(self, tokens: np.ndarray, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        kept_bytes = [share * self.fits[part].kept_bytes(tokens) for part, share in self._parts(scheme).items()]
        on_device = 1.0 if scheme.is_plain else self._offload.kept_share(scheme)
        return max(self._state_bytes(scheme, num_devices)) + on_device * np.sum(kept_bytes, axis=0)

    def _find(self, scheme: PipelineConfig) -> Fit:
        """The fit of a scheme; of one whose layers have several methods, the mean of times over its layers."""
        parts = [(self.fits[part], share) for part, share in self._parts(scheme).items()]
        mean: dict[str, Any] = {name: fsum(share * getattr(fit, name) for fit, share in parts) for name in COEFFICIENTS}
        return replace(parts[0][0], **mean)
