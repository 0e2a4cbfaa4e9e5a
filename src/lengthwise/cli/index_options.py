"""Options of `lengthwise index`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.index.source_file import Format


class OnEmpty(StrEnum):
    """Choices of --on-empty."""

    ERROR = "error"
    DROP = "drop"


class Loss(StrEnum):
    """Choices of --loss."""

    COMPLETIONS = "completions"
    ASSISTANT = "assistant"
    ALL = "all"


class OnBinary(StrEnum):
    """Choices of --on-binary and --on-large."""

    ERROR = "error"
    SKIP = "skip"


Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="SRC",
        help="A folder or file: text, .jsonl, .json, FASTA (these three also .gz or .zst), .parquet, .arrow, .feather, "
        ".tar, .tar.gz, .npy; a data set of Hugging Face's save_to_disk; a Megatron .bin/.idx pair or its prefix.",
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the index.")]
Stdlib = Annotated[bool, typer.Option("--python-stdlib", help="Instead of SRC: this Python's own standard library.")]
Glob = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only files that match; may be repeated.")]
AsFormat = Annotated[Format | None, typer.Option("--format", help="How files are read; default: by their suffix.")]
Reader = Annotated[
    str,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Read files by a function of your own from a path to texts or lists of token ids, or by the name of an "
        "entry point lengthwise.readers.",
    ),
]
Field = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="JSON key or column with the text, or with lists of token ids (default: text); in tar archives the "
        "extension of the member (default: txt), json:KEY for a key of a JSON member.",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Rows are chats, for the tokenizer's chat template; default: by the rows.")
]
LossOption = Annotated[
    Loss | None,
    typer.Option(
        "--loss", help="Tokens of chats that have a loss: the last answer (completions), every answer, or all."
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Column beside tokens or chats that is as if it were not there; may be repeated."
    ),
]
Split = Annotated[str, typer.Option(metavar="NAME", help="Which split of a saved Hugging Face data set.")]
TokenizerName = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH",
        help="bytes (default), a Hugging Face tokenizer.json, or for FASTA k-mers: 6mer, 6mer/3 with stride 3.",
    ),
]
TrainBpe = Annotated[
    int | None, typer.Option(metavar="VOCAB", help="Train a byte-level BPE of this many entries on SRC.")
]
Eos = Annotated[bool, typer.Option("--eos/--no-eos", help="End every document with the end-of-sequence token.")]
Empty = Annotated[
    OnEmpty | None, typer.Option(help="Documents without a token; default: drop in folders of text files, else error.")
]
Binary = Annotated[
    OnBinary | None,
    typer.Option(
        help="Documents that are no UTF-8 text, files or rows: error, or skip, which leaves them out and counts them; "
        "default: error, but skip with --python-stdlib."
    ),
]
MaxDocument = Annotated[
    int, typer.Option(metavar="BYTES", help="Most bytes of a document, as it is in its file; larger ones are refused.")
]
OnLarge = Annotated[OnBinary | None, typer.Option("--on-large", help="Documents over --max-document; default: error.")]
MaxRatio = Annotated[
    int,
    typer.Option(metavar="N", help="A .gz or .zst may unpack to N times its size, or 1 GiB if that is more."),
]
Workers = Annotated[
    int | None, typer.Option(help="Processes; default: one per core. The result does not depend on it.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Replace what DIR holds instead of going on with it.")]
Verify = Annotated[bool, typer.Option("--verify", help="Take SRC for an index and check every file and token of it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
