"""Run folders that were damaged or written by somebody else: `report` refuses them, or shows every name as text."""

import json

import pytest

from tests.cli.bad_inputs import Case, edit_json, few_of_each, no_document, setting, writing

REPORT = ("report", "GOOD/run")
NAN, INFINITY = float("nan"), float("inf")
NASTY = "\"'></title></script><script>alert(1)</script><img src=x onerror=alert(2)>[/b]\x1b[31m"


def edit_line(name: str, change, *, line: int = 1):
    """Change the JSON object on a line of a file."""

    def spoil(folder):
        path = folder / name
        lines = path.read_text().splitlines()
        document = json.loads(lines[line])
        change(document)
        lines[line] = json.dumps(document)
        path.write_text("\n".join(lines) + "\n")

    return spoil


FIGURES = {
    "step": (-1, 1.5, "1", None, True, 10**30),
    "perf/step_time_s": (NAN, INFINITY, -1, "fast", [1], {}, True, 1e300),
    "data/num_tokens": (NAN, -1, "many", [], 1e300),
    "data/pad_frac": (NAN, -0.5, "half"),
    "data/max_len": (INFINITY, "long", -3),
    "loss/avg": ("low", [], {}, True),
    "plan/lower_bound_s": ("x", NAN, -1),
    "lr_factor": ("x", NAN, -1),
}
TIMELINE = "run/timeline/rank_00001.jsonl"
TIMELINES = {
    ("step",): (-1.5, "1", None, [], True),
    ("num_ranks",): (0, 1, "2", None, 10**9, 2.5, True),
    ("spans",): (
        7,
        [1],
        [[0, 1]],
        [[0, 1, "x", "y"]],
        [["a", "b", "data", "c"]],
        [[NAN, 1, "data", "x"]],
        None,
        [[0, 1e300, "data", "x"]],
    ),
    ("memory",): (7, [1], [[0]], [["a", 1]], [[0, NAN]], [[0, INFINITY]], None),
}
LINES = {
    "a number": "7\n",
    "a list": "[1]\n",
    "binary": bytes(range(128, 256)) + b"\n",
    "NUL": "\0\0\n",
    "deep": "[" * 100_000 + "\n",
    "5,000 digits": '{"step": ' + "9" * 5000 + "}\n",
    "cut off in the middle": '{"step": 0\n{"step": 1}\n',
    "no step": '{"loss/avg": 1}\n',
    "nothing": "",
    "one line without an end": '{"step": 0}',
}
DOCUMENTS = ("model.json", "corpus.json", "ledger.json", "status.json", "sampling.json", "provenance.json")


