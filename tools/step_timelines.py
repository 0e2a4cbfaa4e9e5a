"""Make docs/images/step.svg: one step under padded, static and auto, from the charts of `lengthwise compare --html`.

python tools/step_timelines.py
"""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

from drawing import IMAGES, box, document, words

POLICIES = ("padded", "static", "auto")
COMPARE = (
    "compare", "--lengths", "commoncrawl", "--model", "llama-13b", "--gpus", "64", "--device", "H100-80GB",
    "--policies", ",".join(POLICIES),
)  # fmt: skip
FIGURE = re.compile(
    r"<h4>(\w+)</h4>\s*<p>(.*?)</p>.*?(<svg role=.*?</svg></g></svg>|<svg role=.*?</svg>)\s*</div>", re.S
)
HEIGHT = re.compile(r'class="chart" width="100%" height="(\d+)"')
AXIS_TITLE = re.compile(r'<text[^>]*class="axis-title">time[^<]*</text>')
LEGEND = {
    "compute": "compute",
    "communicate": "communicate",
    "wait": "wait for other ranks",
    "update": "update weights",
}
WIDTH, LEFT, RIGHT = 860, 64, 24


def charts(page: str) -> dict[str, tuple[str, str]]:
    """The caption and the chart of the step under each policy."""
    found = {match[1]: (unescape(match[2]), match[3]) for match in FIGURE.finditer(page) if match[1] in POLICIES}
    assert set(found) == set(POLICIES), f"the page has charts of {sorted(found)}"
    return found


def picture(page: str) -> str:
    """The three charts, one above another, with one legend."""
    parts, top = [], 30
    across = LEFT
    for kind, said in LEGEND.items():
        parts += [box(across, top - 12, 12, 12, kind), words(said, across + 18, top - 2)]
        across += 40 + 7 * len(said)
    for policy in POLICIES:
        caption, chart = charts(page)[policy]
        top += 34
        parts += [words(policy, LEFT, top, class_="name"), words(caption, LEFT + 62, top, class_="tick")]
        height = int(HEIGHT.search(chart)[1])  # type: ignore[index]
        if policy != POLICIES[-1]:  # one title of the axis is enough
            chart, height = AXIS_TITLE.sub("", chart), height - 18
        parts.append(
            f'<svg x="{LEFT}" y="{top - 14}" width="{WIDTH - LEFT - RIGHT}" height="{height}" style="overflow:visible">'
            f"{chart}</svg>"
        )
        top += height - 14
    return document(
        parts, width=WIDTH, height=top + 8, label="Simulated timelines of one step under padded, static and auto"
    )


def main() -> None:
    """Compare the policies, and keep the picture."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "compare.html"
        subprocess.run([sys.executable, "-m", "lengthwise", *COMPARE, "--html", str(page)], check=True)
        (IMAGES / "step.svg").write_text(picture(page.read_text()))


if __name__ == "__main__":
    main()
