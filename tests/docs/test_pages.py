"""Links lead somewhere, the README is one page in the words of the field; tour, reference and pictures are current."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

import lengthwise
from lengthwise.cli.main import COMMANDS
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config
from tests.docs.blocks import FENCE, PAGES, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import concept_pictures
import reference

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {f"docs/reference/{name}.md" for name in reference.PAGES}
FIELD = (
    "sequence / context parallel", "tensor parallel", "pipeline parallel", "gradient accumulation",
    "activation checkpointing", "load balancing", "long-context",
)  # fmt: skip


def prose(page):
    """The lines of a page outside of blocks."""
    inside, lines = False, []
    for line in (ROOT / page).read_text().splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


def anchors(page):
    """The names of a page's headings, as GitHub makes them."""
    heads = [line.lstrip("#").strip() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in LINK.findall("\n".join(prose(page))):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        name = place.relative_to(ROOT).as_posix()
        assert place.exists() or name in GENERATED, f"{page}: {target}"
        assert not anchor or name in GENERATED or anchor in anchors(name), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_head(page):
    lines = ["", *prose(page), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:]):
        if line.startswith("|") and not before.startswith("|"):
            assert not before and after.startswith("| ---"), f"{page}: {line[:80]}"


def test_every_page_is_in_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} | {
        name.removeprefix("docs/") for name in GENERATED
    }
    assert pages <= set(leaves(site["nav"]))


def leaves(tree):
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def test_the_readme_is_one_page_in_the_words_of_the_field():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert not [word for word in FIELD if word not in " ".join(text.split())]


def test_readme_and_site_begin_with_a_page_for_each_reader():
    head = (ROOT / "README.md").read_text().partition("\n## ")[0]
    for page in ("docs/guides/fine-tune.md", "docs/get-started/plan-without-gpus.md", "CONTRIBUTING.md"):
        assert f"]({page})" in head
    assert (ROOT / "tools" / "site_hooks.py").read_text().count('"README.md": "index.md"') == 1


def test_the_page_of_models_names_their_files():
    table = (ROOT / "docs" / "internals" / "model.md").read_text().partition("## Files")[2].partition("## ")[0]
    names = re.findall(r"`(\w+\.py)`", table)
    homes = [ROOT / "src" / "lengthwise" / folder for folder in ("runtime/models", "models")]
    assert len(names) > 15 and not [name for name in names if not any((home / name).exists() for home in homes)]


def test_the_tour_names_files_and_what_is_in_them():
    rows = re.findall(r"^\| `(\S+\.py)` \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(rows) == 5
    for path, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), re.M), f"{path} has no {name}"


def test_paths_that_contributing_names_exist():
    paths = re.findall(
        r"`((?:src|tests|benchmarks|docs|tools|examples|\.ci)/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_the_reference_has_every_setting_command_and_public_name():
    settings = [
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        for name in getattr(field.annotation, "model_fields", ())
    ]
    page = reference.configuration()
    assert len(settings) > 50 and not [name for name in settings if f"| `{name}` |" not in page]
    page = reference.command_line()
    assert not [command for command in COMMANDS if f"## lengthwise {command}\n" not in page]
    assert "| `--nproc" in page and "`--resume" in page
    page = reference.python()
    assert not [name for name in lengthwise.__all__ if name[0] != "_" and f"## {name}\n" not in page]


def test_what_a_loop_is_given_is_documented_member_by_member():
    page = reference.python()
    for name in reference.FOR_LOOPS:
        part = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        members = reference.members(getattr(lengthwise, name))
        assert len(members) > 4 and f"lw.{name}(" not in part
        for member, thing in members.items():
            assert thing.__doc__ and f"\n### {name}.{member}\n" in part, f"{name}.{member}"
        assert all(f"\n* `{attribute}`: " in part for attribute in reference.ATTRIBUTES.get(name, ()))
    assert "\n### Run.plain\n" in page, "inherited, and for users"
    sampler = page.partition("\n## BatchSampler\n")[2].partition("\n## ")[0]
    assert "**Raises**" in sampler, "what its constructor raises"
    options = page.partition("### Options of prepare")[2].partition("\n## ")[0]
    assert not [option for option in PrepareOptions.model_fields if f"| `{option}` |" not in options]


def test_the_guide_to_any_model_names_every_option_of_prepare():
    guide = (ROOT / "docs" / "guides" / "any-model.md").read_text()
    tables = guide[guide.index("## What is detected") : guide.index("\nA corpus is a folder")]
    assert not [option for option in PrepareOptions.model_fields if not re.search(rf"\b{option}\b", tables)]


@pytest.mark.parametrize("name", concept_pictures.PICTURES)
def test_pictures_of_concepts_are_as_their_script_makes_them(name):
    path = ROOT / "docs" / "images" / f"{name}.svg"
    assert path.read_text() == concept_pictures.PICTURES[name](), "run: python tools/concept_pictures.py"
    assert any(path.name in page.read_text() for page in (ROOT / "docs" / "concepts").glob("*.md"))


def test_the_picture_of_a_step_shows_three_policies_in_colours_that_it_has():
    path = Path(ROOT / "docs" / "images" / "step.svg")
    words = {element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("text")}
    assert {"padded", "static", "auto", "compute", "update weights"} <= words
    text = path.read_text()
    assert not [kind for kind in set(re.findall(r"k-(\w+)", text)) if f".k-{kind}{{" not in text]


def test_every_test_that_a_page_names_is_there():
    files = list((ROOT / "tests").rglob("test_*.py"))
    there = {path.stem for path in files}.union(*(re.findall(r"def (test_\w+)\(", path.read_text()) for path in files))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text())}
    assert len(named) > 50 and not named - there
