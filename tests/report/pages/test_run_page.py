import base64
import csv
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from urllib.parse import unquote

import pytest

from lengthwise.report.pages.csv_link import csv_text, file_name
from lengthwise.report.pages.history_figures import history_figures
from lengthwise.report.pages.run_figures import RunReport, loss_figure
from lengthwise.report.pages.run_page import render_page
from lengthwise.report.pages.run_text import what_ran
from lengthwise.report.pages.runs_table import labels
from lengthwise.report.pages.templates import FOLDER as TEMPLATES
from lengthwise.report.record import read_record
from lengthwise.report.run_summary import MOST_PICKED, summarise_record
from lengthwise.report.units import count, number, share
from tests.report.fake_run import edit_row, make_run, simulate

NASTY = "</title><script>alert(1)</script>"
MOST_BYTES = 260_000
MOST_BYTES_OF_SCRIPT = 4_000
VOID = {"meta", "br", "rect", "line", "circle", "path"}
LEAST_CONTRAST = 4.5
LEAST_CONTRAST_OF_SHAPES = 3.0


def report(folder, *, predicted: bool = True) -> RunReport:
    record = read_record(folder)
    timelines = {step: simulate(plan) for step, plan in record.plans.items()} if predicted else {}
    return RunReport(record=record, summary=summarise_record(record), predicted=timelines)


