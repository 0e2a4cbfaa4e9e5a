"""The templates of all pages."""

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2

from lengthwise.core.version import __version__
from lengthwise.report.pages.csv_link import csv_link, file_name

FOLDER = Path(__file__).parent.parent / "templates"


def render(name: str, *, styles: Sequence[str] = ("report.css",), **values: Any) -> str:
    """The page of template ``name`` with ``values``; text is escaped, unknown names are refused.

    Style sheets and the script are written into the page, which lets no other script run and fetches nothing.
    """
    style = "".join((FOLDER / sheet).read_text() for sheet in styles)
    script = (FOLDER / "page.js").read_text()
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return _environment().get_template(name).render(**values, style=style, script=script, policy=policy)


@cache
def _environment() -> jinja2.Environment:
    """Keeps compiled templates."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(csv_link=csv_link, csv_name=file_name, version=__version__)
    return environment
