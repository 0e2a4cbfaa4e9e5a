"""The page of simulated steps: one HTML file that needs nothing else, with the report's style and figures."""

from dataclasses import dataclass

from lengthwise.core.timeline import Timeline
from lengthwise.report.charts.bars import share_bar
from lengthwise.report.charts.gantt import MOST_ROWS, coarseness, gantt_chart
from lengthwise.report.charts.memory_plot import memory_chart
from lengthwise.report.pages.run_figures import Figure
from lengthwise.report.pages.run_text import KeyFigure
from lengthwise.report.pages.templates import render


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A step that is drawn."""

    title: str
    caption: str
    timeline: Timeline
    device_bytes: int | None = None
    """Memory of a device; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class SimulationPage:
    """What the page says, top to bottom."""

    title: str
    headline: str
    tiles: tuple[KeyFigure, ...]
    shares: tuple[tuple[str, str, float], ...]
    """What device time goes to: words, CSS class, share."""
    shown: tuple[ShownStep, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A row of text a step."""
    facts: tuple[tuple[str, str], ...] = ()
    """Where the numbers come from: terms and descriptions."""


def render_simulation(page: SimulationPage) -> str:
    """The page; all text is escaped."""
    shares = share_bar(page.shares, label="Where the device time goes")
    return render(
        "simulation.html.j2",
        page=page,
        time=Figure(title="Where the device time goes", chart=shares, missing="The steps take no time."),
        figures=[figure for step in page.shown for figure in _figures(step)],
    )


def _figures(step: ShownStep) -> tuple[Figure, Figure]:
    """Who does what, and what it takes in memory, on time axes that line up."""
    timeline = step.timeline
    caption = step.caption
    if timeline.num_ranks > MOST_ROWS:
        caption += f" Shown are {MOST_ROWS} of {timeline.num_ranks:,} ranks, from the busiest to the least busy."
    caption = f"{caption} {coarseness(timeline)}".rstrip()
    return (
        Figure(
            title=step.title,
            caption=caption,
            chart=gantt_chart(None, timeline, label=f"Simulated timeline of step {timeline.step} by rank"),
            missing="The step takes no time.",
        ),
        Figure(
            title=f"{step.title}: memory",
            caption="Weights, gradients and optimizer state, and what micro-batches keep from forward to backward.",
            chart=memory_chart(
                timeline, label=f"Simulated memory of step {timeline.step}", device_bytes=step.device_bytes
            ),
            missing="The step takes no time.",
        ),
    )
