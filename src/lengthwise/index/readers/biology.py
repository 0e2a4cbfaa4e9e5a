"""Files of sequences by their names: FASTA under its many suffixes, and what bioinformatics has beside it."""

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import DEFAULT_LIMITS
from lengthwise.index.readers.compressed import open_unpacked
from lengthwise.index.readers.document import BYTE_ORDER_MARK
from lengthwise.index.source_file import SourceFile

FASTA_SUFFIXES = (".faa", ".ffn", ".frn", ".fas", ".fsa", ".mpfa")
"""Suffixes that FASTA has beside .fa, .fasta and .fna, and other files too: what is in them says which they are."""
OTHER_FORMATS = {
    ".fastq": ("FASTQ", b"@"),
    ".fq": ("FASTQ", b"@"),
    ".gb": ("GenBank", b"LOCUS"),
    ".gbk": ("GenBank", b"LOCUS"),
    ".gbff": ("GenBank", b"LOCUS"),
    ".embl": ("EMBL", b"ID "),
    ".gff": ("GFF", b"##"),
    ".gff3": ("GFF", b"##"),
    ".vcf": ("VCF", b"##"),
    ".sam": ("SAM", b"@"),
}
"""Formats that are not read: their names, and what their files begin with, by suffix."""
_WAYS = {
    "FASTQ": "write its reads as FASTA (seqtk seq -A, or Biopython: SeqIO.convert)",
    "GenBank": "write its sequences as FASTA (Biopython: SeqIO.convert)",
    "EMBL": "write its sequences as FASTA (Biopython: SeqIO.convert)",
    "SAM": "write its reads as FASTA (samtools fasta)",
}
_HEAD_BYTES = 1 << 16


def is_fasta(file: SourceFile) -> bool:
    """Whether the file begins as FASTA does, or is empty."""
    head = _head(file)
    return not head or head.startswith((b">", b";"))


def is_other_format(file: SourceFile, suffix: str) -> bool:
    """Whether the file begins as those of the ``suffix`` do, which are not read."""
    return suffix in OTHER_FORMATS and _head(file).startswith(OTHER_FORMATS[suffix][1])


def other_format_refused(file: SourceFile, suffix: str) -> InputError:
    """The error for a file of a format that is not read."""
    name = OTHER_FORMATS[suffix][0]
    way_out = _WAYS.get(name, "index the FASTA of the sequences that it tells of")
    return InputError(
        f"{file.name} is {name}, which is not read; {way_out}, or read every file as one text with --format text"
    )


def _head(file: SourceFile) -> bytes:
    """What the file begins with, after blanks; empty where it cannot be read at all, which is told later."""
    if file.size < 0:
        return b""
    with open_unpacked(file, DEFAULT_LIMITS) as opened:
        return opened.read(_HEAD_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
