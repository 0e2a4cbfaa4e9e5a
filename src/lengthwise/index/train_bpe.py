"""Train a byte-level BPE on the corpus that is about to be indexed."""

import os
from collections.abc import Iterator
from pathlib import Path

from lengthwise.core.errors import InputError
from lengthwise.core.processes import call_in_process
from lengthwise.index.document_limits import DEFAULT_LIMITS, Limits
from lengthwise.index.readers.documents_reader import read_documents
from lengthwise.index.source_file import Format, WorkUnit
from lengthwise.index.tokenizers import EOS_OF_TRAINED, import_tokenizers

SAMPLE_BYTES = 8 << 20
"""About as much text as is read for training; on source code, twice as much saves 0.1 % of the tokens."""

_SMALLEST_VOCABULARY = 257


def check_vocabulary(vocab_size: int) -> None:
    """Raise ``InputError`` if a byte-level BPE cannot have ``vocab_size`` entries."""
    if not _SMALLEST_VOCABULARY <= vocab_size <= 1 << 20:
        raise InputError(
            f"--train-bpe {vocab_size}: a byte-level vocabulary has 256 bytes and one end of sequence, so "
            f"{_SMALLEST_VOCABULARY:,} entries or more, and at most {1 << 20:,}; 8192 suits small models"
        )


def train_bpe(
    units: list[WorkUnit], *, field: str, vocab_size: int, num_bytes: int, path: Path, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Write a tokenizer.json trained on an even sample of the corpus of ``num_bytes`` bytes.

    Deterministic: every k-th file (or work unit, in files of many documents), k chosen to read about ``SAMPLE_BYTES``.
    Ctrl-C ends it at once, which the library would notice at its end alone.
    """
    import_tokenizers()
    stride = max(1, round(num_bytes / SAMPLE_BYTES))
    call_in_process(_train, units, field, vocab_size, stride, path, limits)


def _train(units: list[WorkUnit], field: str, vocab_size: int, stride: int, path: Path, limits: Limits) -> None:
    tokenizers = import_tokenizers()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_OF_TRAINED],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_sample(units, field=field, stride=stride, limits=limits), trainer)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    model.save(str(partial))
    partial.replace(path)


def _sample(units: list[WorkUnit], *, field: str, stride: int, limits: Limits) -> Iterator[str]:
    if units and units[0].format is Format.TEXT:
        files = tuple(file for unit in units for file in unit.files)[::stride]
        units = [WorkUnit(number=0, format=Format.TEXT, files=files)]
    else:
        units = units[::stride]
    for unit in units:
        for document in read_documents(unit, field=field, limits=limits):
            if not document.problem:
                yield document.data.decode()
