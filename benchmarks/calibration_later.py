"""Measured runs that presets were not fitted to: their errors, and the constants of Blackwell, which are from them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from calibration_rows import why_not_scored
from calibration_run import Columns, Constants, Row
from pages import Goal, Section, at_most, say
from scipy.optimize import minimize_scalar

from lengthwise.core.device_spec import DEVICES

OFF = 0.25
"""Relative error of a row that is explained."""
PRESET_OF = {"A100": "A100-80GB", "H100": "H100-80GB", "B200": "GB200-186GB"}
REASONS = {
    "alst": "an update in the host's memory, of seconds that its bandwidth does not explain: its steps take 17 s on 8 "
    "GPUs and 12 s on 32",
    "nanotron": "slower than its own runs of two ranks a sequence, 33,200 tokens/s, which send more; most so in small "
    "micro-batches, which the host has to keep up with",
    "easycontext": "measured in its first five steps, says its page; a ring of modules that are not fused",
    "torchao": "GPUs that may have less power than a data sheet's: of its B200s its page says so, and its authors' "
    "other H100s have 500 W",
}
"""Likely reasons of a system's rows."""


def shipped(chip: str) -> Constants:
    """The constants that the chip's presets have."""
    device = DEVICES[PRESET_OF[chip]]
    return Constants(
        matmul_share=device.matmul_share,
        activation_passes=device.activation_passes,
        attention_share=device.attention_share,
        exposed_share=device.overlap_slowdown,
    )


def summary(values: np.ndarray) -> tuple[str, str, str]:
    """Median, ninth decile and worst of absolute errors."""
    size = np.abs(values)
    return tuple(f"{100 * value:.0f} %" for value in (np.median(size), np.quantile(size, 0.9), size.max()))


def percent(error: float) -> str:
    """A relative error in words."""
    return f"{100 * error:+.0f} %"


def reason(row: Row, rows: Sequence[Row], error: float) -> str:
    """Why a row is likely to be off."""
    if why := why_not_scored(row, rows):
        return why
    return REASONS.get(row.system) or ("a framework slower than its peers" if error > 0 else "faster than its peers")


def errors_goals(which: str, errors: np.ndarray) -> tuple[Goal, ...]:
    """Goals for the median and the worst of ``errors``."""
    sizes = (("median", float(np.median(np.abs(errors))), 0.10), ("worst", float(np.abs(errors).max()), 0.25))
    return tuple(at_most(f"{which}: {name}", value, aim, "%") for name, value, aim in sizes)


def later_sections(rows: Sequence[Row]) -> list[Section]:
    """What presets of A100s and H100s, H200s included, say of rows of systems that they were not fitted to.

    ``rows``: all of the table.
    """
    later = [row for row in rows if not row.is_first and row.chip != "B200"]
    errors = np.array([row.error(shipped(row.chip)) for row in later])
    reasons = [why_not_scored(row, rows) for row in later]
    scored = np.array([not why for why in reasons])
    kinds = list(dict.fromkeys((row.system, row.device.name) for row in later))
    table = []
    for kind in kinds:
        mine = np.array([(row.system, row.device.name) == kind for row in later])
        runs = errors[mine & scored]
        table.append(
            (*kind, int(mine.sum()), len(runs), percent(np.median(runs)), percent(runs[np.abs(runs).argmax()]))
            if len(runs)
            else (*kind, int(mine.sum()), 0, "", "")
        )
    by_system = Section(
        title=f"Systems that presets have not seen: {len(later)} rows",
        text="Presets of A100s and H100s are fitted to the rows of the sections before; these came later, and nothing "
        "was fitted to them: each is of a system left out. Medians and worst are of training runs: without stages of "
        "nanotron, which was decided before errors had been seen; without runs that their own table contradicts, as in "
        "the sections before, or that took a token a tenth longer than between their table's shorter and longer "
        "sequences, which was decided after.",
        head=("system", "device", "rows", "training runs", "median", "worst"),
        rows=[*table, ("all", "", len(later), int(scored.sum()), *summary(errors[scored])[::2])],
        goals=(
            *errors_goals("systems that presets have not seen, all rows", errors),
            *errors_goals("systems that presets have not seen, training runs", errors[scored]),
        ),
    )
    off = Section(
        title="Systems that presets have not seen, off by more than a quarter",
        text="Under the shipped constants.",
        head=("system", "device", "ranks", "run", "error", "likely reason"),
        rows=[
            (row.system, row.device.name, row.num_devices, row.label, percent(error), reason(row, rows, error))
            for row, error in zip(later, errors)
            if abs(error) > OFF
        ],
    )
    return [say(by_system), say(off), _every("Systems that presets have not seen, all rows", later, errors)]


def _every(title: str, rows: Sequence[Row], errors: np.ndarray) -> Section:
    return Section(
        title=title,
        text="Tokens per second and device as published; the error of what the shipped constants predict; what the "
        "source leaves open.",
        head=("system", "device", "ranks", "run", "tokens/s", "error", "assumed", "source"),
        rows=[
            (
                row.system, row.device.name, row.num_devices, row.label, f"{row.tokens_per_s:,.0f}", percent(error),
                row.assumed, row.source,
            )
            for row, error in zip(rows, errors)
        ],
    )  # fmt: skip


def fit_products(rows: Sequence[Row]) -> Constants:
    """The H100's constants with the share of products of least mean squared logarithmic error over ``rows``."""
    columns, start = Columns.of(rows), shipped("H100")

    def missed(share: float) -> float:
        return float(np.square(np.log1p(columns.errors(replace(start, matmul_share=share)))).mean())

    share = minimize_scalar(missed, bounds=(0.3, 1.0), method="bounded").x
    return replace(start, matmul_share=float(share))


def blackwell_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that Blackwell's share is fitted to: of GPUs that are not limited in power."""
    return [row for row in rows if row.chip == "B200" and row.system != "torchao"]


def blackwell_sections(rows: Sequence[Row]) -> list[Section]:
    """What is fitted of GB200s, which B200s get too."""
    every = [row for row in rows if row.chip == "B200"]
    mine = blackwell_rows(rows)
    columns, models = Columns.of(mine), list(dict.fromkeys(row.model.num_params for row in mine))
    left_out = np.empty(len(mine))
    for model in models:
        places = [place for place, row in enumerate(mine) if row.model.num_params == model]
        others = fit_products([row for row in mine if row.model.num_params != model])
        left_out[places] = Columns.of([mine[place] for place in places]).errors(others)
    named = (("the H100's", shipped("H100")), ("fitted", fit_products(mine)), ("shipped", shipped("B200")))
    table = [(name, f"{one.matmul_share:.3f}", *summary(columns.errors(one))) for name, one in named]
    return [
        say(
            Section(
                title=f"Blackwell: {len(every)} rows",
                text="The share of the peak of products, fitted to the rows of GB200s, which are one system's; they "
                "tell nothing else: attention is a twentieth of them, so its share, the passes and what computation "
                "hides are the H100's. Torchao's one row of B200s, which are limited in power, is not fitted to.",
                head=("constants", "products", "median", "9 of 10", "worst"),
                rows=[*table, ("model left out", "", *summary(left_out))],
                goals=errors_goals("GB200, models left out", left_out),
            )
        ),
        _every("Blackwell, all rows", every, Columns.of(every).errors(shipped("B200"))),
    ]
