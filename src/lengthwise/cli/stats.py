"""``lengthwise stats``: what the lengths of a corpus cost, and what an order does to sampling, before any training."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.cli.console import emit_json, stdout
from lengthwise.cli.sampling import sampling_report
from lengthwise.config import check, load
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import open_corpus
from lengthwise.data.difficulty import LENGTH, by_length
from lengthwise.data.order import OrderSettings, make_order
from lengthwise.data.safety import Safety, safety_of
from lengthwise.data.sampler import Sampler
from lengthwise.data.source import SourceFile
from lengthwise.data.stats import MAX_LENGTHS, LengthStats, length_stats
from lengthwise.data.store import open_index
from lengthwise.data.units import open_lengths

Source = Annotated[
    Path,
    typer.Argument(
        metavar="DIR|LENGTHS.npy|CONFIG.yaml", help="An index, one row of integers, or the data of a run: a mixture."
    ),
]
MaxLength = Annotated[
    list[int] | None, typer.Option(metavar="TOKENS", help="A limit to try; may be repeated. Default: 1K to 128K.")
]
Ranks = Annotated[int, typer.Option(help="Ranks the attention work is dealt to.")]
Seed = Annotated[int, typer.Option(help="Seed of the random order.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
OrderName = Annotated[
    str | None,
    typer.Option("--order", metavar="NAME", help="Instead: what sorted, curriculum, windowed, corpus do to sampling."),
]
Metric = Annotated[str, typer.Option(metavar="NAME", help="Of the order: length, or what `lengthwise analyze` saved.")]
PacingName = Annotated[str, typer.Option("--pacing", metavar="NAME", help="Of a curriculum.")]
PacingStart = Annotated[float, typer.Option(metavar="SHARE", help="Of the corpus that a curriculum begins with.")]
Budget = Annotated[int, typer.Option(metavar="TOKENS", help="Of a step, with --order.")]

_CONFIGS = (".yaml", ".yml")


def run(
    source: Source,
    max_length: MaxLength = None,
    ranks: Ranks = 8,
    seed: Seed = 0,
    order: OrderName = None,
    metric: Metric = "length",
    pacing: PacingName = "root",
    pacing_start: PacingStart = 0.1,
    tokens_per_step: Budget = 65_536,
    json: Json = False,
) -> None:
    """Show length statistics, or with --order what that does to sampling, as tables or JSON."""
    if order is not None:
        curriculum = {"order": order, "metric": metric, "pacing": pacing, "pacing_start": pacing_start}
        _show_order(source, {**curriculum, "tokens_per_step": tokens_per_step}, seed, json=json)
        return
    limits = tuple(max_length or MAX_LENGTHS)
    if min(limits) < 1:
        raise InputError(f"--max-length {min(limits)}: at least 1 token is needed")
    if ranks < 1:
        raise InputError(f"--ranks {ranks}: at least 1 is needed")
    if not 0 <= seed < 1 << 64:
        raise InputError(f"--seed {seed} is out of range; use 0 to 2**64 - 1")
    stats = length_stats(_open(source), max_lengths=limits, num_ranks=ranks, seed=seed)
    if json:
        emit_json({"path": str(source), **stats.to_json()})
    else:
        _show(source, stats)


def _show_order(source: Path, data: dict[str, Any], seed: int, *, json: bool) -> None:
    is_file = source.suffix == ".npy"
    if source.suffix in _CONFIGS:
        config = load(source, [f"seed={seed}", *(f"data.{name}={value}" for name, value in data.items())])
    else:
        config = check({"seed": seed, "data": data if is_file else {**data, "index": str(source)}})
    if is_file:
        if config.data.metric != LENGTH:
            raise InputError(f"{source} holds lengths alone; --metric {config.data.metric} is saved beside an index")
        lengths = _open(source)
        order = make_order(OrderSettings.of(config.data), by_length(lengths))
        sampler = Sampler(lengths, seed=seed, tokens_per_step=config.data.tokens_per_step, order=order)
        safety = safety_of(sampler, lengths)
    else:
        safety = sampling_report(config, open_corpus(config.data))
    if json:
        emit_json({"path": str(source), **safety.to_json()})
    else:
        _show_safety(source, safety)


def _show_safety(source: Path, safety: Safety) -> None:
    from rich.table import Table

    console = stdout()
    settings = " ".join(str(value) for name, value in safety.order.items() if name != "metric" and value)
    console.print(f"{source}: first epoch, {safety.num_steps:,} steps ({settings})", markup=False, soft_wrap=True)
    sums = Table("of a step", "mean", "std / mean", "least", "most", box=None, pad_edge=False)
    for name, spread in (("tokens", safety.tokens), ("sequences", safety.sequences)):
        sums.add_row(name, f"{spread.mean:,.0f}", _percent(spread.coefficient), f"{spread.least:,}", f"{spread.most:,}")
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
            row += [f"{trend.pearson_by_tenth[number]:.2f}", f"{trend.drift_by_tenth[number]:.2f}"]
        tenths.add_row(*row)
    for table in (sums, trends, tenths):
        for column in table.columns[1:]:
            column.justify = "right"
        console.print()
        console.print(table)
    console.print()
    console.print(f"each sequence once: {'yes' if safety.each_once else 'no'}")
    for warning in safety.warnings or ("steps are samples of the corpus, as far as these numbers tell",):
        console.print(f"* {warning}", markup=False, soft_wrap=True)


def _open(source: Path) -> LengthIndex:
    if source.suffix in _CONFIGS:
        return open_corpus(load(source, []).data).lengths
    if source.suffix == ".npy":
        if not source.is_file():
            raise InputError(f"no file at {source}; give an index folder or a .npy file of lengths")
        file = SourceFile(path=str(source), name=str(source), size=source.stat().st_size, mtime_ns=0)
        return LengthIndex(lengths=open_lengths(file))
    return open_index(source).lengths


def _show(source: Path, stats: LengthStats) -> None:
    from rich.table import Table

    console = stdout()
    console.print(
        f"{source}: {stats.num_sequences:,} sequences, {stats.num_tokens:,} tokens", markup=False, soft_wrap=True
    )
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

    for table in (histogram, padding, cuts):
        for column in table.columns[1:]:
            column.justify = "right"
        console.print()
        console.print(table)
    console.print()
    console.print(
        f"attention: packs of {stats.max_length:,} tokens dealt to {stats.imbalance_ranks} ranks leave the busiest "
        f"with {stats.attention_imbalance:.2f} times the mean work",
        soft_wrap=True,
    )


def _kilo(length: int) -> str:
    return f"{length // 1024}K"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
