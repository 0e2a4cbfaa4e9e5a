"""Pages of simulated numbers say what the code gives today; `make pages` writes them again."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def checked(*arguments):
    """The exit code and errors of a benchmark that writes nothing and compares its page."""
    ran = subprocess.run([sys.executable, *arguments, "--check"], cwd=BENCHMARKS, capture_output=True, text=True)
    return ran.returncode, ran.stderr


@pytest.mark.parametrize(
    "sections",
    [
        "crossovers,dcp-idle",
        *(
            pytest.param(section, marks=pytest.mark.deep)
            for section in ("table-1", "table-3", "deepspeed", "dcp", "ablation", "choices")
        ),
    ],
)
def test_tables_of_the_papers_are_not_stale(sections):
    assert checked("paper_tables.py", "--only", sections) == (0, "")


@pytest.mark.deep
@pytest.mark.parametrize("page", ["compare_policies", "calibration"])
def test_pages_of_simulations_are_not_stale(page):
    assert checked(f"{page}.py") == (0, "")


@pytest.mark.deep
def test_the_table_of_the_guide_is_what_its_command_prints():
    guide = (BENCHMARKS.parent / "docs/get-started/plan-without-gpus.md").read_text()
    shown = guide.split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    (command,) = [line for line in guide.splitlines() if line.endswith("--price-per-hour 2.5")]
    ran = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True, check=True)
    assert [line for line in shown if line and line not in ran.stdout.splitlines()] == ["..."]


@pytest.mark.deep
@pytest.mark.parametrize("names", ["hydraulis-1,dcp-5", pytest.param("", marks=pytest.mark.deep)])
def test_figures_of_the_papers_are_not_stale(names):
    assert checked("figures", "--only", names) == (0, "")


def test_a_row_that_the_code_gives_otherwise_is_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import pages

    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    head, rows = ("policy", "speed", "seconds to plan"), [["auto", 1.2, 3.0], ["static", 1.0, 2.0]]
    section = pages.Section(title="Speeds", text="", head=head, rows=rows, measured=("seconds to plan",))
    pages.write("page", title="Page", first="", sections=[section])
    same = pages.Section(title="Speeds", text="", head=head, rows=[["auto", 1.2, 9.0], rows[1]], measured=head[2:])
    assert pages.stale_rows("page", [same]) == []
    other = pages.Section(title="Speeds", text="", head=head, rows=[["auto", 1.3, 3.0]], measured=head[2:])
    assert pages.stale_rows("page", [other]) == [
        "page.md, Speeds: the page has auto | 1.2; the code gives auto | 1.3",
        "page.md, Speeds: the page has static | 1.0; the code gives no such row",
    ]
    with pytest.raises(SystemExit, match="2 rows are stale; write the page again with: make pages"):
        pages.check("page", [other])
