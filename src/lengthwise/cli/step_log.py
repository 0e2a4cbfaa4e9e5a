"""What `lengthwise train` shows of its steps: a live table on a terminal, else one line a step."""

import re
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lengthwise.core.wording import GIB, bytes_in_words
from lengthwise.report.charts.svg import shortened
from lengthwise.report.units import count, seconds, significant
from lengthwise.session.console import progress

if TYPE_CHECKING:
    from rich.console import Group

    from lengthwise.runtime.train.step_metrics import Row

MOST_COLUMNS = 100
"""Characters of a line, and of the table; numbers of very large runs widen it to 120."""
DATA_SHEETS = "plans follow data sheets; lengthwise profile CONFIG measures instead, for plan.profile=profile.json"
_ROWS_SHOWN = 12
_MUCH_WAIT = 0.05
"""Share of a step that ranks may wait for data before a line names it."""
_PLAN_COLUMNS, _FEWEST_PLAN_COLUMNS = 22, 9
_HEADINGS = ("step", "loss", "val loss", "lr", "tokens/s", "step time", "predicted", "idle", "peak")
_PIPELINES = re.compile(r"(\d+) x <(\d+),(\d+)>")


def step_line(row: "Row", *, num_steps: int, validation_s: float = 0.0) -> str:
    """Return the most important figures of a step of ``num_steps``, in at most ``MOST_COLUMNS`` characters.

    ``validation_s``: seconds that validation adds to the average step.
    """
    eta = timedelta(seconds=round((num_steps - row["step"] - 1) * (row["perf/step_time_s"] + validation_s)))
    parts = [
        f"step {row['step'] + 1}/{num_steps}",
        f"loss {_loss(row['loss/avg'])}",
        f"lr {_rate(row)}",
        f"{count(row['perf/tokens_per_s'])} tokens/s",
        shortened(short_strategy(row["plan/strategy"]), _PLAN_COLUMNS),
        f"skipped {row['skipped_steps']}" if row.get("skipped_steps") else "",
        f"recompiles {row['compile/recompiles']}" if row["compile/recompiles"] else "",
        f"data wait {row['data/wait_frac']:.0%}" if row["data/wait_frac"] >= _MUCH_WAIT else "",
        f"peak {_peak(row)}",
        f"eta {eta}",
    ]
    line = ""
    for part in filter(None, parts):
        if len(line) + len(part) + 2 <= MOST_COLUMNS:
            line += f"  {part}" if line else part
    return line


def validation_line(row: "Row") -> str:
    """Return the validation loss of a step, and whether it is the lowest so far."""
    is_best = row["val/best_step"] == row["step"] + 1
    best = "the lowest so far" if is_best else f"the lowest was after step {row['val/best_step']}"
    return f"validation after step {row['step'] + 1}: loss {_loss(row['val/loss'])}, {best}"


def short_strategy(strategy: str) -> str:
    """Return the pipelines of a plan by degree and stages: ``6x<1> + 1x<2>``, ``1x<4,2>`` with two stages."""
    phases = []
    for phase in strategy.split(", then "):
        counts: Counter[str] = Counter()
        for number, degree, stages in _PIPELINES.findall(phase):
            counts[f"<{degree}>" if stages == "1" else f"<{degree},{stages}>"] += int(number)
        phases.append(" + ".join(f"{number}x{name}" for name, number in counts.items()))
    return ", then ".join(phases)


def plan_words(row: "Row") -> str:
    """Return the policy and the pipelines of a step's plan, such as ``auto 6x<1> + 1x<2>``."""
    return f"{row['plan/policy']} {short_strategy(row['plan/strategy'])}"


