"""``lengthwise index``: text, code, DNA, ready tokens or bare lengths into an index."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lengthwise.cli.verify import verify_store
from lengthwise.core.errors import InputError
from lengthwise.index.build import BuiltIndex, build_index
from lengthwise.index.document_limits import MAX_DOCUMENT, MAX_RATIO
from lengthwise.index.settings import IndexSettings
from lengthwise.index.skipped import REASONS
from lengthwise.index.source_file import Format
from lengthwise.index.store import TokenStore, open_index
from lengthwise.index.train_bpe import check_vocabulary
from lengthwise.session.console import emit_json, progress, stderr


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
        help="A folder or file: text, .jsonl, .parquet, .arrow, .feather, .tar, .tar.gz, FASTA, .npy; a data set saved "
        "by Hugging Face's save_to_disk; a Megatron .bin/.idx pair or their common prefix.",
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
    OnBinary | None, typer.Option(help="Files that are no UTF-8 text; default: error, but skip with --python-stdlib.")
]
MaxDocument = Annotated[
    int, typer.Option(metavar="BYTES", help="Most bytes of a document, as it is in its file; larger ones are refused.")
]
OnLarge = Annotated[OnBinary | None, typer.Option("--on-large", help="Documents over --max-document; default: error.")]
MaxRatio = Annotated[
    int,
    typer.Option(metavar="N", help="A .tar.gz may unpack to N times its size, or 1 GiB if that is more."),
]
Workers = Annotated[
    int | None, typer.Option(help="Processes; default: one per core. The result does not depend on it.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Replace what DIR holds instead of going on with it.")]
Verify = Annotated[bool, typer.Option("--verify", help="Take SRC for an index and check every file and token of it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def run(
    source: Source = None,
    out: Out = None,
    python_stdlib: Stdlib = False,
    glob: Glob = None,
    format: AsFormat = None,
    reader: Reader = "",
    field: Field = "",
    split: Split = "",
    chat: Chat = False,
    loss: LossOption = None,
    tokenizer: TokenizerName = "",
    train_bpe: TrainBpe = None,
    eos: Eos = True,
    on_empty: Empty = None,
    on_binary: Binary = None,
    max_document: MaxDocument = MAX_DOCUMENT,
    on_large: OnLarge = None,
    max_ratio: MaxRatio = MAX_RATIO,
    workers: Workers = None,
    restart: Restart = False,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Build the index, or go on with an interrupted build, and say what came in and what was left out."""
    if verify:
        _verify(source, json=json)
        return
    if (source is None) != python_stdlib:
        raise InputError("give either SRC, the folder or file to index, or --python-stdlib")
    if out is None:
        raise InputError("give the folder of the index with --out DIR")
    if train_bpe is not None:
        check_vocabulary(train_bpe)
    settings = IndexSettings(
        source=source,
        globs=tuple(glob or ()),
        format=format,
        reader=reader,
        field=field,
        split=split,
        chat=chat,
        loss=loss.value if loss else "",
        tokenizer=tokenizer,
        train_bpe=train_bpe or 0,
        append_eos=eos,
        on_empty=on_empty.value if on_empty else "",
        on_binary=on_binary.value if on_binary else "",
        max_document=max_document,
        on_large=on_large.value if on_large else "",
        max_ratio=max_ratio,
    )
    built = _build(settings, out, workers=_num_cores() if workers is None else workers, restart=restart)
    store = open_index(out)
    if json:
        emit_json(_document(store, built=built))
    else:
        _tell(store, built)


def _build(settings: IndexSettings, out: Path, *, workers: int, restart: bool) -> BuiltIndex:
    with progress() as bar:
        task = bar.add_task("reading the source", total=None)

        def show(stage: str, num_done: int, num_units: int) -> None:
            bar.update(task, description=stage, completed=num_done, total=num_units)

        return build_index(settings, out, workers=workers, restart=restart, on_progress=show)


def _verify(path: Path | None, *, json: bool) -> None:
    if path is None:
        raise InputError("give the folder of the index to verify: lengthwise index --verify DIR")
    store = open_index(path)
    verify_store(store, name=str(path))
    if json:
        emit_json({**_document(store), "verified": True})
    else:
        stderr().print(
            f"{path}: {len(store):,} sequences, all as indexed (digest {store.digest})", markup=False, soft_wrap=True
        )


def _document(store: TokenStore, *, built: BuiltIndex | None = None) -> dict[str, Any]:
    names = (
        "num_sequences", "num_tokens", "max_length", "digest", "vocab_size", "eos_id", "dtype", "has_tokens",
        "tokenizer", "ledger",
    )  # fmt: skip
    document = {"path": str(store.path), **{name: store.info[name] for name in names}}
    if store.has_loss_mask:
        document["num_loss_tokens"] = store.info["num_loss_tokens"]
    if built is not None:
        document |= {"up_to_date": built.was_up_to_date, "num_resumed_units": built.num_resumed_units}
    return document


def _tell(store: TokenStore, built: BuiltIndex) -> None:
    lines = []
    info = store.info
    if built.was_up_to_date:
        lines.append(f"{store.path} is up to date, nothing to do")
    elif built.num_resumed_units:
        lines.append(f"went on with an interrupted build: {built.num_resumed_units:,} finished parts were kept")
    vocabulary = f", vocabulary {info['vocab_size']:,}" if store.has_tokens else ", lengths alone"
    lines.append(
        f"{info['num_sequences']:,} sequences, {info['num_tokens']:,} tokens, longest {info['max_length']:,}"
        f"{vocabulary} (digest {store.digest})"
    )
    if store.has_loss_mask:
        lines.append(f"  {info['num_loss_tokens']:,} of {info['num_tokens']:,} tokens have a loss")
    for reason in REASONS:
        if count := info["ledger"].get(reason):
            lines.append(f"  left out: {count:,} {reason}, such as {info['ledger']['examples'][reason][0]}")
    lines.append(f"next: lengthwise stats {store.path}")
    stderr().print("\n".join(lines), markup=False, soft_wrap=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
