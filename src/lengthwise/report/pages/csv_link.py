"""The numbers of a figure as CSV inside a link, so that a page carries its own downloads."""

import csv
import re
from collections.abc import Sequence
from io import StringIO
from urllib.parse import quote

_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.])")
"""Beginnings that a spreadsheet would compute instead of showing."""


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as CSV; a cell that a spreadsheet would take for a formula begins with an apostrophe."""
    file = StringIO()
    csv.writer(file).writerows([_cell(text) for text in row] for row in (columns, *rows))
    return file.getvalue()


def csv_link(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the CSV as a ``data:`` link, which needs no network."""
    return f"data:text/csv;charset=utf-8,{quote(csv_text(columns, rows), safe='')}"


def file_name(title: str) -> str:
    """Return the name of a figure's download: its title in lower case, with hyphens."""
    return f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-') or 'figure'}.csv"


def _cell(text: str) -> str:
    plain = text.replace("\u00a0", " ")
    return f"'{plain}" if _FORMULA.match(plain) else plain
