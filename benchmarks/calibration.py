"""Costs against public measurements: constants fitted to them, and errors on systems that a fit has not seen.

    python benchmarks/calibration.py [--check]

Fits four constants of each chip (share of the peak of products and the hidden size at which they reach half of it,
share of attention with the kernels of today and with those of 2023) to all systems, then to all but one, which it
predicts. A minute on one core; no GPU.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from calibration_rows import RING_DEGREES, SOURCES, Constants, Row, errors, read_rows
from pages import Section, at_most, check, say, write
from scipy.optimize import minimize

from lengthwise.core.device_spec import DEVICES

START = Constants(matmul_share=0.65, matmul_half_size=300.0, attention_share=0.5, old_attention_share=0.3)
PRIOR = np.array([8e-3, 2e-3, 8e-3, 2e-3])
"""Weights of the squared logarithm by which constants leave ``START``: they decide what no row does."""
OFFSETS = ([0.0, 0.0, 0.0, 0.0], [0.1, 1.0, 0.2, -0.5], [-0.2, -1.0, -0.2, 0.3])
UNCALIBRATED = Constants(matmul_share=0.7, matmul_half_size=0.0, attention_share=0.55, old_attention_share=0.55)
"""What every device had before."""
OFF = 0.25
"""Relative error of a row that is explained."""


def fit(rows: Sequence[Row]) -> Constants:
    """The constants of least mean absolute logarithmic error; systems weigh as the roots of their numbers of rows."""
    counts = Counter(row.system for row in rows)
    weights = np.array([counts[row.system] ** -0.5 for row in rows])
    start = np.log(astuple(START))

    def loss(logs: np.ndarray) -> float:
        misses = np.abs(np.log1p(errors(list(rows), Constants(**_named(np.exp(logs))))))
        return float((weights * misses).sum() / weights.sum() + (PRIOR * (logs - start) ** 2).sum())

    options = {"maxiter": 1500, "xatol": 1e-3, "fatol": 1e-5}
    minima = [minimize(loss, start + np.array(offset), method="Nelder-Mead", options=options) for offset in OFFSETS]
    return Constants(**_named(np.exp(min(minima, key=lambda result: result.fun).x)))


def _named(values: np.ndarray) -> dict[str, float]:
    names = ("matmul_share", "matmul_half_size", "attention_share", "old_attention_share")
    return dict(zip(names, map(float, values)))


def shipped(chip: str, fitted: Constants) -> Constants:
    """The constants that the chip's presets have."""
    device = DEVICES[f"{chip}-80GB"]
    return Constants(
        matmul_share=device.matmul_share,
        matmul_half_size=device.matmul_half_size,
        attention_share=device.attention_share,
        old_attention_share=fitted.old_attention_share,
    )


def left_out_errors(rows: Sequence[Row]) -> np.ndarray:
    """Error of each row under the constants of all other systems, which know nothing of the system's kernels."""
    found = np.empty(len(rows))
    for system in dict.fromkeys(row.system for row in rows):
        constants = fit([row for row in rows if row.system != system])
        for place, row in enumerate(rows):
            if row.system == system:
                found[place] = row.error(constants, knows_kernel=False)
    return found


def reason(row: Row, error: float) -> str:
    """Why a row is likely to be off."""
    if row.system == "torchtitan" and row.chip == "H100":
        return "500 W and HBM2e; the slower row of each pair is not compiled"
    if row.system in RING_DEGREES:
        return "no other system has long sequences on this chip with kernels of today: nothing else says what they take"
    if row.is_old and row.num_devices > 8:
        return "weights gathered between nodes: congestion, and a micro-batch too small to hide it"
    return "micro-batches of few tokens, or a framework slower than its peers" if error > 0 else "faster than its peers"


def summary(values: np.ndarray) -> tuple[str, str, str]:
    """Median, ninth decile and worst of absolute errors."""
    size = np.abs(values)
    return tuple(f"{100 * value:.0f} %" for value in (np.median(size), np.quantile(size, 0.9), size.max()))


def chip_sections(chip: str, rows: Sequence[Row]) -> list[Section]:
    """What is to be said of a chip."""
    fitted, left_out = fit(rows), left_out_errors(rows)
    preset = shipped(chip, fitted)
    shipped_errors = errors(list(rows), preset)
    named = (("before", UNCALIBRATED), ("fitted to all", fitted), ("shipped", preset))
    table = [(name, *_figures(constants), *summary(errors(list(rows), constants))) for name, constants in named]
    table.append(("system left out", "", "", "", "", *summary(left_out)))
    is_scored = np.array([not row.not_modelled for row in rows])
    scopes = {"all rows": np.abs(left_out), "modelled rows": np.abs(left_out[is_scored])}
    size = scopes["modelled rows"]
    table.append((f"the same, {len(size)} modelled rows", "", "", "", "", *summary(size)))
    constants = Section(
        title=f"{chip}: {len(rows)} rows",
        text="Shares of the peak; the hidden size at which products reach half of theirs; errors over all rows. All "
        "rows of other systems are fitted to. Which rows are not modelled was decided after errors had been seen; they "
        "are listed below.",
        head=("constants", "products", "half at size", "attention", "of 2023", "median", "9 of 10", "worst"),
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
        (row.system, row.device.name, row.num_devices, row.label, f"{100 * error:+.0f} %", reason(row, error))
        for row, error in zip(rows, left_out)
        if abs(error) > OFF and not row.not_modelled
    ]
    apart = Section(
        title=f"{chip}, not modelled",
        text="Rows that measure what costs do not describe. They are fitted to, and their errors are with their "
        "system left out.",
        head=("why", "system", "rows", "median", "9 of 10", "worst"),
        rows=[
            (*group, int(chosen.sum()), *summary(left_out[chosen]))
            for group in dict.fromkeys((row.not_modelled, row.system) for row in rows if row.not_modelled)
            for chosen in [np.array([(row.not_modelled, row.system) == group for row in rows])]
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
    share, size, attention, old = astuple(constants)
    return f"{share:.3f}", f"{size:,.0f}", f"{attention:.3f}", f"{old:.3f}"


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
