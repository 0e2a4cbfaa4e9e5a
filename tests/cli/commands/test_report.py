import gzip
import json
import os

import pytest

from lengthwise.cli import main as cli
from lengthwise.cli.commands import report
from tests.report.fake_run import make_run


@pytest.fixture
def lengthwise(monkeypatch, capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["lengthwise", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_report_writes_page_and_trace_into_the_run(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=5)
    before = {path.name for path in folder.path.iterdir()}
    code, out, _ = lengthwise("report", folder.path)
    assert code == 0 and "tokens/s" in out and "auto" in out
    assert {path.name for path in folder.path.iterdir()} - before == {"report.html", "trace.json.gz"}
    events = json.loads(gzip.decompress(folder.trace.read_bytes()))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"{kind}rank {rank}" for kind in ("", "predicted ") for rank in range(4)}


def test_report_json_is_one_document(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=5)
    code, out, _ = lengthwise("report", folder.path, "--json", "--warmup", 2)
    document = json.loads(out)
    assert code == 0 and document["report"] == str(folder.report) and document["trace"] == str(folder.trace)
    (summary,) = document["runs"]
    assert summary["num_steps"] == 5 and summary["num_warmup"] == 2 and summary["policy"] == "auto"


def test_a_row_that_is_missing_is_warned_of_in_page_json_and_terminal(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=5)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:2] + lines[3:]))
    code, out, err = lengthwise("report", folder.path, "--json")
    assert code == 0 and json.loads(out)["runs"][0]["missing_steps"] == [[2, 2]]
    words = "The metrics lack a row of step 2; all figures leave it out."
    assert f"warning: {folder.path}: {words}" in err.replace("\n", " ") and words in folder.report.read_text()


def test_several_runs_share_one_page_and_one_trace(lengthwise, tmp_path):
    folders = [make_run(tmp_path / p, policy=p, name=p, num_steps=4).path for p in ("padded", "auto")]
    code, out, _ = lengthwise("report", *folders, "--out", tmp_path / "compare.html", "--json")
    document = json.loads(out)
    assert code == 0 and [run["policy"] for run in document["runs"]] == ["padded", "auto"]
    assert "2 runs compared" in (tmp_path / "compare.html").read_text()
    events = json.loads(gzip.decompress((tmp_path / "compare.trace.json.gz").read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len({e["pid"] for e in events}) == len(names) == 16 and "padded: rank 0" in names
    assert not (folders[0] / "report.html").exists()


def test_long_runs_keep_the_last_steps_in_the_trace(lengthwise, tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.session.run_report.MOST_SPANS", 100)
    folder = make_run(tmp_path / "run", num_steps=20)
    assert lengthwise("report", folder.path)[0] == 0
    events = json.loads(gzip.decompress(folder.trace.read_bytes()))["traceEvents"]
    steps = {e["args"]["step"] for e in events if e["ph"] == "X"}
    assert max(steps) == 19 and 0 not in steps
    assert f"It holds the last {len(steps)} of 20 steps." in folder.report.read_text()


def test_what_is_not_a_run_is_refused(lengthwise, tmp_path):
    code, _, err = lengthwise("report", tmp_path)
    assert code == 2 and "not a run folder" in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_steps_is_refused(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.metrics.unlink()
    code, _, err = lengthwise("report", folder.path)
    assert code == 2 and "no finished step" in err and not folder.report.exists()


def test_a_damaged_plan_is_refused_and_nothing_is_written(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=3)
    good = folder.plans.read_text()
    folder.plans.write_text(good.replace('"step"', '"st', 1))
    code, _, err = lengthwise("report", folder.path)
    assert code == 2 and "plans.jsonl:1 is damaged" in err
    folder.plans.write_text(good.replace('"lr_factor": 1.0', '"lr_factor": 2.0', 1))
    code, _, err = lengthwise("report", folder.path)
    assert code == 4 and "plans.jsonl" in err and "digest" in err
    assert not folder.report.exists() and not folder.trace.exists()


def test_an_unwritable_place_is_refused_and_nothing_is_written(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    code, _, err = lengthwise("report", folder.path, "--out", tmp_path / "missing" / "page.html")
    assert code == 2 and "no folder" in err
    (tmp_path / "page.html").mkdir()
    code, _, err = lengthwise("report", folder.path, "--out", tmp_path / "page.html")
    assert code == 2 and "is a folder" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_trace_holds_the_chosen_steps_and_ranks_measured_and_predicted(lengthwise, tmp_path):
    folder = make_run(tmp_path / "run", num_steps=6)
    options = ("--trace-steps", "2-3", "--trace-ranks", "1", "--kineto", tmp_path / "ranks")
    assert lengthwise("report", folder.path, *options)[0] == 0
    events = json.loads(gzip.decompress(folder.trace.read_bytes()))["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {2, 3}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 1", "predicted rank 1"}
    assert "It holds 2 of 6 steps." in folder.report.read_text()
    (path,) = (tmp_path / "ranks").iterdir()
    kernels = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("cat") == "kernel"]
    assert {e["args"]["step"] for e in kernels} == {2, 3}
    assert "ncclDevKernel_ReduceScatter" in {e["name"] for e in kernels}


def test_ranks_of_several_runs_have_no_folder_of_traces(lengthwise, tmp_path):
    folders = [make_run(tmp_path / name, name=name, num_steps=2).path for name in ("a", "b")]
    code, _, err = lengthwise("report", *folders, "--out", tmp_path / "page.html", "--kineto", tmp_path / "ranks")
    assert code == 2 and "--kineto takes one run" in err and not (tmp_path / "ranks").exists()


def test_what_is_given_instead_of_a_run_is_told_from_it(lengthwise, tmp_path):
    run = make_run(tmp_path / "outputs" / "demo" / "20260101-120000", num_steps=2)
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "nothere": "there is nothing of that name; give the folder that train printed",
        tmp_path / "outputs": f"it has no config.yaml, but {run.path} has; name that, or another run in it",
        run.plans: f"it is a file; give {run.path}",
        tmp_path / "empty": "it has no config.yaml; give the folder that train printed",
    }
    for path, words in cases.items():
        code, out, err = lengthwise("report", path)
        assert code == 2 and not out
        assert err.startswith(f"error: {path} is not a run folder: {words}") and err.count("\n") == 1


def test_a_page_for_a_device_or_fifo_has_its_trace_in_the_run(tmp_path):
    fifo, folder = tmp_path / "fifo", make_run(tmp_path / "run", num_steps=1)
    os.mkfifo(fifo)
    assert report.page_and_trace([folder.path], fifo) == (fifo, folder.trace)
    assert report.page_and_trace([folder.path], tmp_path / "a.html")[1] == tmp_path / "a.trace.json.gz"
