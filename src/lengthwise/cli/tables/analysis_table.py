"""What `lengthwise analyze` prints: quantiles of the metric, and how it follows the length."""

from typing import Any

from lengthwise.core.atomic_write import shell_word
from lengthwise.core.wording import counted
from lengthwise.session.console import emit_json, stderr, stdout


def print_analysis(outcome: dict[str, Any], *, json: bool) -> None:
    """Print the figures of an analysis, or its JSON document, and how to train with it."""
    if json:
        emit_json(outcome)
        return
    log, index, name = stderr(), outcome["index"], outcome["name"]
    if outcome["up_to_date"]:
        log.print(f"metric {name} of {index} is up to date, nothing to do", markup=False, soft_wrap=True)
    elif outcome["num_resumed_blocks"]:
        kept_text = f"{outcome['num_resumed_blocks']:,} of {counted(outcome['num_blocks'], 'block')} were kept"
        log.print(f"went on with an interrupted analysis: {kept_text}")
    middle = {share: outcome["quantiles"][share] for share in ("p5", "p25", "p50", "p75", "p95")}
    shown = {"min": outcome["min"], **middle, "max": outcome["max"], "mean": outcome["mean"]}
    console = stdout()
    console.print(
        f"{index}: {name} of {counted(outcome['num_sequences'], 'sequence')} ({outcome['metric']})",
        markup=False,
        soft_wrap=True,
    )
    console.print("  ".join(f"{word} {_number(value)}" for word, value in shown.items()), soft_wrap=True)
    console.print(_correlation(outcome["correlation_with_length"]), soft_wrap=True)
    settings = f"{shell_word(f'data.index={index}')} data.order=curriculum {shell_word(f'data.metric={name}')}"
    log.print(f"next: lengthwise train {settings}", markup=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _correlation(found: dict[str, float | None]) -> str:
    if found["spearman"] is None or found["pearson"] is None:
        return "correlation with length: none, as one of them is the same for all sequences"
    return f"correlation with length: {found['spearman']:+.2f} by rank, {found['pearson']:+.2f} linear"
