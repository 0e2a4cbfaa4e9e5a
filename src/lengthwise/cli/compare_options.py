"""Options of `lengthwise compare`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.shared_options import MAX_SEED, tokens_from
from lengthwise.plan.space.search_space import RecomputeMode
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.space.sliced_packs import Slices
from lengthwise.plan.space.split_backwards import ZeroBubble


class OverLength(StrEnum):
    """Choices of --over-length."""

    DROP = "drop"
    TRUNCATE = "truncate"
    SPLIT = "split"
    ERROR = "error"


Lengths = Annotated[
    str | None, typer.Option(metavar="FILE.npy|INDEX|NAME", help="Lengths in tokens; NAME: such as commoncrawl.")
]
Reach = Annotated[
    bool,
    typer.Option(
        "--reach", help="Instead of --lengths: speed over the length of sequences, up to what each can train."
    ),
]
Gpus = Annotated[str, typer.Option(metavar="N[,N...]", help="Devices; several sizes show how policies scale.")]
MaxLength = Annotated[
    int | None,
    typer.Option(parser=tokens_from(1), metavar="TOKENS", help="Longest sequence trained; default: no limit."),
]
OverLengthOption = Annotated[
    OverLength | None, typer.Option(help="What becomes of sequences over it; default: they are split.")
]
TokensPerStep = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS[,TOKENS...]",
        help="Tokens of a global batch, such as 200K,1M,4M; default: 3125 a device, or the longest sequence.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option(metavar="GBIT[,GBIT...]", help="Gbit/s of each device's network port; default: as the device has."),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="GBYTE[,GBYTE...]",
        help="Gbyte/s and direction of each device to the others of its node; default: as the device has.",
    ),
]
Tokens = Annotated[str | None, typer.Option(metavar="TOKENS", help="Tokens of the whole training, such as 10B: hours.")]
PricePerHour = Annotated[
    float | None,
    typer.Option(metavar="PRICE", help="Of one device, for the cost of --tokens; default: that of the device file."),
]
ProfilePath = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Costs measured by `lengthwise profile`; default: data sheet."),
]
Jitter = Annotated[float, typer.Option(metavar="SIGMA", help="Lognormal noise on every micro-batch, such as 0.1.")]
Overlap = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Share of every update that computation hides; default: what passes hide."),
]
DEFAULT_STEPS = 8
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000, metavar="N", help=f"Global batches that every policy plans; default: {DEFAULT_STEPS}."
    ),
]
Policies = Annotated[str | None, typer.Option(metavar="A,B", help="Only these; default: all.")]
Recompute = Annotated[RecomputeMode, typer.Option(help="Layers that schemes recompute.")]
ShardGradients = Annotated[
    GradientSharding, typer.Option(help="Whether ranks that share whole weights keep shares of their gradients.")
]
ZeroBubbleOption = Annotated[
    ZeroBubble,
    typer.Option("--zero-bubble", help="Whether stages split backwards to fill their waits (ZB-H1), where faster."),
]
SlicesOption = Annotated[
    Slices, typer.Option("--slices", help="Whether stages compute micro-batches in slices of tokens, where faster.")
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the order of the sequences.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with charts.")]
