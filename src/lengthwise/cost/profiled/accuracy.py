"""How far cost models are from a profile's rows that they have not seen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import dense_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.fitted import MIN_ROWS, fit_rows
from lengthwise.cost.profiled.hybrid import learn
from lengthwise.cost.profiled.monotone_curve import MIN_POINTS

NUM_PARTS = 5
"""Parts of a profile, each of which is predicted from the others."""
LEAST_LONE = 2 * MIN_POINTS
"""Rows with one sequence alone of which every four fifths hold enough for a polynomial."""


BEYOND = (2, 4)
"""Times the longest measured sequence at which predictions are compared without any one row."""


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """One model's seconds of a sequence beyond the longest measured, and their range without any one row."""

    name: str
    degree: int
    method: str
    num_tokens: int
    time_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class ModelErrors:
    """One model's error on each row, made without that row: predicted over measured time, minus one."""

    name: str
    errors: tuple[float, ...]
    degree: int = 1
    """Ranks that shared the micro-batches."""
    method: str = "dense"
    """By which method."""

    @property
    def median(self) -> float:
        """Median absolute error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return float(np.max(np.abs(self.errors)))


def can_cross_validate(table: ProfileTable) -> bool:
    """Whether a profile has the rows for :func:`cross_validation_errors`."""
    return all(sum(len(row.lengths) == 1 for row in rows) >= LEAST_LONE for _, _, rows in _schemes(table))


def cross_validation_errors(table: ProfileTable) -> tuple[ModelErrors, ...]:
    """Errors of the fitted and the hybrid model under each method, each fifth of the rows predicted from the others.

    Cost: five fits and five forests per method.

    Raises:
        InputError: too few rows, or scikit-learn is missing.
    """
    errors = []
    for degree, method, rows in _schemes(table):
        fitted, hybrid = np.empty(len(rows)), np.empty(len(rows))
        for part in range(NUM_PARTS):
            rest = replace(table, rows=tuple(row for place, row in enumerate(rows) if place % NUM_PARTS != part))
            line, learned = fit_rows(rest), learn(rest)
            for place in range(part, len(rows), NUM_PARTS):
                fitted[place] = line.time_s(rows[place].lengths) / rows[place].time_s - 1.0
                hybrid[place] = learned.pack_time_s(rows[place].lengths) / rows[place].time_s - 1.0
        for name, values in (("fitted", fitted), ("hybrid", hybrid)):
            errors.append(ModelErrors(name=name, errors=tuple(values.tolist()), degree=degree, method=method))
    return tuple(errors)


def extrapolations(table: ProfileTable) -> tuple[Extrapolation, ...]:
    """What the fitted and the hybrid model say of sequences ``BEYOND`` the longest measured, under each method.

    Raises:
        InputError: too few rows, or scikit-learn is missing.
    """
    answers = []
    for degree, method, rows in _schemes(table):
        of_method = replace(table, rows=rows)
        line, learned = fit_rows(of_method), learn(of_method)
        for times in BEYOND:
            num_tokens = times * max(max(row.lengths) for row in rows)
            pack = (num_tokens,)
            for name, time_s, (low_s, high_s) in (
                ("fitted", line.time_s(pack), line.confidence(pack)),
                ("hybrid", learned.pack_time_s(pack), learned.pack_range_s(pack)),
            ):
                answers.append(
                    Extrapolation(
                        name=name, degree=degree, method=method, num_tokens=num_tokens, time_s=time_s, low_s=low_s,
                        high_s=high_s,
                    )
                )  # fmt: skip
    return tuple(answers)


def _schemes(table: ProfileTable) -> Iterator[tuple[int, str, tuple[ProfileRow, ...]]]:
    """The rows under each degree and method."""
    yield 1, "dense", table.rows
    for part in table.shared:
        yield part.degree, part.method, part.rows


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
        "fitted": [fit_rows(rest).time_s(row.lengths) for row, rest in zip(table.rows, rests)],
        "hybrid": [learn(rest).pack_time_s(row.lengths) for row, rest in zip(table.rows, rests)],
    }
    return tuple(
        ModelErrors(name=name, errors=tuple(time_s / row.time_s - 1.0 for time_s, row in zip(times_s, table.rows)))
        for name, times_s in predicted.items()
    )
