"""Correlations of two numbers per sequence or step."""

import numpy as np


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """[n], [n] -> linear correlation, in [-1, 1]; None where one of them never changes or cannot be squared."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt(x @ x) * np.sqrt(y @ y))
    return float(np.clip((x @ y) / scale, -1.0, 1.0)) if 0 < scale < np.inf else None


def ranks(x: np.ndarray) -> np.ndarray:
    """[n] -> [n] float64 places in ascending order from 0; equal numbers share the mean of theirs."""
    _, group, counts = np.unique(x, return_inverse=True, return_counts=True)
    places: np.ndarray = (np.cumsum(counts) - (counts + 1) / 2)[group]
    return places
