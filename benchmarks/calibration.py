"""Costs against public measurements: constants fitted to them, and errors on systems that a fit has not seen.

    python benchmarks/calibration.py [--check]

Fits four constants of each chip (share of the peak of products and the hidden size at which they reach half of it,
share of attention, and how much of moved weights computation does not hide) to all systems, then to all but one, which
it predicts. Some seconds on one core; no GPU.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from itertools import product

import numpy as np
from calibration_rows import SOURCES, Columns, Constants, Row, read_rows, why_not_scored
from pages import Section, at_most, check, say, write
from scipy.optimize import OptimizeResult, minimize

from lengthwise.core.device_spec import DEVICES

ATTENTION = {"A100": 0.615, "H100": 0.495}
"""Shares of the peak as published: FlashAttention-2 reaches 50 to 73 % of an A100's and 35 % of an H100's, where
FlashAttention-3 is up to twice as fast (geometric mean). They decide where no other system has long sequences."""
PRIOR = np.array([8e-3, 2e-3, 2e-2, 4e-3])
"""Weights of the squared logarithm by which constants leave ``start_of``: they decide what no row does."""
OFFSETS = tuple(product((-0.1, 0.15), (0.0, 1.2), (-0.2, 0.1), (-0.6, 0.5)))
"""Where searches begin, as logarithms: the loss has long valleys, since few systems have models of many widths."""
UNCALIBRATED = Constants(matmul_share=0.7, matmul_half_size=0.0, attention_share=0.55, exposed_share=0.0)
"""What every device had before."""
OFF = 0.25
"""Relative error of a row that is explained."""


def start_of(chip: str) -> Constants:
    """What constants are without a row that says otherwise."""
    return Constants(matmul_share=0.65, matmul_half_size=300.0, attention_share=ATTENTION[chip], exposed_share=0.5)


def fit(rows: Sequence[Row]) -> Constants:
    """The constants of least mean absolute logarithmic error; systems weigh as the roots of their numbers of rows."""
    counts = Counter(row.system for row in rows)
    weights = np.array([counts[row.system] ** -0.5 for row in rows])
    start, columns = np.log(astuple(start_of(rows[0].chip))), Columns.of(rows)

    def loss(logs: np.ndarray) -> float:
        misses = np.abs(np.log1p(columns.errors(_constants(logs))))
        return float((weights * misses).sum() / weights.sum() + (PRIOR * (logs - start) ** 2).sum())

    def search(begin: np.ndarray, tolerance: float) -> OptimizeResult:
        options = {"maxiter": 4000, "xatol": tolerance, "fatol": 1e-3 * tolerance}
        return minimize(loss, begin, method="Nelder-Mead", options=options)

    best = min((search(start + np.array(offset), 1e-3) for offset in OFFSETS), key=lambda result: result.fun)
    return _constants(search(best.x, 1e-4).x)


def _constants(logs: np.ndarray) -> Constants:
    share, size, attention, exposed = map(float, np.exp(logs))
    return Constants(
        matmul_share=share, matmul_half_size=size, attention_share=attention, exposed_share=min(1.0, exposed)
    )


def shipped(chip: str, fitted: Constants) -> Constants:
    """The constants that the chip's presets have, and the fitted share of movement that is exposed."""
    device = DEVICES[f"{chip}-80GB"]
    return Constants(
        matmul_share=device.matmul_share,
        matmul_half_size=device.matmul_half_size,
        attention_share=device.attention_share,
        exposed_share=fitted.exposed_share,
    )


def left_out_errors(rows: Sequence[Row]) -> np.ndarray:
    """Error of each row under the constants of all other systems."""
    left_out = np.empty(len(rows))
    columns = Columns.of(rows)
    for system in dict.fromkeys(row.system for row in rows):
        mine = np.array([row.system == system for row in rows])
        left_out[mine] = columns.errors(fit([row for row in rows if row.system != system]))[mine]
    return left_out


def reason(row: Row, rows: Sequence[Row], error: float) -> str:
    """Why a row is likely to be off."""
    if why := why_not_scored(row, rows):
        return why
    if error > 0:
        return "a micro-batch that just fits in memory, or a framework slower than its peers"
    return "faster than its peers"


def summary(values: np.ndarray) -> tuple[str, str, str]:
    """Median, ninth decile and worst of absolute errors."""
    size = np.abs(values)
    return tuple(f"{100 * value:.0f} %" for value in (np.median(size), np.quantile(size, 0.9), size.max()))


def chip_sections(chip: str, rows: Sequence[Row]) -> list[Section]:
    """What is to be said of a chip."""
    fitted, left_out, columns = fit(rows), left_out_errors(rows), Columns.of(rows)
    preset = shipped(chip, fitted)
    shipped_errors = columns.errors(preset)
    named = (("before", UNCALIBRATED), ("fitted to all", fitted), ("shipped", preset))
    table = [(name, *_figures(constants), *summary(columns.errors(constants))) for name, constants in named]
    table.append(("system left out", "", "", "", "", *summary(left_out)))
    reasons = [why_not_scored(row, rows) for row in rows]
    size = np.abs(left_out[[not why for why in reasons]])
    scopes = {"all rows": np.abs(left_out), "training runs": size}
    table.append((f"the same, {len(size)} training runs", "", "", "", "", *summary(size)))
    constants = Section(
        title=f"{chip}: {len(rows)} rows",
        text="Shares of the peak; the hidden size at which products reach half of theirs; the share of moved weights "
        "that computation does not hide; errors over all rows. All rows of other systems are fitted to. Training runs "
        "are all rows but those of the section after next, whose kinds were decided after errors had been seen.",
        head=("constants", "products", "half at size", "attention", "exposed", "median", "9 of 10", "worst"),
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
        (row.system, row.device.name, row.num_devices, row.label, f"{100 * error:+.0f} %", reason(row, rows, error))
        for row, error in zip(rows, left_out)
        if abs(error) > OFF
    ]
    apart = Section(
        title=f"{chip}, no training runs or disturbed ones",
        text="Rows that no law of training could fit: fits of parts, and runs that the same table has at least a tenth "
        "faster on as many devices or more, none of them better, in micro-batches of no more tokens. They are fitted "
        "to; errors are with their system left out.",
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
                f"{100 * error:+.0f} %",
                row.source,
            )
            for row, error in zip(rows, shipped_errors)
        ],
    )
    return [say(section) for section in (constants, by_system, rows_off, apart)] + [every]


def _figures(constants: Constants) -> tuple[str, str, str, str]:
    share, size, attention, exposed = astuple(constants)
    return f"{share:.3f}", f"{size:,.0f}", f"{attention:.3f}", f"{exposed:.2f}"


def main() -> None:
    """Write ``calibration.md``, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page has other numbers")
    options = parser.parse_args()
    rows = read_rows()
    sections = [
        section
        for chip in ("A100", "H100")
        for section in chip_sections(chip, [row for row in rows if row.chip == chip])
    ]
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
