"""What `lengthwise stats` prints: how lengths spread and what they cost, or what an order does to sampling."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.core.wording import counted
from lengthwise.data.length_stats import LengthLimitEffect, LengthStats
from lengthwise.data.sampling_bias import SamplingReport
from lengthwise.report.pages.run_text import order_words
from lengthwise.session.console import stdout

if TYPE_CHECKING:
    from rich.table import Table


def print_sampling(source: Path, safety: SamplingReport) -> None:
    """Print what an order does to sampling."""
    from rich.table import Table

    console = stdout()
    words = order_words(safety.order)
    console.print(f"{source}: first epoch, {counted(safety.num_steps, 'step')}, {words}", soft_wrap=True)
    sums = Table("of a step", "mean", "std / mean", "least", "most", box=None, pad_edge=False)
    for name, spread in (("tokens", safety.tokens), ("sequences", safety.sequences)):
        sums.add_row(
            name,
            f"{spread.mean:,.{1 if spread.mean < 100 else 0}f}",
            _percent(spread.coefficient),
            f"{spread.least:,}",
            f"{spread.most:,}",
        )
    trends = Table("with the step", "Pearson", "Spearman", "between steps", "drift", box=None, pad_edge=False)
    for trend in safety.trends:
        drift = f"{trend.largest_drift:.2f}"
        trends.add_row(
            trend.name, f"{trend.pearson:.2f}", f"{trend.spearman:.2f}", _percent(trend.between_steps), drift
        )
    tenths = Table("tenth", "tokens seen", "tokens a step", box=None, pad_edge=False)
    for trend in safety.trends:
        tenths.add_column(f"{trend.name}: correlation")
        tenths.add_column("drift")
    for number, seen in enumerate(safety.coverage_by_tenth):
        row = [str(number + 1), _percent(seen), f"{safety.tokens_by_tenth[number]:,.0f}"]
        for trend in safety.trends:
            correlation = trend.pearson_by_tenth[number]
            row += ["-" if correlation is None else f"{correlation:.2f}", f"{trend.drift_by_tenth[number]:.2f}"]
        tenths.add_row(*row)
    _print(sums, trends, tenths)
    console.print(f"each sequence once: {'yes' if safety.each_once else 'no'}")
    for warning in safety.warnings or ("steps are samples of the corpus, as far as these numbers tell",):
        console.print(f"* {warning}", soft_wrap=True)


def print_stats(source: Path, stats: LengthStats, *, of_mixture: bool = False) -> None:
    """Print how lengths spread, and what they cost; ``of_mixture``: in its first epoch."""
    from rich.table import Table

    console = stdout()
    where = " in the first epoch of the mixture" if of_mixture else ""
    sizes = f"{counted(stats.num_sequences, 'sequence')}, {counted(stats.num_tokens, 'token')}"
    console.print(f"{source}: {sizes}{where}", soft_wrap=True)
    console.print(
        f"length: min {stats.min_length:,}  mean {stats.mean_length:,.0f}  median {stats.median_length:,.0f}  "
        f"max {stats.max_length:,}",
        soft_wrap=True,
    )
    console.print("  ".join(f"{name} {value:,.0f}" for name, value in stats.percentiles.items()), soft_wrap=True)

    if stats.num_loss_tokens is not None:
        share, without = _percent(stats.num_loss_tokens / stats.num_tokens), stats.sequences_without_loss
        words = f"loss: {stats.num_loss_tokens:,} of {counted(stats.num_tokens, 'token')} have one ({share})"
        console.print(words + (f"; no such token in {counted(without, 'sequence')}" if without else ""), soft_wrap=True)

    histogram = Table(
        "length", "sequences", "share", "of tokens", title="Lengths (K = 1024 tokens)", title_justify="left"
    )
    for bin in (bin for bin in stats.histogram if bin.num_sequences):
        label = f">= {_kilo(bin.low)}" if bin.high is None else f"{_kilo(bin.low)} - {_kilo(bin.high)}"
        label = f"< {_kilo(bin.high)}" if not bin.low and bin.high else label
        share, tokens = _percent(bin.share_of_sequences), _percent(bin.share_of_tokens)
        histogram.add_row(label, f"{bin.num_sequences:,}", share, tokens)

    padding = Table(
        "batch size", "random order", "sorted", title="Padding, share of computed tokens", title_justify="left"
    )
    for row in (row for row in stats.padding if row.batch_size <= stats.num_sequences):
        padding.add_row(str(row.batch_size), _percent(row.random_order), _percent(row.sorted_order))

    cuts = Table(
        "max_length",
        "sequences over",
        "share",
        "drop loses",
        "truncate loses",
        title="What a limit would cut",
        title_justify="left",
    )
    for cut in _up_to_first_that_cuts_nothing(stats.cuts):
        lost = _percent(cut.share_of_tokens_in_them), _percent(cut.share_of_tokens_beyond)
        cuts.add_row(f"{cut.max_length:,}", f"{cut.sequences_over:,}", _percent(cut.share_of_sequences), *lost)

    _print(histogram, padding, cuts)
    console.print(
        f"attention: packs of {counted(stats.max_length, 'token')} dealt to "
        f"{counted(stats.imbalance_ranks, 'rank')} leave the busiest with {stats.attention_imbalance:.2f} times the "
        "mean work",
        soft_wrap=True,
    )


def _up_to_first_that_cuts_nothing(cuts: Sequence[LengthLimitEffect]) -> list[LengthLimitEffect]:
    """The limits that cut something, and the lowest that cuts nothing, for higher ones cut nothing either."""
    harmless = min((cut.max_length for cut in cuts if not cut.sequences_over), default=None)
    return [cut for cut in cuts if cut.sequences_over or cut.max_length == harmless]


def _print(*tables: "Table") -> None:
    """Numbers at the right, an empty line around each."""
    console = stdout()
    for table in tables:
        for column in table.columns[1:]:
            column.justify = "right"
        console.print()
        console.print(table)
    console.print()


def _kilo(length: int) -> str:
    return f"{length // 1024}K"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
