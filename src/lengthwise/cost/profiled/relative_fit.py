"""Fits to measured rows whose errors count as shares of what a row took, and a measure of which fit is the better."""

import numpy as np

ROUNDING = 1e-9
"""Relative errors below this are rounding: no fit is better for making them smaller."""


def non_negative(
    columns: np.ndarray, target: np.ndarray, unit: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Weights of the columns that come closest to ``target`` in parts of ``unit``, and how far off each row is."""
    from scipy.optimize import nnls  # slow to import, and needed where there is a profile alone

    scale = np.maximum(columns.max(axis=0), 1.0)  # columns differ by ten orders of magnitude
    relative = columns / scale / unit[:, None]
    weights = nnls(relative, target / unit)[0]
    return tuple(map(float, weights / scale)), tuple(map(float, relative @ weights - target / unit))


def akaike(relative_errors: np.ndarray, num_parameters: int) -> float:
    """Akaike's criterion of a fit, the less the better.

    AICc = n ln(mean squared relative error) + 2 k + 2 k (k + 1) / (n - k - 1) for n points and k parameters, the
    criterion for few points (Hurvich and Tsai 1989); infinite where they are too few for it.
    """
    count = len(relative_errors)
    spare = count - num_parameters - 1
    few = 2 * num_parameters * (num_parameters + 1) / spare if spare > 0 else np.inf
    mean_square = float(np.square(relative_errors).mean())
    return count * float(np.log(max(mean_square, ROUNDING**2))) + 2 * num_parameters + few
