"""``lengthwise stats``: what the lengths of a corpus cost, before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.console import emit_json, stdout
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.source import SourceFile
from lengthwise.data.stats import MAX_LENGTHS, LengthStats, length_stats
from lengthwise.data.store import open_index
from lengthwise.data.units import open_lengths

Source = Annotated[Path, typer.Argument(metavar="DIR|LENGTHS.npy", help="An index, or one row of integers.")]
MaxLength = Annotated[
    list[int] | None, typer.Option(metavar="TOKENS", help="A limit to try; may be repeated. Default: 1K to 128K.")
]
Ranks = Annotated[int, typer.Option(help="Ranks the attention work is dealt to.")]
Seed = Annotated[int, typer.Option(help="Seed of the random order.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def run(source: Source, max_length: MaxLength = None, ranks: Ranks = 8, seed: Seed = 0, json: Json = False) -> None:
    """Show length statistics as tables or JSON."""
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


def _open(source: Path) -> LengthIndex:
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
