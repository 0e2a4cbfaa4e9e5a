"""What `lengthwise demo` prints: how fast the default policy was beside the others, why, and what to do next."""

from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.session.console import stdout
from lengthwise.session.demo_settings import NUM_RANKS, shared_sequences

if TYPE_CHECKING:
    from lengthwise.report.run_summary import RunSummary

NOISE = 0.05
"""Differences of speed that runs this short do not tell from chance."""
NEXT = (
    "next, your lengths on your GPUs, simulated: lengthwise compare --lengths lengths.npy --model llama-13b --gpus 64"
)


def print_demo(summaries: "list[RunSummary]", page: Path, trace: Path) -> None:
    """Print the speeds of the policies, the reasons for that of ``auto``, and one next step."""
    from rich.table import Table

    from lengthwise.report.units import count, seconds, share

    title = f"\nthe same sequences under {len(summaries)} policies, {NUM_RANKS} ranks, one thread each"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("policy")
    for heading in ("tokens/s", "speed-up", "padding", "idle", "predicted", "measured", "error"):
        shown.add_column(heading, justify="right")
    for summary in summaries:
        ratio = (summary.tokens_per_s or 0.0) / (summaries[0].tokens_per_s or 1.0)
        shown.add_row(
            summary.policy, count(summary.tokens_per_s), f"{ratio:.2f}x", share(summary.padding_fraction),
            share(summary.idle_fraction), seconds(summary.predicted_step_time_s), seconds(summary.step_time_s),
            share(summary.prediction_error),
        )  # fmt: skip
    console = stdout()
    console.print(f"\n{headline(summaries)}", soft_wrap=True)
    console.print(shown)
    for sentence in reasons(summaries):
        console.print(sentence, soft_wrap=True)
    console.print(f"report: {page}\ntrace:  {trace} (opens in ui.perfetto.dev)\n{NEXT}", soft_wrap=True)


def headline(summaries: "list[RunSummary]") -> str:
    """Return the speed of ``auto`` over that of each other policy."""
    *others, auto = summaries
    ratios = " and ".join(f"{_ratio(auto, other):.2f}x {other.policy}" for other in others)
    return f"auto, the default policy: {auto.tokens_per_s or 0:,.0f} tokens/s, {ratios}"


def reasons(summaries: "list[RunSummary]") -> list[str]:
    """Return sentences that say what the measured speeds of ``auto`` and the others come from."""
    from lengthwise.report.units import share

    *others, auto = summaries
    num_shared, num_all = shared_sequences(Path(auto.path))
    sentences = [
        f"auto had both ranks compute {num_shared} of {num_all} sequences together; alone, the longest keep one idle."
        if num_shared
        else f"auto computed each of {num_all} sequences on one rank: by the measured costs, sharing none was faster."
    ]
    for other in others:
        ratio, about = _ratio(auto, other), f"{other.policy} had {share(other.padding_fraction)} padding and "
        about += f"{share(other.idle_fraction)} idle time, auto {share(auto.padding_fraction)} and "
        about += share(auto.idle_fraction)
        predicted = (auto.predicted_step_time_s or 0.0) / (other.predicted_step_time_s or 1.0)
        if abs(predicted - 1) < NOISE:
            about += "; their plans were predicted to take the same time, and any difference is this machine's drift"
        elif ratio < 1 - NOISE:
            about += (
                f"; auto lost to {other.policy} here: {NUM_RANKS} CPU ranks share cores and memory, so that plans win "
            )
            about += f"less, and its step times were predicted with an error of {share(auto.prediction_error)}"
        elif ratio < 1 + NOISE:
            about += "; runs this short do not tell their speeds from each other"
        sentences.append(f"{about}.")
    return sentences


def _ratio(summary: "RunSummary", other: "RunSummary") -> float:
    return (summary.tokens_per_s or 0.0) / (other.tokens_per_s or 1.0)
