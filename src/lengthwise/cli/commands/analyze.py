"""``lengthwise analyze``: one number for every sequence of an index, to order a training by."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.analyze_ranks import analyze_as_rank, analyze_from_here
from lengthwise.cli.launch import check_rank_options, check_torch, is_rank
from lengthwise.cli.shared_options import ComputeDevice, ComputeDtype, tokens_from
from lengthwise.cli.tables.analysis_table import print_analysis

Index = Annotated[Path, typer.Argument(metavar="INDEX", help="A folder made by `lengthwise index`.")]
MetricName = Annotated[
    str,
    typer.Option(
        metavar="length|loss=FOLDER|MODULE:FUNCTION",
        help="The length; the mean loss under the model of a Hugging Face folder or of one of our runs; or your own "
        "function f(tokens, id) -> float, imported from the current folder.",
    ),
]
Name = Annotated[str | None, typer.Option(help="What to save it as; default: length, loss, or the function's name.")]
Nproc = Annotated[int, typer.Option(min=1, help="Ranks on this machine. The result does not depend on it.")]
MaxLength = Annotated[
    int | None,
    typer.Option(parser=tokens_from(1), metavar="TOKENS", help="Longest sequence the model is given; default: any."),
]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Score the first --max-length tokens of longer ones; else they are refused.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        parser=tokens_from(1),
        metavar="TOKENS",
        help="Most tokens in one forward; a longer sequence goes alone. Default: 16,384.",
    ),
]
Dtype = Annotated[ComputeDtype, typer.Option(help="What the model computes in.")]
Device = Annotated[ComputeDevice, typer.Option(help="Where; auto: on GPUs where there are any.")]
Restart = Annotated[bool, typer.Option("--restart", help="Replace a metric of that name, finished or not.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def run(
    index: Index,
    metric: MetricName,
    name: Name = None,
    nproc: Nproc = 1,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    max_tokens: MaxTokens = None,
    dtype: Dtype = ComputeDtype.FLOAT32,
    device: Device = ComputeDevice.AUTO,
    restart: Restart = False,
    json: Json = False,
) -> None:
    """Make the metric, or go on with an interrupted analysis, and show what came out."""
    from lengthwise.index.store import open_index
    from lengthwise.runtime.analyze.request import MAX_TOKENS, AnalysisRequest, parse_metric

    check_rank_options(nproc)
    kind, target, usual_name = parse_metric(metric)
    request = AnalysisRequest(
        kind=kind,
        target=target,
        name=name or usual_name,
        max_length=max_length,
        truncate=truncate,
        max_tokens=max_tokens or MAX_TOKENS,
        dtype=dtype.value,
    )
    store = open_index(index)
    if is_rank():
        analyze_as_rank(request, store, device=device.value, restart=restart, json=json)
        return
    check_torch()
    print_analysis(analyze_from_here(request, store, nproc=nproc, device=device.value, restart=restart), json=json)
