"""``lengthwise index``: text, code, DNA, chats, ready tokens or bare lengths into an index."""

from pathlib import Path

from lengthwise.cli import index_options as its
from lengthwise.cli.tables.index_table import print_index, print_verified
from lengthwise.cli.verify import verify_store
from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import MAX_DOCUMENT, MAX_RATIO
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import open_index
from lengthwise.index.train_bpe import check_vocabulary
from lengthwise.session.console import emit_json
from lengthwise.session.index_corpus import index_corpus, index_document


def run(
    source: its.Source = None,
    out: its.Out = None,
    python_stdlib: its.Stdlib = False,
    glob: its.Glob = None,
    format: its.AsFormat = None,
    reader: its.Reader = "",
    field: its.Field = "",
    split: its.Split = "",
    chat: its.Chat = False,
    loss: its.LossOption = None,
    ignore: its.Ignore = None,
    tokenizer: its.TokenizerName = "",
    train_bpe: its.TrainBpe = None,
    eos: its.Eos = True,
    on_empty: its.Empty = None,
    on_binary: its.Binary = None,
    max_document: its.MaxDocument = MAX_DOCUMENT,
    on_large: its.OnLarge = None,
    max_ratio: its.MaxRatio = MAX_RATIO,
    workers: its.Workers = None,
    restart: its.Restart = False,
    verify: its.Verify = False,
    json: its.Json = False,
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
        source=source, globs=tuple(glob or ()), format=format, reader=reader, field=field, split=split, chat=chat,
        loss=loss.value if loss else "", ignore=tuple(ignore or ()), tokenizer=tokenizer, train_bpe=train_bpe or 0,
        append_eos=eos, on_empty=on_empty.value if on_empty else "", on_binary=on_binary.value if on_binary else "",
        max_document=max_document, on_large=on_large.value if on_large else "", max_ratio=max_ratio,
    )  # fmt: skip
    built = index_corpus(settings, out, workers=workers, restart=restart)
    store = open_index(out)
    if json:
        emit_json(index_document(store, built=built))
    else:
        print_index(store, built)


def _verify(path: Path | None, *, json: bool) -> None:
    if path is None:
        raise InputError("give the folder of the index to verify: lengthwise index --verify DIR")
    store = open_index(path)
    verify_store(store, name=str(path))
    if json:
        emit_json({**index_document(store), "verified": True})
    else:
        print_verified(store)
