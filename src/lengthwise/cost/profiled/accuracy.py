"""How far cost models are from a profile's rows that they have not seen."""

from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.fitted import MIN_ROWS, fit
from lengthwise.cost.profiled.hybrid import learn


@dataclass(frozen=True, kw_only=True)
class ModelErrors:
    """One model's error on each row, made without that row: predicted over measured time, minus one."""

    name: str
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median absolute error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return float(np.max(np.abs(self.errors)))


def leave_out_errors(table: ProfileTable, *, model: ModelSpec, cluster: ClusterSpec) -> tuple[ModelErrors, ...]:
    """Errors of the analytic, the fitted and the hybrid model, each row predicted from all the others.

    The analytic model learns from no row. Cost: one fit and two forests per row.

    Raises:
        InputError: fewer than four rows, or too few with one sequence alone; a profile of another model; scikit-learn
            is missing.
    """
    if len(table.rows) <= MIN_ROWS:
        raise InputError(
            f"the profile has {len(table.rows)} rows; leaving one out and fitting the rest needs at least "
            f"{MIN_ROWS + 1}"
        )
    if table.model_digest != model.digest:
        raise InputError(f"the profile is of model {table.model_name}, not of {model.name}; profile this model")
    scheme = dense_scheme(model.num_layers, recompute=table.recompute)
    analytic = AnalyticCost(model=model, cluster=cluster, dtype=table.dtype)
    rests = [replace(table, rows=table.rows[:place] + table.rows[place + 1 :]) for place in range(len(table.rows))]
    predicted = {
        "analytic": [analytic.time_s(row.lengths, scheme) for row in table.rows],
        "fitted": [fit(rest).time_s(row.lengths) for row, rest in zip(table.rows, rests)],
        "hybrid": [learn(rest).pack_time_s(row.lengths) for row, rest in zip(table.rows, rests)],
    }
    return tuple(
        ModelErrors(name=name, errors=tuple(time_s / row.time_s - 1.0 for time_s, row in zip(times_s, table.rows)))
        for name, times_s in predicted.items()
    )
