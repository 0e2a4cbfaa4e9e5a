"""The pages of the documentation, and the blocks of code in them."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md")
)
NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.ipynb"))
LANGUAGES = ("bash", "python", "diff", "yaml", "text")
FENCE = re.compile(r"^( *)(```+)(\w*)\s*$")


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    page: str
    line: int
    number: int
    """Counted from 0, among the blocks of its language on its page."""
    language: str
    text: str

    @property
    def key(self) -> str:
        """Which block of its language it is: ``docs/guides/data.md#0``."""
        return f"{self.page}#{self.number}"


def blocks_of(page: str) -> Iterator[Block]:
    """Every block between fences, with what it is indented by taken away."""
    counts: dict[str, int] = {}
    opened, lines = None, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, lines = (fence, number), []
        elif opened is not None and fence and not fence[3] and len(fence[2]) >= len(opened[0][2]):
            language = opened[0][3]
            text = "\n".join(line.removeprefix(opened[0][1]) for line in lines) + "\n"
            yield Block(page, opened[1], counts.get(language, 0), language, text)
            counts[language] = counts.get(language, 0) + 1
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page}:{opened and opened[1]}: a block that does not end"


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))


def write_modules(folder: Path) -> None:
    """Write every block of Python that begins with the name of a file, such as ``# my_readers.py``, under this name."""
    for block in in_language("python"):
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (folder / name[1]).write_text(block.text)


def in_language(language: str) -> list[Block]:
    """Every block of a language, on all pages."""
    return [block for block in BLOCKS if block.language == language]


def unfenced(page: str) -> list[int]:
    """Lines where a block of code is indented instead of being fenced, so that no test would see it."""
    lines, inside, bad = (ROOT / page).read_text().splitlines(), False, []
    for number, line in enumerate(lines, 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside and line.startswith("    ") and line.strip() and not lines[number - 2].strip():
            bad.append(number)
    return bad


def commands(text: str) -> list[list[str]]:
    """The words of every command of a block, joined at backslashes, without comments and here-documents."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text.replace("\\\n", " "), flags=re.S | re.M)
    found = []
    for line in text.splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&" and words:
                found.append(words)
            words = [] if word == "&&" else [*words, word]
    return found


def cells(notebook: str) -> list[str]:
    """The code of every cell."""
    document = json.loads((ROOT / notebook).read_text())
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
