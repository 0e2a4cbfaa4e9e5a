"""Build an index in parallel, so that it can be killed at any moment and goes on where it was.

While it is built, the folder holds ``parts/``: build.json (what was asked), tokenizer.json if any, one folder per
finished work unit, and at last the whole index, which is then put in place. index.json comes last and the parts are
removed after it: a folder without index.json is never taken for an index.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.processes import check_processes
from lengthwise.index.build_folder import (
    claim,
    clear,
    made_folder,
    only_builder,
    parts_of,
    put_in_place,
    up_to_date,
    whole_of,
)
from lengthwise.index.build_part import PartJob, part_path
from lengthwise.index.chats import open_chat_encoder
from lengthwise.index.index_info import TOKENIZER_FILES
from lengthwise.index.merge_parts import assemble
from lengthwise.index.row_fields import RowFields, row_fields
from lengthwise.index.settings import IndexSettings, fingerprint
from lengthwise.index.source_file import Format
from lengthwise.index.sources import Sources
from lengthwise.index.tokenizers import EOS_OF_TRAINED, TokenizerSpec, file_digest, find_tokenizer, parse_kmer
from lengthwise.index.train_bpe import check_vocabulary, train_bpe
from lengthwise.index.work_units import split_units
from lengthwise.index.worker_pool import build_parts

MOST_WORKERS = 512
"""Processes of a build."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, units done and units in all."""


@dataclass(frozen=True, kw_only=True)
class BuiltIndex:
    """The outcome of :func:`build_index`."""

    info: dict[str, Any]
    """What index.json holds."""
    was_up_to_date: bool
    num_resumed_units: int
    """Work units that an earlier, interrupted build had finished."""


def build_index(
    settings: IndexSettings, out: Path, *, workers: int, restart: bool = False, on_progress: Progress | None = None
) -> BuiltIndex:
    """Index a corpus into the folder ``out``; the result does not depend on ``workers``.

    An interrupted build goes on; a finished index of the same request and sources is left as it is.

    Raises:
        InputError: the source or a setting cannot be used, or ``out`` holds something else.
    """
    check_processes(workers, setting="--workers", limit=MOST_WORKERS)
    if workers < 1:
        raise InputError(f"--workers {workers}: 1 to {MOST_WORKERS} processes can be asked for; one per core is usual")
    try:
        with made_folder(out), only_builder(out):
            return _build(settings, out, workers=workers, restart=restart, on_progress=on_progress or _silent)
    except OSError as error:
        hint = "finished parts are kept: run the same command again to go on"
        raise LengthwiseError(f"building the index at {out} failed: {error}; {hint}") from error


def _build(settings: IndexSettings, out: Path, *, workers: int, restart: bool, on_progress: Progress) -> BuiltIndex:
    if not (out / "index.json").exists():
        put_in_place(out)  # where a build was killed meanwhile
    sources = _find(settings, out)
    tokenizer_file, tokenizer_digest, eos_token = _choose_tokenizer(settings)
    fields = row_fields(settings, sources)
    if fields.chat:
        tokenizer_digest += _digest_beside(settings, tokenizer_file, sources)
    request = settings.to_json(sources, fields=fields.to_json(), tokenizer_digest=tokenizer_digest)
    mark = fingerprint(request)
    if (info := up_to_date(out, request, mark, restart=restart)) is not None:
        return BuiltIndex(info=info, was_up_to_date=True, num_resumed_units=0)
    units = split_units(sources, unit_bytes=settings.unit_bytes_of(sources))
    field = fields.field
    spec = _tokenizer_spec(settings, sources, fields=fields, parts=parts_of(out), eos_token=eos_token)
    parts = claim(out, request, mark, restart=restart)
    job = PartJob(
        parts=str(parts),
        tokenizer=spec,
        fields=fields,
        drop_empty=settings.drops_empty(sources),
        skip_binary=settings.skips_binary(),
        skip_large=settings.on_large == "skip",
        limits=settings.limits,
    )
    pending = [unit for unit in units if not part_path(job, unit.number).exists()]
    try:
        if spec.path and not Path(spec.path).exists():
            if tokenizer_file:
                _copy_tokenizer(tokenizer_file, Path(spec.path))
            else:
                on_progress("training the tokenizer", 0, len(units))
                size, num_bytes = settings.train_bpe, sources.num_bytes
                target, limits = Path(spec.path), settings.limits
                train_bpe(units, field=field, vocab_size=size, num_bytes=num_bytes, path=target, limits=limits)
        if fields.chat:
            open_chat_encoder(spec, fields)  # which raises before workers are started
        counting = _counting(on_progress, len(units) - len(pending), len(units))
        build_parts(job, pending, workers=workers, on_done=counting)
        on_progress("joining the parts", len(units), len(units))
        info = assemble(job, units, whole_of(out), request=request, fingerprint=mark)
    except InputError:
        clear(out)  # whatever mends the input changes the request, so that nothing begun could be used
        raise
    put_in_place(out)
    return BuiltIndex(info=info, was_up_to_date=False, num_resumed_units=len(units) - len(pending))


