"""The package as it is built: what is in it, what its page on an index says, and that it works without torch."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = "https://example.org/lengthwise"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
package_page = runpy.run_path(str(ROOT / "setup.py"))["package_page"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by the command of the Makefile, with the address of a repository."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    text = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        text.replace("[project.urls]", f'[project.urls]\nRepository = "{REPOSITORY}"')
    )
    (folder / "build" / "dist").mkdir(parents=True)
    command = re.search(r"python -c \"(import setuptools.*)\"", (ROOT / "Makefile").read_text())[1]
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True, capture_output=True)
    assert list((folder / "build" / "dist").glob("*.tar.gz"))
    return next((folder / "build" / "dist").glob("*.whl"))


def test_the_wheel_has_every_file_of_the_source(wheel):
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "lengthwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "lengthwise/py.typed" in source
    assert source == {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("lengthwise-")}


def test_its_metadata_has_absolute_links_and_the_extras(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = Parser().parsestr(
        archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    )
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Project-URL"] == f"Repository, {REPOSITORY}"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])
    links = LINK.findall(metadata.get_payload())
    assert len(links) > 20 and all(link.startswith("https://") for link in links)


def test_links_of_the_page_lead_to_files_of_the_release():
    page = package_page((ROOT / "README.md").read_text(), REPOSITORY, "1.2.3")
    for link in LINK.findall(page):
        kind, tag, path = re.fullmatch(rf"{REPOSITORY}/(raw|blob)/(v[\d.]+)/([^?#]+).*", link).groups()
        assert tag == "v1.2.3" and (ROOT / path).exists() and (kind == "raw") == path.endswith(".svg")
    assert not LINK.findall(package_page((ROOT / "README.md").read_text(), "", "1.2.3"))


def test_the_wheel_works_without_torch(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    shutil.copy(ROOT / "tests" / "no_torch.py", tmp_path)
    code = "import no_torch, sys; from lengthwise.cli.main import main; main()"
    arguments = (
        "compare --lengths commoncrawl --max-length 4096 --model llama-tiny --gpus 2 --device H100-80GB --steps 1 "
    )
    arguments += "--tokens-per-step 20000 --policies static,packed --html page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0 and "packed" in done.stdout, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_the_oldest_python_is_the_one_that_the_tools_check_for():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert f"Programming Language :: Python :: {oldest}" in PROJECT["project"]["classifiers"]
    major, minor = map(int, oldest.split("."))
    for path in (ROOT / "src").rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(major, minor))


def test_hooks_before_a_commit_are_what_lint_runs():
    makefile = (ROOT / "Makefile").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.M)[1].replace("$(BIN)", ".venv/bin")
    commands = [re.sub(r" (--check|\.)(?= |$)", "", line.strip()) for line in lint.splitlines() if "MAKE" not in line]
    assert [hook["entry"].removesuffix(" --fix") for hook in hooks] == commands
