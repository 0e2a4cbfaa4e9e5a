"""What `lengthwise train` shows of its steps: a live table on a terminal, else one line a step."""

from collections import deque
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
"""Characters of a line, and of the table."""
DATA_SHEETS = "step times are predicted from data sheets, not measured: run lengthwise profile, set plan.profile"
_ROWS_SHOWN = 12
_MUCH_WAIT = 0.05
"""Share of a step that ranks may wait for data before a line names it."""
_PLAN_COLUMNS = 22


def step_line(row: "Row", *, num_steps: int, has_profile: bool) -> str:
    """Return the most important figures of a step, in at most ``MOST_COLUMNS`` characters.

    Args:
        row: the metrics of the step.
        num_steps: steps of the run.
        has_profile: whether predicted times come from measurements, so that they are worth showing.
    """
    predicted = _predicted(row) if has_profile else ""
    eta = timedelta(seconds=round((num_steps - row["step"] - 1) * row["perf/step_time_s"]))
    parts = [
        f"step {row['step'] + 1}/{num_steps}",
        f"loss {row['loss/avg']:.4f}",
        f"lr {_rate(row)}",
        f"{count(row['perf/tokens_per_s'])} tokens/s",
        f"{_duration(row['perf/step_time_s'])}" + (f" (predicted {predicted})" if predicted else ""),
        f"recompiles {row['compile/recompiles']}" if row["compile/recompiles"] else "",
        f"data wait {row['data/wait_frac']:.0%}" if row["data/wait_frac"] >= _MUCH_WAIT else "",
        f"idle {row['balance/idle_frac']:.0%}",
        f"peak {_peak(row)}",
        f"eta {eta}",
    ]
    line = ""
    for part in filter(None, parts):
        if len(line) + len(part) + 2 <= MOST_COLUMNS:
            line += f"  {part}" if line else part
    return line


def plan_words(row: "Row") -> str:
    """Return the policy and the pipelines of a step's plan, such as ``auto: 2 x <1,1> dense``."""
    return f"{row['plan/policy']}: {row['plan/strategy']}"


class StepLog:
    """Shows every ``log_every``-th step on stderr: a live table with a progress bar, or lines where it is a file."""

    def __init__(self, *, num_steps: int, log_every: int, has_profile: bool) -> None:
        self._num_steps, self._every, self._has_profile = num_steps, log_every, has_profile
        self._plan = ""
        self._rows: deque[Row] = deque(maxlen=_ROWS_SHOWN)
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

    def on_step(self, row: "Row") -> None:
        """Show the step and move the bar."""
        self._progress.update(self._task, completed=row["step"] + 1)
        if (row["step"] + 1) % self._every:
            return
        self._rows.append(row)
        if not self._console.is_interactive:
            if (plan := plan_words(row)) != self._plan:
                self._console.print(shortened(f"plan {plan}", MOST_COLUMNS), soft_wrap=True)
            line = step_line(row, num_steps=self._num_steps, has_profile=self._has_profile)
            self._console.print(line, soft_wrap=True)
            self._plan = plan
        self._update()

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
    """Return rich's table of steps, at most ``MOST_COLUMNS`` wide; a plan is named where it changes."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=None)
    headings = ["step", "loss", "lr", "tokens/s", "step time", "predicted", "idle", "peak"]
    if not has_profile:
        headings.remove("predicted")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True, max_width=_PLAN_COLUMNS)
    shown_plan = ""
    for row in rows:
        predicted = (_predicted(row) or "n/a",) if has_profile else ()
        plan = plan_words(row)
        table.add_row(
            f"{row['step'] + 1}/{num_steps}", f"{row['loss/avg']:.4f}", _rate(row), count(row["perf/tokens_per_s"]),
            _duration(row["perf/step_time_s"]), *predicted, f"{row['balance/idle_frac']:.0%}", _peak(row),
            "" if plan == shown_plan else shortened(plan, _PLAN_COLUMNS),
        )  # fmt: skip
        shown_plan = plan
    return table


def _rate(row: "Row") -> str:
    factor = f" x{row['lr_factor']:.2f}" if row["lr_factor"] != 1 else ""
    return f"{row['lr']:.1e}{factor}"


def _predicted(row: "Row") -> str:
    return "" if row["plan/pred_time_s"] is None else _duration(row["plan/pred_time_s"])


def _duration(time_s: float) -> str:
    return f"{significant(time_s, 3)} s" if time_s >= 1000 else seconds(time_s).replace("\u00a0", " ")


def _peak(row: "Row") -> str:
    return bytes_in_words(row["memory/max_reserved_gib"] * GIB)