class StepLog:
    """Shows every ``log_every``-th step on stderr: a live table with a progress bar, or lines where it is a file."""

    def __init__(self, *, num_steps: int, log_every: int, has_profile: bool) -> None:
        self._num_steps, self._every, self._has_profile = num_steps, log_every, has_profile
        self._rows: deque[Row] = deque(maxlen=_ROWS_SHOWN)
        self._shown_step = -1
        self._validated_step: int | None = None
        self._validation_s = 0.0
        self._progress = progress()
        self._console = self._progress.console
        self._task = self._progress.add_task("train", total=num_steps)
        if not has_profile:
            self._console.print(DATA_SHEETS, soft_wrap=True)
        self._update: Callable[[], None] = lambda: None
        self._stop: Callable[[], None] = lambda: None
        if self._console.is_interactive:
            from rich.live import Live

            live = Live(get_renderable=self._screen, console=self._console, refresh_per_second=4)
            live.start()
            self._update, self._stop = live.refresh, live.stop

    def on_validation(self, row: "Row") -> None:
        """Show a step whose validation begins, which may take long."""
        self._progress.update(self._task, completed=row["step"] + 1, description="validate")
        if not self._console.is_interactive:
            self._print_step(row)
            self._console.print(f"validating after step {row['step'] + 1}", soft_wrap=True)
        self._update()

    def on_step(self, row: "Row") -> None:
        """Show the step and move the bar."""
        self._progress.update(self._task, completed=row["step"] + 1)
        if self._validated_step is None:  # or one less than the first
            self._validated_step = row["step"] - 1
        if is_validated := "val/loss" in row:
            self._validation_s = row["val/time_s"] / max(1, row["step"] - self._validated_step)
            self._validated_step = row["step"]
            self._progress.update(self._task, description="train")
        if (row["step"] + 1) % self._every and not is_validated:
            return
        self._rows.append(row)
        if not self._console.is_interactive:
            self._print_step(row)
            if is_validated:
                self._console.print(validation_line(row), soft_wrap=True)
        self._update()

    def _print_step(self, row: "Row") -> None:
        """Print the line of a step, unless it was printed before its validation."""
        if row["step"] != self._shown_step:
            line = step_line(row, num_steps=self._num_steps, validation_s=self._validation_s)
            self._console.print(line, soft_wrap=True)
        self._shown_step = row["step"]

    def on_compiled(self, done: int, total: int) -> None:
        """Show in the bar how many of the sizes are compiled."""
        self._progress.update(self._task, description="train" if done == total else f"compile {done}/{total} sizes")

    def close(self) -> None:
        """Leave the table as it is and take the bar away."""
        self._progress.remove_task(self._task)
        self._update()
        self._stop()

    def _screen(self) -> "Group":
        from rich.console import Group

        table = step_table(list(self._rows), num_steps=self._num_steps, has_profile=self._has_profile)
        return Group(*([table] if self._rows else []), self._progress.get_renderable())


def step_table(rows: "list[Row]", *, num_steps: int, has_profile: bool) -> Any:
    """Return rich's table of steps; a plan is named where it changes, as far as there is room in ``MOST_COLUMNS``."""
    from rich.table import Table

    is_validated = any("val/loss" in row for row in rows)
    cells = [_cells(row, num_steps=num_steps, has_profile=has_profile, is_validated=is_validated) for row in rows]
    headings = [
        name for name in _HEADINGS if (has_profile or name != "predicted") and (is_validated or name != "val loss")
    ]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    room = MOST_COLUMNS - sum(widths) - 2 * len(widths)
    plan_columns = max(_FEWEST_PLAN_COLUMNS, min(_PLAN_COLUMNS, room))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=None)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True, max_width=plan_columns)
    shown_plan = ""
    for row, of_row in zip(rows, cells):
        plan = plan_words(row)
        table.add_row(*of_row, "" if plan == shown_plan else shortened(plan, plan_columns))
        shown_plan = plan
    return table


def _cells(row: "Row", *, num_steps: int, has_profile: bool, is_validated: bool) -> list[str]:
    """The cells of a step, its plan aside."""
    cells = [f"{row['step'] + 1}/{num_steps}", _loss(row["loss/avg"])]
    if is_validated:
        cells.append(_loss(row["val/loss"]) if "val/loss" in row else "")
    cells += [_rate(row), count(row["perf/tokens_per_s"]), _duration(row["perf/step_time_s"])]
    if has_profile:
        cells.append(_predicted(row) or "n/a")
    return [*cells, f"{row['balance/idle_frac']:.0%}", _peak(row)]


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.4g}"


def _rate(row: "Row") -> str:
    factor = f" x{row['lr_factor']:.2f}" if row["lr_factor"] != 1 else ""
    return f"{row['lr']:.1e}{factor}"


def _predicted(row: "Row") -> str:
    return "" if row["plan/pred_time_s"] is None else _duration(row["plan/pred_time_s"])


def _duration(time_s: float) -> str:
    return f"{significant(time_s, 3)} s" if time_s >= 1000 else seconds(time_s).replace("\u00a0", " ")


def _peak(row: "Row") -> str:
    return bytes_in_words(row["memory/max_reserved_gib"] * GIB)
