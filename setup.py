"""Builds the package. Its page on a package index is README.md, whose links are made absolute there."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")


def package_page(readme: str, repository: str, version: str) -> str:
    """Return ``readme`` with links to files as links into ``repository``; without one, they are words alone."""

    def rewritten(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if not repository:
            return "" if mark else words
        folder, query = ("raw", "?sanitize=true") if mark else ("blob", "")
        return f"{mark}[{words}]({repository.rstrip('/')}/{folder}/v{version}/{target}{query})"

    blocks = re.split(r"(?ms)(^```.*?^```$)", readme)
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(blocks))


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project.get("urls", {}).get("Repository", "")
    setup(
        long_description=package_page((ROOT / "README.md").read_text(), repository, project["version"]),
        long_description_content_type="text/markdown",
    )