class Balance(HTMLParser):
    """Checks that every element that is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


LINK = re.compile(r'<a class="csv" download="([a-z0-9-]+\.csv)" href="data:text/csv;charset=utf-8,([^"]*)">CSV</a>')


def without_links(page):
    """The page without its downloads, its own script and the header that forbids all others."""
    page = re.sub(r"<script>.*?</script>|<meta http-equiv[^>]*>", "", LINK.sub("", page), flags=re.DOTALL)
    assert "href=" not in page and "<script" not in page
    return page


def downloads(page):
    """The tables of a page's links, by file name."""
    return [(name, list(csv.reader(StringIO(unquote(data))))) for name, data in LINK.findall(page)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    return [make_run(base / policy, policy=policy, name=f"stdlib-{policy}") for policy in ("padded", "packed", "auto")]


def test_page_has_the_key_figures_of_the_summary(folders):
    one = report(folders[2])
    page = render_page([one], trace="trace.json.gz")
    s = one.summary
    for text in (s.name, s.policy, count(s.tokens_per_s), share(s.idle_fraction), share(s.gap), number(s.final_loss)):
        assert text in page
    for title in ("Sequence lengths", "Loss", "A typical step", "The worst step", "Idle share", "Padding share"):
        assert f"<h4>{title}</h4>" in page
    assert "trace.json.gz" in page and page.count('role="img"') >= 6


def test_page_needs_nothing_outside_itself(folders):
    page = render_page([report(folder) for folder in folders], trace="trace.json.gz")
    assert re.findall(r"https?:|src=|@import|url\(", without_links(page)) == []
    assert not Balance(page).tags & {"link", "img", "iframe", "noscript"}
    assert len(page) < MOST_BYTES


def test_every_figure_has_its_numbers_as_csv(folders):
    run = report(folders[0])
    page = render_page([run])
    tables = dict(downloads(page))
    assert len(downloads(page)) == page.count('<div class="plot') + 1  # and the slowest steps
    chart = loss_figure(run).chart
    assert tables["loss.csv"] == [list(chart.columns), *(list(row) for row in chart.rows)]
    assert [float(row[1]) for row in tables["loss.csv"][1:]] == pytest.approx(
        [row["loss/avg"] for row in run.record.rows], rel=1e-3
    )


def test_a_cell_that_a_spreadsheet_would_compute_is_text():
    rows = (("=1+1", "-2.0 %"), ('a,"b"\n', "+3"), ("@x", "-cmd"))
    parsed = list(csv.reader(StringIO(csv_text(("a", "b"), rows))))
    assert parsed == [["a", "b"], ["'=1+1", "-2.0 %"], ['a,"b"\n', "+3"], ["'@x", "'-cmd"]]
    assert file_name("The worst step: <x>") == "the-worst-step-x.csv" and file_name("日本") == "figure.csv"


def test_the_only_script_is_small_and_the_page_forbids_every_other(folders):
    page = render_page([report(folder) for folder in folders])
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(script) < MOST_BYTES_OF_SCRIPT and not re.findall(r"fetch|XMLHttp|import|eval|innerHTML|http", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert html.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[0]) == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_runs_can_be_picked_and_all_are_shown_without_a_script(folders):
    page = render_page([report(folder) for folder in folders])
    assert re.findall(r'<section data-policy="([^"]*)">', page) == ["padded", "packed", "auto"]
    assert not re.search(r"<[^>]*\shidden[\s>=]", without_links(page))
    assert "data-policy" not in without_links(render_page([report(folders[0])]))


def test_every_plot_has_its_table(folders):
    page = render_page([report(folders[0])])
    assert page.count('<div class="plot') == page.count("<summary>Numbers</summary>") >= 6


def test_comparison_comes_first_and_names_the_factor(folders):
    runs = [report(folder) for folder in folders]
    page = render_page(runs)
    speeds = [run.summary.tokens_per_s for run in runs]
    factor = max(speeds) / min(speeds)
    assert f"auto trains {factor:.2f} times as many tokens per second as padded." in page
    assert page.index("Loss over tokens") < page.index("What ran")
    assert page.count("<h2>") == 3 and f"{speeds[2] / speeds[0]:.2f}x" in page


def test_runs_of_one_policy_are_told_apart(folders, tmp_path):
    twin = make_run(tmp_path / "twin", policy="padded", name="twin", seed=5)
    page = render_page([report(folders[0]), report(twin)])
    assert "<h2>stdlib-padded</h2>" in page and "<h2>twin</h2>" in page
    page = render_page([report(twin), report(twin)])
    assert "<h2>1: twin padded</h2>" in page and "<h2>2: twin padded</h2>" in page


def test_what_users_name_is_escaped(tmp_path):
    folder = make_run(tmp_path / "a<img src=x>&b", num_steps=3, status={"state": "failed", "error": NASTY})
    folder.config.write_text(f"name: '{NASTY}'\n# {NASTY}\n")
    for page in (render_page([report(folder)]), render_page([report(folder), report(folder)], trace=NASTY)):
        assert page.count("<script") == 1 and "<img" not in page
        assert "&lt;/title&gt;&lt;script&gt;alert(1)" in page
        Balance(page)


@pytest.mark.parametrize(
    "changes", [{"timeline": False}, {"num_steps": 1}, {"num_ranks": 1}, {"corpus": False}, {"status": {}}]
)
def test_missing_pieces_become_sentences(tmp_path, changes):
    one = report(make_run(tmp_path / "run", **{"num_steps": 3, **changes}), predicted=False)
    page = render_page([one])
    Balance(page)
    if changes.get("timeline") is False:
        assert page.count("No timelines were recorded") >= 3
    if changes.get("corpus") is False:
        assert "did not record the lengths" in page
    if changes.get("num_steps") == 1:
        assert "One finite value" in page
    render_page([one, one])


def test_bare_metrics_make_a_page(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2, timeline=False, corpus=False, status={})
    for name in ("plans.jsonl", "ledger.json"):
        (folder.path / name).unlink()
    folder.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    folder.config.write_text("")
    page = render_page([report(folder)])
    assert "n/a" in page and "did not record its step times" in page
    render_page([report(folder), report(folder)])


def test_losses_that_are_not_finite_are_counted(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=5)
    edit_row(folder, 2, loss__avg=math.nan)
    edit_row(folder, 4, loss__avg=math.inf)
    page = render_page([report(folder)])
    assert "Not finite in 2 of 5 steps, first in step 2." in page
    for step in range(5):
        edit_row(folder, step, loss__avg=math.nan)
    assert "No step has a finite loss. Not finite in 5 of 5 steps" in render_page([report(folder)])


def test_a_run_that_failed_or_goes_on_says_so(tmp_path):
    failed = make_run(tmp_path / "a", num_steps=2, status={"state": "failed", "error": "rank 1 left"})
    assert "The run ended as failed: the report has 2 of 2 steps. rank 1 left" in render_page([report(failed)])
    going = make_run(tmp_path / "b", num_steps=2, status={"state": "running"})
    assert "still going, or was killed" in render_page([report(going)])
    done = make_run(tmp_path / "c", num_steps=2)
    assert 'class="alarm"' not in render_page([report(done)])


def test_the_length_rule_is_told_in_words(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.config.write_text("data: {max_length: 4096, over_length: truncate}\n")
    folder.write_json("ledger.json", {"rule": "truncate", "max_length": 4096, "truncated": 17, "tokens_cut": 70123})
    page = render_page([report(folder)])
    assert "at most 4,096 tokens, longer ones are cut off there; 17 sequences cut, losing 70,123 tokens" in page


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read_in_both_modes(folders, mode):
    blocks = re.findall(r":root \{(.*?)\}", render_page([report(folders[0])]), flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})[;\s]", blocks[mode]))
    pairs = [("ink", "paper"), ("ink", "card"), ("soft", "paper"), ("soft", "card"), ("accent", "paper")]
    for text, ground in [*pairs, ("alarm-ink", "alarm")]:
        assert contrast(colours[text], colours[ground]) >= LEAST_CONTRAST, (text, ground)
    for k in range(6):
        assert contrast(colours[f"s{k}"], colours["paper"]) >= LEAST_CONTRAST_OF_SHAPES, k


def test_every_colour_class_has_a_colour(folders):
    page = render_page([report(folder) for folder in folders])
    used = set(re.findall(r"\b(k-\w+|s\d)\b", page[page.index("<main>") :]))
    assert used and all(f".{name} {{ --c:" in page for name in used)


def test_equal_runs_give_equal_pages(folders):
    assert render_page([report(folders[0])]) == render_page([report(folders[0])])
    assert json.loads(folders[0].metrics.read_text().splitlines()[0])["step"] == 0


def test_what_every_step_recorded_is_a_line_over_steps(tmp_path):
    run = report(make_run(tmp_path / "run", num_steps=12))
    by_title = {figure.title: figure for figure in history_figures(run)}
    assert list(by_title) == ["Throughput", "Memory", "Learning rate", "Gradient norm"]
    for title, column in (
        ("Memory", "memory/max_reserved_gib"),
        ("Learning rate", "lr"),
        ("Gradient norm", "grad_norm"),
    ):
        shown = [(step, number(row[column])) for row, (step, _) in zip(run.record.rows, by_title[title].chart.rows)]
        assert list(by_title[title].chart.rows) == shown and len(shown) == 12
    assert "step 3 (after 0:00:03): throughput" in by_title["Throughput"].chart.svg
    assert "step 3 (after 0:00:03): loss" in loss_figure(run).chart.svg


def test_the_memory_of_a_device_is_a_line_above_what_is_used(tmp_path):
    run = report(make_run(tmp_path / "run", num_steps=12))
    chart = next(figure.chart for figure in history_figures(run) if figure.title == "Memory")
    assert "memory of a device, 16.0 GiB" in chart.svg.replace("\u00a0", " ")
    shape = r'd="M[\d.]+ ([\d.]+)[^"]*" class="{}"'
    (down,), used = ([float(y) for y in re.findall(shape.format(kind), chart.svg)] for kind in ("diagonal", "line s0"))
    assert down == pytest.approx(150 * (1 - 16 / 20)) and all(down < y for y in used)


def test_a_run_of_an_earlier_version_says_what_it_did_not_record(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=4, provenance=False)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row in rows:
        for name in ("timestamp", "lr", "grad_norm", "memory/max_reserved_gib"):
            del row[name]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = report(folder)
    missing = {figure.title: figure.missing for figure in history_figures(run) if figure.chart is None}
    assert missing == {
        "Memory": "The run did not record it (memory/max_reserved_gib).",
        "Learning rate": "The run did not record it (lr).",
        "Gradient norm": "The run did not record it (grad_norm).",
    }
    assert run.record.moments == {} and "Started" not in dict(what_ran(run.record, run.summary))


def test_the_page_says_when_where_and_by_which_command_the_run_was_started(tmp_path):
    run = report(make_run(tmp_path / "run", num_steps=3))
    facts = dict(what_ran(run.record, run.summary))
    assert facts["Started"] == "2026-01-01 12:00:00 UTC on node-17, start 2"
    assert facts["Software"] == "Lengthwise 0.1.0 (0123456789), torch 2.10.0, Python 3.11.2"
    assert facts["Command"] == "lengthwise train config.yaml"


def test_a_reader_picks_among_an_even_choice_of_steps(tmp_path):
    page = render_page([report(make_run(tmp_path / "run", num_steps=30))])
    steps = [int(step) for step in re.findall(r'data-step="Step (\d+)"', page)]
    assert len(steps) == MOST_PICKED and steps[0] == 0 and steps[-1] == 29
    assert max(b - a for a, b in pairwise(steps)) - min(b - a for a, b in pairwise(steps)) <= 1


def test_the_page_says_how_many_timelines_were_thinned(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=8)
    assert "Timelines of" not in render_page([report(folder)])
    kept = folder.timeline(1).read_text().splitlines(keepends=True)[::2]
    folder.timeline(1).write_text("".join(kept))
    assert "Timelines of 4 of 8 steps are kept; older ones are thinned" in render_page([report(folder)])


def test_on_paper_colours_stay_and_figures_are_not_cut():
    css = re.sub(r"\s+", " ", (TEMPLATES / "report.css").read_text())
    on_paper = css.partition("@media print {")[2]
    assert "@page { size: A4;" in css and "print-color-adjust: exact" in on_paper
    assert re.search(r"figure, [^{]*tr[^{]*\{ break-inside: avoid", on_paper)
    assert "@media screen and (prefers-color-scheme: dark)" in css, "a dark page is printed on white"


def test_runs_of_one_name_and_policy_are_told_apart_by_their_folders(tmp_path):
    runs = [report(make_run(tmp_path / name, num_steps=2)) for name in ("a", "b")]
    assert labels([run.summary for run in runs]) == [str(tmp_path / name) for name in ("a", "b")]
    assert labels([runs[0].summary] * 2) == [f"{k}: {runs[0].summary.name} {runs[0].summary.policy}" for k in (1, 2)]
