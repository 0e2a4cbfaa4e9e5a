"""The page says what has been seen of every part of a corpus, and how long ranks waited for data."""

import json

import pytest

from lengthwise.report.record import read_record
from lengthwise.report.summary import summarise
from lengthwise.report.words import what_ran
from tests.report.fake_run import make_run

WEB = {"name": "web", "repeat": 1.0, "sequences_seen": 1200, "tokens_seen": 98765, "passes": 1.5, "refused": {}}
CODE = {**WEB, "name": "code", "repeat": 2.5, "passes": 3.75, "refused": {"empty": 1028, "undecodable": 4}}


@pytest.fixture
def folder(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=3)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row, wait_s in zip(rows, (0.5, 0.02, 0.04)):
        row["time/data_wait_s"], row["perf/step_time_s"] = wait_s, 1.0
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def facts(folder):
    return dict(what_ran(read_record(folder), summarise(folder)))


def test_every_part_is_told_by_name_with_what_the_index_left_out(folder):
    folder.write_json("ledger.json", {"rule": "error", "max_length": None, "parts": [WEB, CODE]})
    told = facts(folder)
    assert told["Seen of web"] == "1,200 sequences, 98,765 tokens, 1.5 passes"
    assert told["Seen of code"] == (
        "1,200 sequences, 98,765 tokens, 3.75 passes, 2.5 an epoch; left out when it was indexed: 1,028 empty, "
        "4 undecodable"
    )
    folder.write_json("ledger.json", {"rule": "error", "max_length": None, "parts": [WEB]})
    assert facts(folder)["Seen"] == told["Seen of web"]


def test_waiting_for_data_is_a_share_of_the_time_of_the_steps_after_the_warm_up(folder):
    assert summarise(folder).data_wait == pytest.approx(0.03)
    assert facts(folder)["Data"] == "waited for 3.00% of the time"
    assert summarise(make_run(folder.path.parent / "old", num_steps=2)).data_wait is None
