"""``lengthwise stats``: what the lengths of a corpus cost, and what an order does to sampling, before any training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli.shared_options import MAX_DEVICES, MAX_TOKENS
from lengthwise.config.run_config import Config, load
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import open_corpus
from lengthwise.data.length_stats import MAX_LENGTHS, LengthStats, length_stats
from lengthwise.data.max_length import apply_max_length
from lengthwise.data.sampling_bias import SamplingReport
from lengthwise.data.sort_key import LENGTH
from lengthwise.index.source_file import SourceFile
from lengthwise.index.work_units import open_lengths
from lengthwise.report.pages.run_text import order_words
from lengthwise.session.console import emit_json, stdout
from lengthwise.session.sampling_report import safety_of_lengths, sampling_report

if TYPE_CHECKING:
    from rich.table import Table

Source = Annotated[
    Path,
    typer.Argument(
        metavar="DIR|LENGTHS.npy|CONFIG.yaml", help="An index, one row of integers, or the data of a run: a mixture."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Such as data.max_length=512 data.order=curriculum seed=1."),
]
Sampling = Annotated[
    bool, typer.Option("--sampling", help="Instead: what data.order does to sampling under the budget of a step.")
]
MaxLength = Annotated[
    list[int] | None,
    typer.Option(min=1, max=MAX_TOKENS, metavar="TOKENS", help="A limit to try; may be repeated. Default: 1K to 128K."),
]
Ranks = Annotated[
    int | None, typer.Option(min=1, max=MAX_DEVICES, help="Ranks the attention work is dealt to. Default: 8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

_CONFIGS = (".yaml", ".yml")
_NUM_RANKS = 8


def run(
    source: Source,
    overrides: Overrides = None,
    sampling: Sampling = False,
    max_length: MaxLength = None,
    ranks: Ranks = None,
    json: Json = False,
) -> None:
    """Show length statistics, or with --sampling what the order of sequences does to it, as tables or JSON."""
    config = _config(source, overrides or [])
    if sampling:
        if max_length or ranks:
            raise InputError("--max-length and --ranks are of length statistics; with --sampling set data.max_length")
        _sampling(source, config, json=json)
        return
    limits, num_ranks = tuple(max_length or MAX_LENGTHS), _NUM_RANKS if ranks is None else ranks
    stats = length_stats(_lengths(source, config), max_lengths=limits, num_ranks=num_ranks, seed=config.seed)
    if json:
        emit_json({"path": str(source), **stats.to_json()})
    else:
        _show(source, stats)


def _config(source: Path, overrides: list[str]) -> Config:
    """What ``source`` and the settings behind it say; a file of lengths is no index."""
    if source.suffix in _CONFIGS:
        return load(source, overrides)
    config = load(None, overrides)
    index = "" if source.suffix == ".npy" else str(source)
    return config.model_copy(update={"data": config.data.model_copy(update={"index": index})})


def _lengths(source: Path, config: Config) -> LengthIndex:
    """After the length rule."""
    if source.suffix != ".npy":
        return open_corpus(config.data).lengths
    if not source.is_file():
        raise InputError(f"no file at {source}; give an index folder or a .npy file of lengths")
    file = SourceFile(path=str(source), name=str(source), size=source.stat().st_size, mtime_ns=0)
    source_lengths = LengthIndex(lengths=open_lengths(file))
    return apply_max_length(source_lengths, max_length=config.data.max_length, rule=config.data.over_length).lengths


def _sampling(source: Path, config: Config, *, json: bool) -> None:
    if source.suffix == ".npy":
        if config.data.metric != LENGTH:
            raise InputError(f"{source} holds lengths alone; metric {config.data.metric} is saved beside an index")
        safety = safety_of_lengths(config, _lengths(source, config))
    else:
        safety = sampling_report(config, open_corpus(config.data))
    if json:
        emit_json({"path": str(source), **safety.to_json()})
    else:
        _show_safety(source, safety)


def _show_safety(source: Path, safety: SamplingReport) -> None:
    from rich.table import Table

    console = stdout()
    words = order_words(safety.order)
    console.print(f"{source}: first epoch, {safety.num_steps:,} steps, {words}", soft_wrap=True)
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


def _show(source: Path, stats: LengthStats) -> None:
    from rich.table import Table

    console = stdout()
    console.print(f"{source}: {stats.num_sequences:,} sequences, {stats.num_tokens:,} tokens", soft_wrap=True)
    console.print(
        f"length: min {stats.min_length:,}  mean {stats.mean_length:,.0f}  median {stats.median_length:,.0f}  "
        f"max {stats.max_length:,}",
        soft_wrap=True,
    )
    console.print("  ".join(f"{name} {value:,.0f}" for name, value in stats.percentiles.items()), soft_wrap=True)

    histogram = Table(
        "length", "sequences", "share", "of tokens", title="Lengths (K = 1024 tokens)", title_justify="left"
    )
    for bin in stats.histogram:
        label = f">= {_kilo(bin.low)}" if bin.high is None else f"{_kilo(bin.low)} - {_kilo(bin.high)}"
        label = f"< {_kilo(bin.high)}" if not bin.low and bin.high else label
        share, tokens = _percent(bin.share_of_sequences), _percent(bin.share_of_tokens)
        histogram.add_row(label, f"{bin.num_sequences:,}", share, tokens)

    padding = Table(
        "batch size", "random order", "sorted", title="Padding, share of computed tokens", title_justify="left"
    )
    for row in stats.padding:
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
    for cut in stats.cuts:
        lost = _percent(cut.share_of_tokens_in_them), _percent(cut.share_of_tokens_beyond)
        cuts.add_row(f"{cut.max_length:,}", f"{cut.sequences_over:,}", _percent(cut.share_of_sequences), *lost)

    _print(histogram, padding, cuts)
    console.print(
        f"attention: packs of {stats.max_length:,} tokens dealt to {stats.imbalance_ranks} ranks leave the busiest "
        f"with {stats.attention_imbalance:.2f} times the mean work",
        soft_wrap=True,
    )


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
