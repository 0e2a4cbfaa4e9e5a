"""Options that the commands of what-if questions share."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.core.wording import parse_tokens

MAX_DEVICES = 1 << 16
"""The limit in ``core.specs``, spelt here so that the options of a command need no NumPy."""
MAX_TOKENS = 1 << 40
MAX_SEED = (1 << 64) - 1


def tokens_from(least: int, most: int = MAX_TOKENS) -> Callable[[str], int]:
    """The parser of an option that takes a number of tokens, such as 4096, 32K or 1M."""

    def parse(text: str) -> int:
        number = parse_tokens(text)
        if number is None or not least <= number <= most:
            raise typer.BadParameter(
                f"{text[:80]!a} is not a number of tokens from {least:,} to {most:,}, such as 4096, 32K or 1M"
            )
        return number

    return parse


class Dtype(StrEnum):
    """Data type of forward and backward."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|DIR",
        help="A preset (lengthwise config --presets lists them), or a folder with a config.json of transformers.",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option("--device", metavar="NAME|FILE", help="A device preset, such as H100-80GB, or a YAML file of one."),
]
DevicesPerNode = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_DEVICES,
        metavar="N",
        help="Devices that share a fast link; default: as the device has, mostly 8.",
    ),
]
MemoryGib = Annotated[
    float | None,
    typer.Option("--hbm", metavar="GIB", help="Memory of a device that plans may fill; default: all but the margin."),
]
MemoryMargin = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.99,
        metavar="SHARE",
        help="Share of a GPU's memory left free, beside 1 GiB for context and libraries; default: 0.06.",
    ),
]
HostMemoryGib = Annotated[
    float | None,
    typer.Option(
        "--host-memory",
        metavar="GIB",
        help="Memory of the host that plans may fill for each device; default: nine tenths of its share.",
    ),
]


class OffloadChoice(StrEnum):
    """Choices of --offload."""

    AUTO = "auto"
    NONE = "none"
    ALL = "all"


OffloadOption = Annotated[
    OffloadChoice, typer.Option("--offload", help="Layers whose saved tensors are in host memory meanwhile.")
]
MaxDegree = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_DEVICES, metavar="N", help="Most devices that share a layer; default: any number."),
]
MaxStages = Annotated[
    int | None, typer.Option(min=1, max=MAX_DEVICES, metavar="N", help="Most pipeline stages; default: 8.")
]
Methods = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="How devices share a layer; default: ulysses,ring,megatron_ts, or all."),
]
DtypeOption = Annotated[Dtype, typer.Option(help="What forward and backward compute in.")]
TraceSteps = Annotated[
    str | None, typer.Option(metavar="A-B,C", help="Steps of the trace; default: as many as viewers bear.")
]
TraceRanks = Annotated[str | None, typer.Option(metavar="A-B,C", help="Ranks of the trace; default: all.")]
KinetoFolder = Annotated[
    Path | None,
    typer.Option("--kineto", metavar="FOLDER", help="Also write traces as PyTorch's profiler does, one file a rank."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


class ComputeDtype(StrEnum):
    """Choices of --dtype."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class ComputeDevice(StrEnum):
    """Choices of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
