"""What commands print under ``--json`` is as their schemas say, and can be read as they say it."""

import json

import pytest
from pydantic import ValidationError

from lengthwise.cli.json_documents import DOCUMENTS, DemoDocument, json_schema
from lengthwise.cli.main import COMMANDS
from lengthwise.config.run_config import Config, load
from lengthwise.report.run_summary import summarise
from tests.cli.conftest import check_document
from tests.report.fake_run import make_run


@pytest.fixture
def here(cli, tmp_path, monkeypatch):
    """An index ``DIR`` of a few texts and a run ``RUN`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SRC").mkdir()
    for number in range(20):
        (tmp_path / "SRC" / f"{number}.txt").write_text("words " * (number + 1))
    assert cli("index", "SRC", "--out", "DIR", "--workers", 1)[0] == 0
    make_run(tmp_path / "RUN", num_steps=4)


PLANNED = ("data.index=DIR", "cluster.name=2xcpu", "plan.policy=static", "data.tokens_per_step=300", "--steps", "2")
ASKED = ("--model", "llama-tiny", "--gpus", "2", "--device", "H100-80GB")
RUNS = [
    ("index", "SRC", "--out", "DIR"), ("index", "--verify", "DIR"), ("stats", "DIR"), ("stats", "DIR", "--sampling"),
    ("memory", *ASKED), ("memory", *ASKED, "--length", "1000"), ("plan", *PLANNED), ("simulate", *PLANNED),
    ("compare", "--lengths", "DIR", *ASKED, "--steps", "1", "--policies", "static,packed"), ("report", "RUN"),
    ("config",), ("config", "--presets"), ("config", "plan.polcy=auto"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_documents_are_as_their_schemas_say(cli, here, arguments):
    code, out, err = cli(*arguments, "--json")  # which checks the document
    assert json.loads(out)["schema_version"] == 1 and (code == 0 or "polcy" in err), err


def test_a_demo_prints_the_figures_of_its_runs(tmp_path):
    runs = [summarise(make_run(tmp_path / "RUN", num_steps=4)).to_json()]
    DemoDocument.model_validate({"schema_version": 1, "runs": runs, "report": "report.html"})


def test_a_document_that_lacks_a_field_or_has_another_version_is_none():
    exported = {"schema_version": 1, "out": "a", "checkpoint": "b", "num_params": 3}
    check_document("export", {**exported, "added": 1})
    for change in ({"num_params": None}, {"schema_version": 2}):
        with pytest.raises(ValidationError):
            check_document("export", {**exported, **change})
    del exported["num_params"]
    with pytest.raises(ValidationError):
        check_document("export", exported)


def test_every_command_has_a_schema_whose_references_lead_somewhere():
    assert list(DOCUMENTS) == list(COMMANDS)
    for command in DOCUMENTS:
        schema = json_schema(command)
        assert "schema_version" in schema["$defs"]["FailureDocument"]["properties"]
        for reference in _references(schema):
            node = schema
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]


def _references(node):
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [value] if key == "$ref" else _references(value)


def test_a_printed_configuration_can_be_read_back(cli, tmp_path):
    _, out, _ = cli("config", "seed=7", "--json")
    (tmp_path / "run.yaml").write_text(out)
    assert load(tmp_path / "run.yaml", []) == Config(seed=7)
