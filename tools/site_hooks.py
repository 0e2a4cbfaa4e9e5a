"""Hooks of mkdocs: pages that are generated or lie outside docs/, and links to the rest of the repository."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference

from lengthwise.cli import json_documents

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "CHANGELOG.md": "internals/changes.md",
    "SECURITY.md": "internals/security.md",
    **{f"benchmarks/{path.name}": f"internals/benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")},
}
"""Pages by their path in the repository, and in the site."""
SOURCES = {site: repository for repository, site in ELSEWHERE.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for repository, site in ELSEWHERE.items():
        files.append(File.generated(config, site, content=(ROOT / repository).read_text()))
    for name, page in reference.PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for command in json_documents.DOCUMENTS:
        schema = json.dumps(json_documents.json_schema(command), indent=1)
        files.append(File.generated(config, f"reference/schemas/{command}.json", content=schema))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between pages as the site has them; what the site lacks is named by its path."""
    site = page.file.src_uri
    home = os.path.dirname(SOURCES.get(site, f"docs/{site}"))

    def rewritten(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        repository = os.path.normpath(os.path.join(home, path))
        if repository.startswith("docs/"):
            place = repository.removeprefix("docs/")
        elif repository in ELSEWHERE:
            place = ELSEWHERE[repository]
        else:
            return words if words.strip("`") == repository else f"{words} (`{repository}`)"
        return f"{mark}[{words}]({os.path.relpath(place, os.path.dirname(site) or '.')}{hash_}{anchor})"

    parts = re.split(r"(?ms)(^ *```.*?^ *```$)", markdown)
    return "".join(part if k % 2 else LINK.sub(rewritten, part) for k, part in enumerate(parts))
