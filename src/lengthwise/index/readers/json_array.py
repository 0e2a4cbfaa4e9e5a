"""JSON files that are one array of rows, read a row at a time; and how a file of the suffix .json is to be read."""

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import DEFAULT_LIMITS, Limits
from lengthwise.index.readers.compressed import open_unpacked
from lengthwise.index.readers.document import BYTE_ORDER_MARK, OversizedValue
from lengthwise.index.source_file import Format, SourceFile, check_unchanged

_BLOCK = 1 << 20
_NEAR_END = 16
"""An error so near to the end of what was read may be of a number or name that is cut there."""
_SPACE = re.compile(r"[ \t\r\n]*")


def json_format(file: SourceFile) -> Format | None:
    """JSON lines or an array of rows, by what a .json file begins with; None: it is neither."""
    with open_unpacked(file, DEFAULT_LIMITS) as opened:
        line = opened.readline(_BLOCK).removeprefix(BYTE_ORDER_MARK)
        while line.isspace():
            line = opened.readline(_BLOCK)
        if line.lstrip().startswith(b"["):
            return Format.JSON
        if line.lstrip().startswith(b"{") and not line.endswith(b"\n"):
            line += opened.readline(DEFAULT_LIMITS.document)
    try:
        is_row = not line or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        is_row = False
    return Format.JSONL if is_row else None


def read_json_array(file: SourceFile, limits: Limits) -> Iterator[bytes | OversizedValue]:
    """The rows of a file that is one JSON array, each as JSON; no more than a row and a block is kept in memory.

    Raises:
        InputError: it is no array, or cut off, or no JSON.
    """
    with open_unpacked(file, limits) as opened:
        array = _ArrayText(file, TextIOWrapper(opened, encoding="utf-8-sig", newline=""), limits)
        sign = array.next_sign()
        if sign != "[":
            raise InputError(
                f"{file.name} begins with {sign!r}, and is no JSON array; use --format jsonl if each line is an object"
            )
        array.skip_sign()
        sign = array.next_sign()
        while sign != "]":
            data = array.next_row().encode()
            yield data if len(data) <= limits.document else OversizedValue(len(data))
            sign = array.next_sign()
            if sign not in (",", "]"):
                what = repr(sign) if sign else "the end of the file"
                raise array.error(f"is followed by {what}, not by a comma or the end of the array")
            if sign == ",":
                array.skip_sign()
        array.skip_sign()
        if sign := array.next_sign():
            raise InputError(f"{file.name} goes on with {sign!r} after the end of its array; mend it")
    check_unchanged(file)


class _ArrayText:
    """The text of an array, of which as much is read as the next row needs."""

    def __init__(self, file: SourceFile, text: TextIOWrapper, limits: Limits) -> None:
        self._file, self._text, self._limits = file, text, limits
        self._decoder = json.JSONDecoder()
        self._buffer, self._position, self._row = "", 0, -1

    def next_sign(self) -> str:
        """The next character that is no space, which stays; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read(_BLOCK):
                return ""

    def skip_sign(self) -> None:
        """Go past a character."""
        self._position += 1

    def next_row(self) -> str:
        """The text of the next row."""
        self._row += 1
        self.next_sign()
        size, is_whole = _BLOCK, False
        while True:
            try:
                _, stop = self._decoder.raw_decode(self._buffer, self._position)
                if stop < len(self._buffer) or is_whole:
                    row = self._buffer[self._position : stop]
                    self._position = stop
                    return row
            except json.JSONDecodeError as error:
                is_cut = error.pos + _NEAR_END >= len(self._buffer) or error.msg.startswith("Unterminated")
                if is_whole or not is_cut:
                    place = f"at character {1 + error.pos - self._position} of the row"
                    raise self.error(f"is not JSON: {error.msg.removesuffix(' at')} {place}") from None
            except (ValueError, RecursionError) as error:
                raise self.error(f"is not JSON: {error}") from None
            if len(self._buffer) - self._position > self._limits.document:
                raise self.error(
                    f"has more than {self._limits.document:,} bytes, which a document may have, or its end is missing; "
                    "raise --max-document, or write the rows as JSON lines"
                )
            is_whole = not self._read(size)
            size *= 2

    def error(self, words: str) -> InputError:
        """The error of the row that was read last."""
        return InputError(f"{self._file.name}, row {max(self._row, 0)} {words}; mend it")

    def _read(self, size: int) -> bool:
        """Whether there was more to read."""
        try:
            more = self._text.read(size)
        except UnicodeDecodeError as error:
            raise self.error(f"or one after it is not JSON: {error}") from None
        self._buffer, self._position = self._buffer[self._position :] + more, 0
        return bool(more)
