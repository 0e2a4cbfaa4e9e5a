"""Build an index in parallel, so that it can be killed at any moment and goes on where it was.

While it is built, the folder holds ``parts/``: build.json (what was asked), tokenizer.json if any, and one folder per
finished work unit. index.json is written last and the parts are removed after it: a folder without index.json is
never taken for an index.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.lock import FolderLock
from lengthwise.core.processes import check_processes
from lengthwise.index.build_part import PartJob, part_path
from lengthwise.index.chats import open_chat_encoder
from lengthwise.index.index_info import TOKENIZER_FILES
from lengthwise.index.merge_parts import assemble
from lengthwise.index.row_fields import RowFields, row_fields
from lengthwise.index.sequence_metrics import FOLDER as METRICS_FOLDER
from lengthwise.index.settings import IndexSettings, differences, fingerprint
from lengthwise.index.source_file import Format
from lengthwise.index.sources import Sources
from lengthwise.index.store import INDEX_FILES, read_info
from lengthwise.index.tokenizers import EOS_OF_TRAINED, TokenizerSpec, file_digest, find_tokenizer, parse_kmer
from lengthwise.index.train_bpe import check_vocabulary, train_bpe
from lengthwise.index.work_units import split_units
from lengthwise.index.worker_pool import build_parts

_NOTE, _LOCK = "build.json", "build.lock"
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
        with _folder(out), _only_builder(out):
            return _build(settings, out, workers=workers, restart=restart, on_progress=on_progress or _silent)
    except OSError as error:
        hint = "finished parts are kept: run the same command again to go on"
        raise LengthwiseError(f"building the index at {out} failed: {error}; {hint}") from error


def _build(settings: IndexSettings, out: Path, *, workers: int, restart: bool, on_progress: Progress) -> BuiltIndex:
    sources = _find(settings, out)
    tokenizer_file, tokenizer_digest, eos_token = _choose_tokenizer(settings)
    fields = row_fields(settings, sources)
    if fields.chat:
        tokenizer_digest += _digest_beside(settings, tokenizer_file, sources)
    request = settings.to_json(sources, fields=fields.to_json(), tokenizer_digest=tokenizer_digest)
    mark = fingerprint(request)
    if restart:
        _clear(out)
    if (out / "index.json").exists():
        return BuiltIndex(info=_up_to_date(out, request, mark), was_up_to_date=True, num_resumed_units=0)
    units = split_units(sources, unit_bytes=settings.unit_bytes_of(sources))
    field = fields.field
    spec = _tokenizer_spec(settings, sources, fields=fields, parts=out / "parts", eos_token=eos_token)
    parts = _claim(out, request, mark)
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
        info = assemble(job, units, out, request=request, fingerprint=mark)
    except InputError:
        _clear(out)  # whatever mends the input changes the request, so that nothing begun could be used
        raise
    shutil.rmtree(parts)
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
            raise InputError(f"--tokenizer {chosen} reads FASTA, but {sources.label} is {sources.format.value}")
        return TokenizerSpec(kind=chosen, append_eos=settings.append_eos)
    if chosen in ("", "bytes"):
        return TokenizerSpec(kind="bytes", append_eos=settings.append_eos)
    return TokenizerSpec(kind="huggingface", path=path, eos_token=eos_token, append_eos=settings.append_eos)


def _up_to_date(out: Path, request: dict[str, Any], mark: str) -> dict[str, Any]:
    info = read_info(out)
    if info["fingerprint"] != mark:
        raise InputError(
            f"{out} holds another index ({differences(info['request'], request)}); "
            "choose another --out, or replace it with --restart"
        )
    shutil.rmtree(out / "parts", ignore_errors=True)  # killed between index.json and the removal of the parts
    return info


def _claim(out: Path, request: dict[str, Any], mark: str) -> Path:
    """The folder of parts, new or of an interrupted build of the same request."""
    parts = out / "parts"
    if not (parts / _NOTE).exists():
        ours = (
            parts,
            out / METRICS_FOLDER,
            out / _LOCK,
        )  # metrics of a replaced index stay: they tell which one they are of
        foreign = [path.name for path in out.iterdir() if path not in ours or (path == parts and any(parts.iterdir()))]
        if foreign:
            raise InputError(
                f"{out} is not empty (it holds {foreign[0]}) and not an index; choose a new folder for --out"
            )
        _write_note(parts, {"fingerprint": mark, "request": request})
        return parts
    begun = _any_json(parts / _NOTE)
    if begun.get("fingerprint") != mark:
        before = begun.get("request")
        other = differences(before, request) if isinstance(before, dict) else f"{_NOTE} is damaged"
        raise InputError(
            f"{out} holds a half-written index of another request ({other}); "
            "run the same command as before, or start over with --restart"
        )
    for stray in parts.glob("*.partial-*"):
        shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    return parts


def _write_note(parts: Path, note: dict[str, Any]) -> None:
    parts.mkdir(exist_ok=True)
    partial = parts / f"{_NOTE}.partial"
    partial.write_text(json.dumps(note))
    partial.replace(parts / _NOTE)


def _clear(out: Path) -> None:
    """Remove an index, finished or not, and nothing else; killed half-way, the folder is still known as ours."""
    parts = out / "parts"
    if not (parts / _NOTE).exists() and "fingerprint" not in _any_json(out / "index.json"):
        return
    _write_note(parts, {"fingerprint": "", "request": {}})
    for name in INDEX_FILES:
        (out / name).unlink(missing_ok=True)
        (out / f"{name}.partial").unlink(missing_ok=True)
    for path in parts.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _NOTE:
            path.unlink()
    shutil.rmtree(parts)


def _any_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


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


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder ``out``, made if it is not there; folders that were made go again if they stay empty.

    Raises:
        InputError: it cannot be a folder.
    """
    made: list[Path] = []
    try:
        made = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _remove_empty(made)
        why = "it is a file" if isinstance(error, FileExistsError) else getattr(error, "strerror", None) or str(error)
        raise InputError(f"--out {out} cannot be made a folder: {why}; name another") from None
    try:
        yield
    finally:
        _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # the first that holds something
        for folder in folders:
            folder.rmdir()


def _only_builder(out: Path) -> AbstractContextManager[None]:
    """Hold the folder while building; a build that was killed holds it no longer."""
    lock = FolderLock(out / _LOCK, user="another build of an index", way_out="wait for it, or choose another --out")
    return lock.held()
