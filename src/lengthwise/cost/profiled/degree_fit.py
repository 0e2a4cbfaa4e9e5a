"""Curves of seconds and lines of bytes through the rows of a layer profile that were measured at one degree."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.layer_profile import LayerRow
from lengthwise.cost.profiled.fitted import features
from lengthwise.cost.profiled.launch_bound import launch_bound_rows
from lengthwise.cost.profiled.relative_fit import non_negative


@dataclass(frozen=True, kw_only=True)
class QuadraticSeconds:
    """a l^2 + b l of every sequence, c of every micro-batch; none negative."""

    a_s: float
    b_s: float
    c_s: float
    residuals: tuple[float, ...]
    """Fitted less measured, as a part of what the whole row took."""
    launch_s: float
    """Seconds of the rows that launching took; 0: none is launch-bound."""

    def of_sequences(self, length: np.ndarray) -> np.ndarray:
        """Seconds that each sequence adds."""
        return (self.a_s * length + self.b_s) * length


@dataclass(frozen=True, kw_only=True)
class LinearBytes:
    """Bytes at no token, and bytes per token; no measured row has more."""

    fixed: float
    per_token: float
    residuals: tuple[float, ...]
    """Fitted over measured, minus one; 0 where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class DegreeFit:
    """Curves through the rows of one degree."""

    forward: QuadraticSeconds
    backward: QuadraticSeconds
    constant: QuadraticSeconds
    weights: QuadraticSeconds
    """Of gradients of weights that a split backward left for later, linear."""
    kept_layer: LinearBytes
    inputs: LinearBytes
    rest: LinearBytes
    """M_C: bytes beside the layers, in the loss."""
    alive: LinearBytes
    loss_backward: LinearBytes
    layer_backward: LinearBytes | None
    """Bytes beside the layers in the backward of one; None: not measured, M_C is there until the end."""
    embedding_backward: LinearBytes

    @property
    def time_residuals(self) -> tuple[float, ...]:
        """Fitted over measured seconds of each whole row, minus one."""
        parts = zip(self.forward.residuals, self.backward.residuals, self.constant.residuals)
        return tuple(map(sum, parts))


def fit_degree(rows: Sequence[LayerRow]) -> DegreeFit:
    """Curves with the least errors relative to the seconds of each row, and lines over its bytes.

    Two layers and the rest are what a row took; a curve's error is a part of that, for what is small beside all else
    may be wrong in itself. Curves of seconds leave out rows that are launch-bound (:func:`launch_bound_rows`).
    """
    columns = np.stack([features(row.lengths) for row in rows])
    row_s = np.array([2 * (row.forward_s + row.backward_s) + row.constant_s for row in rows])
    tokens, backward = columns[:, 1], [row.backward_bytes for row in rows]
    launched = launch_bound_rows(columns, row_s)
    timed = ~launched

    def seconds(of: list[float], *, weight: int, square: bool = True) -> QuadraticSeconds:
        used = columns[timed] if square else columns[timed] * (0.0, 1.0, 1.0)
        coefficients, residuals = non_negative(used, np.array(of)[timed], row_s[timed] / weight)
        return QuadraticSeconds(
            a_s=coefficients[0], b_s=coefficients[1], c_s=coefficients[2], residuals=residuals,
            launch_s=float(np.median(np.array(of)[launched])) if launched.any() else 0.0,
        )  # fmt: skip

    return DegreeFit(
        forward=seconds([row.forward_s for row in rows], weight=2),
        backward=seconds([row.backward_s for row in rows], weight=2),
        constant=seconds([row.constant_s for row in rows], weight=1, square=False),
        weights=seconds([row.weights_s for row in rows], weight=2, square=False),
        kept_layer=_line(tokens, [row.kept_bytes for row in rows]),
        inputs=_line(tokens, [row.input_bytes for row in rows]),
        rest=_line(tokens, [row.constant_bytes for row in rows]),
        alive=_line(tokens, [row.alive_bytes for row in rows]),
        loss_backward=_line(tokens, [row.loss_backward_bytes for row in rows]),
        embedding_backward=_line(tokens, [row.embedding_backward_bytes for row in rows]),
        layer_backward=_line(tokens, backward) if all(backward) else None,
    )


def _line(tokens: np.ndarray, measured: Sequence[int]) -> LinearBytes:
    """The line of least relative errors, raised until no row is above it: plans must fit."""
    values = np.array(measured, dtype=np.float64)
    unit = np.maximum(values, 1.0)
    (per_token, fixed), _ = non_negative(np.stack([tokens, np.ones_like(tokens)], axis=1), values, unit)
    fitted = fixed + per_token * tokens
    raised = max(1.0, float((values / np.maximum(fitted, 1e-9)).max())) if fitted.any() else 1.0
    residuals = np.where(values > 0, raised * fitted / unit - 1.0, 0.0)
    return LinearBytes(fixed=raised * fixed, per_token=raised * per_token, residuals=tuple(map(float, residuals)))