def _find(settings: IndexSettings, out: Path) -> Sources:
    try:
        return settings.find(out)
    except OSError as error:
        raise InputError(f"{settings.source} cannot be read: {error.strerror or error}; give another SRC") from None


def _silent(stage: str, num_done: int, num_units: int) -> None:
    pass


def _counting(on_progress: Progress, num_done: int, num_units: int) -> Callable[[int], None]:
    on_progress("indexing", num_done, num_units)
    return lambda num_more: on_progress("indexing", num_done + num_more, num_units)


def _choose_tokenizer(settings: IndexSettings) -> tuple[Path | None, str, str]:
    """A given tokenizer.json, what tells the choice apart from others, and the name of the end-of-sequence token."""
    if settings.train_bpe:
        check_vocabulary(settings.train_bpe)
        return None, f"train-bpe {settings.train_bpe}", EOS_OF_TRAINED
    if settings.tokenizer in ("", "bytes") or parse_kmer(settings.tokenizer):
        return None, settings.tokenizer or "bytes", ""
    file, eos_token = find_tokenizer(Path(settings.tokenizer))
    return file, f"{file_digest(file)} {eos_token}", eos_token


def _digest_beside(settings: IndexSettings, tokenizer_file: Path | None, sources: Sources) -> str:
    """Digests of the files beside a tokenizer.json, which decide how it renders chats.

    Raises:
        InputError: there is no such tokenizer.
    """
    if tokenizer_file is None:
        chosen = settings.tokenizer or ("--train-bpe" if settings.train_bpe else "bytes")
        raise InputError(
            f"{sources.label} holds chats, and the tokenizer is {chosen}; give --tokenizer with the folder of a chat "
            "model's tokenizer, or choose another field with --field"
        )
    beside = (tokenizer_file.parent / name for name in TOKENIZER_FILES[1:])
    return "".join(f" {path.name} {file_digest(path)}" for path in beside if path.is_file())


def _tokenizer_spec(
    settings: IndexSettings,
    sources: Sources,
    *,
    fields: RowFields,
    parts: Path,
    eos_token: str,
) -> TokenizerSpec:
    path = str(parts / "tokenizer.json")
    if fields.chat:
        append_eos = settings.append_eos and fields.is_plain
        return TokenizerSpec(kind="huggingface", path=path, eos_token=eos_token, append_eos=append_eos)
    chosen = settings.tokenizer or ("--train-bpe" if settings.train_bpe else "")
    if sources.format is Format.NPY or fields.holds_tokens:
        field_words = f" (field {fields.field!r})" if fields.field else ""
        holding = "lengths alone" if sources.format is Format.NPY else f"tokens already{field_words}"
        if chosen:
            raise InputError(f"{sources.label} holds {holding}, there is no text to encode; leave {chosen} out")
        return TokenizerSpec(kind="lengths" if sources.format is Format.NPY else "tokens", append_eos=False)
    if parse_kmer(chosen):
        if sources.format is not Format.FASTA:
            raise InputError(
                f"--tokenizer {chosen} reads FASTA, but {sources.label} is {sources.format.value}; add --format fasta "
                "if it is FASTA by another name, or choose another --tokenizer"
            )
        return TokenizerSpec(kind=chosen, append_eos=settings.append_eos)
    if chosen in ("", "bytes"):
        return TokenizerSpec(kind="bytes", append_eos=settings.append_eos)
    return TokenizerSpec(kind="huggingface", path=path, eos_token=eos_token, append_eos=settings.append_eos)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer.json, last of all, and the files that transformers keeps beside it."""
    for name in reversed(TOKENIZER_FILES[1:]):
        if (source.parent / name).is_file():
            _copy_whole(source.parent / name, target.parent / name)
    _copy_whole(source, target)


def _copy_whole(source: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.replace(target)
