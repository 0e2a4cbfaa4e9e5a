"""``lengthwise stats``: what the lengths of a corpus cost, and what an order does to sampling, before any training."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.shared_options import MAX_DEVICES, tokens_from
from lengthwise.cli.tables.stats_table import print_sampling, print_stats
from lengthwise.core.errors import InputError
from lengthwise.data.length_stats import MAX_LENGTHS
from lengthwise.session.console import emit_json
from lengthwise.session.corpus_stats import data_settings, sampling_of, stats_of

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
    typer.Option(
        parser=tokens_from(1), metavar="TOKENS", help="A limit to try; may be repeated. Default: 1Ki to 128Ki."
    ),
]
Ranks = Annotated[
    int | None, typer.Option(min=1, max=MAX_DEVICES, help="Ranks the attention work is dealt to. Default: 8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

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
    config = data_settings(source, overrides or [])
    if sampling and (max_length or ranks):
        raise InputError("--max-length and --ranks are of length statistics; with --sampling set data.max_length")
    if sampling:
        report = sampling_of(source, config)
        if json:
            emit_json({"path": str(source), **report.to_json()})
        else:
            print_sampling(source, report)
        return
    limits, num_ranks = tuple(max_length or MAX_LENGTHS), _NUM_RANKS if ranks is None else ranks
    stats = stats_of(source, config, max_lengths=limits, num_ranks=num_ranks)
    if json:
        emit_json({"path": str(source), **stats.to_json()})
    else:
        print_stats(source, stats, of_mixture=bool(config.data.mixture))
