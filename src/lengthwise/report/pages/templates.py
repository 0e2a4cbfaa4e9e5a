"""The templates of all pages."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).parent.parent / "templates"


def render(name: str, *, styles: Sequence[str] = ("report.css",), **values: Any) -> str:
    """The page of template ``name`` with ``values`` and style sheets; text is escaped, unknown names are refused."""
    style = "".join((_FOLDER / sheet).read_text() for sheet in styles)
    return _environment().get_template(name).render(**values, style=style)


@cache
def _environment() -> jinja2.Environment:
    """Keeps compiled templates."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
