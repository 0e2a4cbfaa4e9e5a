"""Monotone functions of one variable from measured points: a random forest between them, a polynomial beyond.

ParaDySe, equation 9. Three of its properties are changed on purpose. Plans need costs that grow: polynomials have no
negative coefficient, and what is predicted is never less than for a smaller argument. And a forest is constant between
the points it has seen, which profiles measure at doublings: it learns the measured values over those of a polynomial,
which is nearly constant there, instead of the values themselves.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyval

from lengthwise.core.errors import InputError, Setting, missing_package
from lengthwise.cost.profiled.relative_fit import akaike

NUM_TREES = 50
TREE_DEPTH = 10
"""Both as in ParaDySe, Implementation."""
MAX_ORDER = 3
MIN_POINTS = 3


def fit_polynomial(x: np.ndarray, y: np.ndarray, *, order: int) -> tuple[np.ndarray, float]:
    """Non-negative coefficients, lowest power first, of least relative squared error, and Akaike's criterion."""
    from scipy.optimize import nnls  # slow to import, and needed where there is a profile alone

    scale = x.max()
    columns = np.vander(x / scale, order + 1, increasing=True) / y[:, None]
    weights, _ = nnls(columns, np.ones(len(y)))
    return weights / scale ** np.arange(order + 1), akaike(columns @ weights - 1.0, order + 1)


def choose_polynomial(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The polynomial of order 1, 2 or 3 with the least AICc; the lower order where two are equal.

    Raises:
        InputError: fewer than ``MIN_POINTS`` points.
    """
    if len(x) < MIN_POINTS:
        raise InputError(f"a polynomial needs at least {MIN_POINTS} measured points, there are {len(x)}; profile more")
    fits = [fit_polynomial(x, y, order=order) for order in range(1, MAX_ORDER + 1)]
    return min(fits, key=lambda fit: fit[1])[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """``max(floors[k], ratios[k] base(x))`` for ``starts[k] < x <= starts[k + 1]``; beyond ``last``, the polynomial."""

    starts: np.ndarray
    ratios: np.ndarray
    base: np.ndarray
    """Coefficients of the polynomial that the forest corrects, lowest power first, none negative."""
    floors: np.ndarray
    """The largest value before each start, so that the curve never falls."""
    last: float
    """Largest argument measured."""
    polynomial: np.ndarray
    """Coefficients, lowest power first, none negative."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Values at ``x``, which is not negative."""
        inside = np.minimum(x, self.last)
        place = np.maximum(np.searchsorted(self.starts, inside, side="left") - 1, 0)
        values = np.maximum(self.floors[place], self.ratios[place] * polyval(inside, self.base))
        beyond = polyval(x, self.polynomial)
        return np.where(x > self.last, np.maximum(values, beyond), values)


def make_curve(forest: Any, *, num_powers: int, last: float, base: np.ndarray, polynomial: np.ndarray) -> Curve:
    """The curve of a forest that predicts y / base(x) from x, x^2, ... up to ``num_powers``.

    A forest is constant between the thresholds of its trees, so it is asked once in each gap and never again.
    """
    trees = [tree.tree_ for tree in forest.estimators_]
    cuts = [tree.threshold[tree.feature == power] ** (1 / (power + 1)) for tree in trees for power in range(num_powers)]
    inner = np.unique(np.concatenate(cuts))
    bounds = np.concatenate([[0.0], inner[(inner > 0) & (inner < last)], [last]])
    middles = (bounds[:-1] + bounds[1:]) / 2
    ratios = forest.predict(np.stack([middles**power for power in range(1, num_powers + 1)], axis=1))
    peaks = np.maximum.accumulate(ratios * polyval(bounds[1:], base))
    return Curve(
        starts=bounds[:-1],
        ratios=ratios,
        base=base,
        floors=np.concatenate([[0.0], peaks[:-1]]),
        last=last,
        polynomial=polynomial,
    )


def grow_forest(features: np.ndarray, target: np.ndarray) -> Any:
    """A random forest regressor of scikit-learn, always the same for the same rows.

    Raises:
        InputError: scikit-learn is not installed; the message names the extra.
    """
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        raise missing_package(f"{Setting.COST}=hybrid", "sklearn") from None
    forest = RandomForestRegressor(n_estimators=NUM_TREES, max_depth=TREE_DEPTH, random_state=0)
    return forest.fit(features, target)
