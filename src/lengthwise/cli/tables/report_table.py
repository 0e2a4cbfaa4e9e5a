"""What `lengthwise report` prints: a column a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.session.console import stdout

if TYPE_CHECKING:
    from lengthwise.report.run_summary import RunSummary


def print_runs(summaries: list["RunSummary"], page: Path, trace: Path) -> None:
    """A table with a column a run."""
    from rich.table import Table

    from lengthwise.report.pages.runs_table import labels
    from lengthwise.report.units import count, number, seconds, share

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for label in labels(summaries) if len(summaries) > 1 else [summaries[0].name]:
        table.add_column(label, justify="right")
    for words, of in (
        ("policy", lambda s: s.policy),
        ("ranks", lambda s: s.ranks_in_words),
        ("steps", lambda s: count(s.num_steps)),
        ("tokens", lambda s: count(s.num_tokens)),
        ("tokens/s", lambda s: count(s.tokens_per_s)),
        ("idle", lambda s: share(s.idle_fraction)),
        ("padding", lambda s: share(s.padding_fraction)),
        ("waiting for data", lambda s: share(s.data_wait)),
        ("step time", lambda s: seconds(s.step_time_s)),
        ("predicted", lambda s: seconds(s.predicted_step_time_s)),
        ("prediction error", lambda s: share(s.prediction_error)),
        ("gap to the bound", lambda s: share(s.gap)),
        ("final loss", lambda s: number(s.final_loss)),
    ):
        table.add_row(words, *map(of, summaries))
    console = stdout()
    console.print(table)
    console.print(f"report  {page}\ntrace   {trace}", soft_wrap=True)
