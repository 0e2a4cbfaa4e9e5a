"""docs/papers.md: what stands between its markers is written by the figures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pages import markdown_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
IMAGES = ROOT / "docs" / "images" / "papers"
HEAD = ("quantity", "published", "ours", "ratio", "why they differ")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of a figure; ``published`` and ``ours`` as numbers where both are known, for their ratio."""

    what: str
    published: float | str
    ours: float | str
    why: str
    unit: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as the page shows it."""
        ratio = ""
        if not isinstance(self.published, str) and not isinstance(self.ours, str):
            ratio = f"{self.ours / self.published:.2f}"
        return self.what, self._words(self.published), self._words(self.ours), ratio, self.why

    def _words(self, value: float | str) -> str:
        if isinstance(value, str):
            return value
        digits = 0 if value >= 100 else 1 if value >= 10 else 2
        return f"{value:,.{digits}f}{'' if self.unit in ('', 'x') else ' '}{self.unit}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture and the rows that go with it."""

    svg: str
    rows: tuple[Row, ...]
    text: str
    """What was computed, in a sentence or two."""


def block(name: str, figure: Figure) -> str:
    """The lines between the markers of a figure."""
    table = markdown_table(HEAD, [row.cells for row in figure.rows])
    label = re.search(r'aria-label="([^"]*)"', figure.svg)
    image = f"![{label[1] if label else name}](images/papers/{name}.svg)"
    return "\n".join(["", figure.text, "", f"`python benchmarks/figures --only {name}`", "", image, "", *table, ""])


def put(page: str, name: str, lines: str) -> str:
    """The page with the block of a figure replaced; the markers must be there."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    assert begin in page and end in page, f"{PAGE.name} has no markers {begin} and {end}"
    before, _, rest = page.partition(begin)
    return before + begin + "\n" + lines + "\n" + end + rest.partition(end)[2]


def written(figures: Mapping[str, Figure]) -> dict[Path, str]:
    """Every file that these figures make, and what belongs in it."""
    page = PAGE.read_text()
    for name, figure in figures.items():
        page = put(page, name, block(name, figure))
    return {PAGE: page, **{IMAGES / f"{name}.svg": figure.svg for name, figure in figures.items()}}
