"""Costs against public measurements: constants fitted to them, and errors on systems that a fit has not seen.

    python benchmarks/calibration.py [--check]

Fits three constants of each chip (shares of the peak of products and of attention, and how much of moved weights
computation does not hide) and one of all chips (how often activations cross the memory) to all systems, then to all but
one, which it predicts. Rows that came later are predicted by presets. Peak memory is compared as published.
Some seconds on one core; no GPU.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, fields

import numpy as np
from calibration_later import OFF, blackwell_sections, later_sections, percent, reason, shipped, summary
from calibration_memory import memory_sections
from calibration_models import SOURCES
from calibration_rows import read_rows, why_not_scored
from calibration_run import Columns, Constants, Row
from pages import Section, at_most, check, say, write
from scipy.optimize import differential_evolution, least_squares

ATTENTION = {"A100": 0.615, "H100": 0.495}
"""Shares of the peak as published: FlashAttention-2 reaches 50 to 73 % of an A100's and 35 % of an H100's, where
FlashAttention-3 is up to twice as fast (geometric mean). They decide where no other system has long sequences."""
CHIPS = tuple(ATTENTION)
PRIOR = np.array([8e-4, 2e-3, 4e-4])
"""Weights of the squared logarithm by which shares of a chip leave ``start_of``: they decide what no row does."""
PASSES_PRIOR = 2e-4
"""The same of ``activation_passes``, which all chips share."""
UNCALIBRATED = Constants(matmul_share=0.7, activation_passes=0.0, attention_share=0.55, exposed_share=0.0)
"""What every device had before."""


def start_of(chip: str) -> Constants:
    """What constants are without a row that says otherwise."""
    return Constants(matmul_share=0.7, activation_passes=12.0, attention_share=ATTENTION[chip], exposed_share=0.5)


def fit(rows: Sequence[Row]) -> dict[str, Constants]:
    """The constants of each chip, of least mean squared logarithmic error over the rows of all.

    Systems weigh on each chip as the roots of their numbers of rows.
    """
    counts = Counter((row.system, row.chip) for row in rows)
    weights = np.array([counts[row.system, row.chip] ** -0.5 for row in rows])
    weights = np.sqrt(weights / weights.sum())
    of_chip = {chip: np.array([row.chip == chip for row in rows]) for chip in CHIPS}
    columns = {chip: Columns.of([row for row in rows if row.chip == chip]) for chip in CHIPS}
    starts = [start_of(chip) for chip in CHIPS]
    start = np.log([starts[0].activation_passes, *(share for one in starts for share in _shares(one))])
    prior = np.sqrt([PASSES_PRIOR, *np.tile(PRIOR, len(CHIPS))])

    def residuals(logs: np.ndarray) -> np.ndarray:
        misses = np.empty(len(rows))
        for chip, constants in _constants(logs).items():
            misses[of_chip[chip]] = np.log1p(columns[chip].errors(constants))
        return np.concatenate([weights * misses, prior * (logs - start)])

    most = np.array([np.inf, *np.zeros(len(start) - 1)])
    return _constants(least_squares(residuals, start, bounds=(-np.inf, most), xtol=1e-10, ftol=1e-10).x)


def _shares(constants: Constants) -> tuple[float, float, float]:
    return constants.matmul_share, constants.attention_share, constants.exposed_share


def _constants(logs: np.ndarray) -> dict[str, Constants]:
    passes, *shares = map(float, np.exp(logs))
    return {
        chip: Constants(activation_passes=passes, matmul_share=matmul, attention_share=attention, exposed_share=exposed)
        for chip, matmul, attention, exposed in zip(CHIPS, shares[::3], shares[1::3], shares[2::3])
    }


def best_worst(rows: Sequence[Row]) -> Constants:
    """The constants of one chip of the least worst error over ``rows``, which they are fitted to."""
    columns, names = Columns.of(rows), [field.name for field in fields(Constants)]
    result = differential_evolution(
        lambda values: float(np.abs(columns.errors(Constants(**dict(zip(names, values))))).max()),
        [(0.3, 1.0), (0.1, 60.0), (0.2, 1.0), (0.0, 1.0)], seed=0, popsize=12, maxiter=150,
    )  # fmt: skip
    return Constants(**dict(zip(names, map(float, result.x))))


def left_out_errors(rows: Sequence[Row]) -> np.ndarray:
    """Error of each row under the constants of all other systems."""
    left_out = np.empty(len(rows))
    for system in dict.fromkeys(row.system for row in rows):
        constants = fit([row for row in rows if row.system != system])
        for chip in CHIPS:
            mine = [place for place, row in enumerate(rows) if (row.system, row.chip) == (system, chip)]
            if mine:
                left_out[mine] = Columns.of([rows[place] for place in mine]).errors(constants[chip])
    return left_out


def chip_sections(rows: Sequence[Row], fitted: Constants, left_out: np.ndarray) -> list[Section]:
    """What is to be said of the chip of ``rows``."""
    chip, columns = rows[0].chip, Columns.of(rows)
    shipped_errors = columns.errors(shipped(chip))
    named = (
        ("before", UNCALIBRATED), ("fitted to all", fitted), ("shipped", shipped(chip)),
        ("least worst", best_worst(rows)),
    )  # fmt: skip
    table = [(name, *_figures(constants), *summary(columns.errors(constants))) for name, constants in named]
    table.append(("system left out", "", "", "", "", *summary(left_out)))
    reasons = [why_not_scored(row, rows) for row in rows]
    size = np.abs(left_out[[not why for why in reasons]])
    scopes = {"all rows": np.abs(left_out), "training runs": size}
    table.append((f"the same, {len(size)} training runs", "", "", "", "", *summary(size)))
    constants = Section(
        title=f"{chip}: {len(rows)} rows",
        text="Share of the peak of products; how often activations cross the memory, on all chips; share of attention; "
        "the share of moved weights that computation does not hide; errors over all rows. Least worst: fitted to these "
        "rows for the worst alone, as a search found it. All rows of other systems are fitted to. "
        "Training runs are all rows but those of the section after next, whose kinds were decided after errors had "
        "been seen.",
        head=("constants", "products", "passes", "attention", "exposed", "median", "9 of 10", "worst"),
        rows=table,
        goals=tuple(
            at_most(f"{chip}, systems left out, {which}: {name}", value, aim, "%")
            for which, sizes in scopes.items()
            for name, value, aim in (("median", float(np.median(sizes)), 0.10), ("worst", float(sizes.max()), 0.25))
        ),
    )
    systems = []
    for system in dict.fromkeys(row.system for row in rows):
        mine = np.array([row.system == system for row in rows])
        systems.append((system, int(mine.sum()), *summary(shipped_errors[mine])[::2], *summary(left_out[mine])[::2]))
    by_system = Section(
        title=f"{chip}, by system",
        text="Under the shipped constants, and under those of all other systems.",
        head=("system", "rows", "shipped: median", "worst", "left out: median", "worst"),
        rows=systems,
    )
    off = [
        (row.system, row.device.name, row.num_devices, row.label, percent(error), reason(row, rows, error))
        for row, error in zip(rows, left_out)
        if abs(error) > OFF
    ]
    apart = Section(
        title=f"{chip}, no training runs or disturbed ones",
        text="Rows that no law of training could fit: fits of parts; runs that the same table has at least a tenth "
        "faster on as many devices or more, none of them better, in micro-batches of no more tokens; and one sequence "
        "of more tokens than the same table gives a micro-batch of this model on these devices at any shorter length, "
        "though of half its length two would be as many. They are fitted to; errors are with their system left out.",
        head=("why", "system", "rows", "median", "9 of 10", "worst"),
        rows=[
            (*group, int(chosen.sum()), *summary(left_out[chosen]))
            for group in dict.fromkeys((why, row.system) for why, row in zip(reasons, rows) if why)
            for chosen in [np.array([(why, row.system) == group for why, row in zip(reasons, rows)])]
        ],
    )
    rows_off = Section(
        title=f"{chip}, off by more than a quarter",
        text="With their system left out of the fit.",
        head=("system", "device", "ranks", "run", "error", "likely reason"),
        rows=off,
    )
    every = Section(
        title=f"{chip}, all rows",
        text="Tokens per second and device as published; the error of what the shipped constants predict.",
        head=("system", "device", "ranks", "run", "tokens/s", "error", "source"),
        rows=[
            (
                row.system,
                row.device.name,
                row.num_devices,
                row.label,
                f"{row.tokens_per_s:,.0f}",
                percent(error),
                row.source,
            )
            for row, error in zip(rows, shipped_errors)
        ],
    )
    return [say(section) for section in (constants, by_system, rows_off, apart)] + [every]


def _figures(constants: Constants) -> tuple[str, str, str, str]:
    matmul, passes, attention, exposed = astuple(constants)
    return f"{matmul:.3f}", f"{passes:.1f}", f"{attention:.3f}", f"{exposed:.2f}"


def main() -> None:
    """Write ``calibration.md``, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page has other numbers")
    options = parser.parse_args()
    every = read_rows()
    rows = [row for row in every if row.is_first]
    fitted, left_out, sections = fit(rows), left_out_errors(rows), []
    for chip in CHIPS:
        mine = np.array([row.chip == chip for row in rows])
        sections += chip_sections([row for row in rows if row.chip == chip], fitted[chip], left_out[mine])
    sections += [*later_sections(every), *blackwell_sections(every), *memory_sections(read_rows(with_speed=False))]
    sections.append(Section(title="Sources", text="", head=("source", "address"), rows=list(SOURCES.items())))
    if options.check:
        check("calibration", sections)
        return
    write(
        "calibration",
        title="Costs against public measurements",
        first="Relative errors of predicted tokens per second and device. Positive: the prediction is too fast.",
        sections=sections,
    )


if __name__ == "__main__":
    main()