def _cases() -> list[Case]:
    cases = [
        Case(
            name=f"{key}={value}",
            arguments=REPORT,
            words=("metrics.jsonl",),
            spoil=edit_line("run/metrics.jsonl", setting(key, to=value)),
        )
        for key, values in FIGURES.items()
        for value in values
    ]
    cases += [
        Case(
            name=f"timeline {keys[0]}={str(value)[:20]}",
            arguments=REPORT,
            words=("timeline",),
            spoil=edit_line(TIMELINE, setting(*keys, to=value)),
        )
        for keys, values in TIMELINES.items()
        for value in values
    ]
    cases += [
        Case(name=f"metrics: {name}", arguments=REPORT, words=("run",), spoil=writing("run/metrics.jsonl", text))
        for name, text in LINES.items()
    ]
    for file in ("run/plans.jsonl", TIMELINE):
        cases += [
            Case(name=f"{file}: {name}", arguments=REPORT, words=("run",), spoil=writing(file, text))
            for name, text in LINES.items()
            if name not in ("nothing", "one line without an end")
        ]
    cases += [
        Case(name=f"{name}: {what}", arguments=REPORT, words=(name,), spoil=writing(f"run/{name}", text))
        for name in DOCUMENTS
        for what, text in {
            "a list": "[1]",
            "NaN": '{"a": NaN}',
            "cut off": "{",
            "nothing": "",
            "deep": '{"a":' * 99_999,
        }.items()
    ]
    cases += [
        Case(name=f"config.yaml: {name}", arguments=REPORT, words=("run",), spoil=spoil)
        for name, (spoil, _) in no_document("run/config.yaml").items()
    ]
    cases += [
        Case(
            name="histogram of words",
            arguments=REPORT,
            words=("corpus.json",),
            spoil=edit_json("run/corpus.json", setting("histogram", to=["x"])),
        ),
        Case(
            name="histogram that is none",
            arguments=REPORT,
            words=("corpus.json",),
            spoil=edit_json("run/corpus.json", setting("histogram", to=7)),
        ),
        Case(
            name="histogram of NaN",
            arguments=REPORT,
            words=("corpus.json",),
            spoil=edit_json("run/corpus.json", setting("histogram", 0, "num_sequences", to=NAN)),
        ),
        Case(
            name="histogram of text",
            arguments=REPORT,
            words=("corpus.json",),
            spoil=edit_json("run/corpus.json", setting("histogram", 0, "low", to="x")),
        ),
        Case(
            name="a rank too many",
            arguments=REPORT,
            words=("timeline",),
            spoil=lambda folder: _copy(folder / TIMELINE, "rank_99999.jsonl"),
        ),
        Case(
            name="a rank without number",
            arguments=REPORT,
            words=("timeline",),
            spoil=lambda folder: _copy(folder / TIMELINE, "rank_x.jsonl"),
        ),
        Case(name="no run", arguments=("report", "GOOD/index"), words=("not a run folder",)),
        Case(name="nowhere", arguments=("report", "GOOD/nowhere[/b]"), words=("nowhere[/b] is not a run folder",)),
        Case(name="a name too long", arguments=("report", "x" * 5000), words=("rror",)),
        Case(name="no place", arguments=(*REPORT, "--out", "GOOD/nowhere/page.html"), words=("there is no folder",)),
        Case(name="a folder as page", arguments=(*REPORT, "--out", "GOOD"), words=("is a folder",)),
        Case(name="resume nowhere", arguments=("train", "--resume", "GOOD/nowhere"), words=("not a run folder",)),
        Case(
            name="resume a damaged one",
            arguments=("train", "--resume", "GOOD/run"),
            words=("run/config.yaml",),
            spoil=writing("run/config.yaml", "a: ["),
        ),
    ]
    return cases


def _copy(path, name):
    (path.parent / name).write_bytes(path.read_bytes())


CASES = _cases()


@pytest.mark.parametrize("case", few_of_each(CASES), ids=[f"{k}-{case.name[:40]!a}" for k, case in enumerate(CASES)])
def test_a_run_that_was_damaged_is_refused_with_the_name_of_the_file(case, refuse):
    refuse(case)


def _everywhere(value):
    """Every text of a document replaced by one that is code to a browser."""
    if isinstance(value, dict):
        return {name: _everywhere(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_everywhere(item) for item in value]
    return NASTY if isinstance(value, str) else value


def test_every_text_of_a_run_is_text_in_its_page(cli, refuse, tmp_path, tmp_path_factory):
    refuse(CASES[0])  # for its copy of the good inputs
    run = tmp_path / "inputs" / "run"
    for path in run.glob("*.json"):
        path.write_text(json.dumps(_everywhere(json.loads(path.read_text()))))
    (run / "config.yaml").write_text(
        json.dumps({"name": NASTY.replace("\x1b", ""), "data": {"index": NASTY.replace("\x1b", "")}})
    )
    edit_line("run/metrics.jsonl", setting("step", to=1))(tmp_path / "inputs")
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({**json.loads(line), NASTY: NASTY}) + "\n"
            for line in (run / "metrics.jsonl").read_text().splitlines()
        )
    )
    for path in (run / "timeline").glob("*"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["spans"] = [[start, end, kind, NASTY] for start, end, kind, _ in row["spans"]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = cli("report", run, run, "--out", tmp_path / "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text().lower()
    assert page.count("<script") == 1 and "<img" not in page and page.count("</title>") <= page.count("<title>")
    assert "\x1b" not in out + err


def test_a_loss_that_is_no_number_is_shown(cli, refuse, tmp_path):
    refuse(CASES[0])
    run = tmp_path / "inputs" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["step"] = 1
    lines[-1]["loss/avg"] = NAN
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli("report", run)[0] == 0 and (run / "report.html").is_file()
