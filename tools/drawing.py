"""What the pictures of the docs share: colours for light and dark screens, and the frame of an SVG file."""

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LIGHT = {
    "paper": "#ffffff", "ink": "#16191d", "soft": "#555c66", "rule": "#dfe3e8",
    "compute": "#2b7fc0", "communicate": "#dd8a1b", "wait": "#cdd2d9", "update": "#00916b",
}  # fmt: skip
DARK = {
    "paper": "#14171b", "ink": "#e9ebee", "soft": "#a7afba", "rule": "#30363e",
    "compute": "#4b9de0", "communicate": "#f0a848", "wait": "#4b525d", "update": "#38c79d",
}  # fmt: skip
KINDS = ("compute", "communicate", "wait", "update")


def style() -> str:
    """The style sheet: classes of the report's charts, and those of small pictures."""
    variables = ["".join(f"--{name}:{colour};" for name, colour in colours.items()) for colours in (LIGHT, DARK)]
    kinds = "".join(f".k-{kind}{{fill:var(--{kind})}}" for kind in KINDS)
    return (
        f":root{{{variables[0]}}}@media(prefers-color-scheme:dark){{:root{{{variables[1]}}}}}"
        "text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',Arial,sans-serif;fill:var(--soft)}"
        ".name{fill:var(--ink);font-size:14px;font-weight:600}.word,.axis-title{fill:var(--ink)}.on{fill:#fff}"
        ".paper{fill:var(--paper)}.grid{stroke:var(--rule)}.line{stroke:var(--soft);fill:none;stroke-width:1.5}"
        ".edge{fill:none;stroke:var(--soft);stroke-dasharray:4 3}.chart{overflow:visible}"
        f".span{{stroke:var(--paper);stroke-width:.7;vector-effect:non-scaling-stroke}}.dense{{stroke:none}}{kinds}"
    )


def document(parts: list[str], *, width: int, height: int, label: str) -> str:
    """A whole SVG file, which reads ``label`` aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(label)}"><title>{escape(label)}</title><style>{style()}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>' + "\n".join(["", *parts, "</svg>", ""])
    )


def words(text: str, x: float, y: float, *, class_: str = "word", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{class_}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, text: str = "") -> str:
    """A filled box with a word in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="k-{kind}"/>'
    class_ = "word" if kind == "wait" else "on"
    return shape + (words(text, x + width / 2, y + height / 2 + 4, class_=class_, anchor="middle") if text else "")
