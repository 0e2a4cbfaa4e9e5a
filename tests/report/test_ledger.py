"""The page says what has been seen of every part of a corpus, and how long ranks waited for data."""

import json

import pytest
import yaml

from lengthwise.report.pages.run_text import order_words, what_ran
from lengthwise.report.record import read_record
from lengthwise.report.run_summary import summarise
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


def test_order_and_scaling_are_told_with_what_they_do(folder):
    told, config = facts(folder), yaml.safe_load(folder.config.read_text())
    assert told["Order"] == "shuffled" and "Learning-rate" not in told
    order = {"name": "curriculum", "metric": "loss 92f6", "pacing": "step", "start": 0.25, "stages": 4, "epochs": 2}
    folder.write_json("sampling.json", {"order": order, "warnings": ["steps follow loss"]})
    config |= {"optim": {"lr_scaling": "sqrt", "lr_scaling_by": "sequences"}}
    folder.config.write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row, factor in zip(rows, (1.0, 0.5, 1.25)):
        row["lr_factor"] = factor
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = facts(folder)
    assert told["Order"] == (
        "curriculum by loss, pacing step from 0.25 in 4 stages, shuffled after 2 epochs; steps follow loss"
    )
    assert told["Learning-rate"] == "scaled by the square root of the sequences of each batch, by 0.50 to 1.25"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"name": "corpus"}, "in the order of the corpus"),
        ({"name": "sorted", "metric": "length 12"}, "sorted by length"),
        (
            {"name": "windowed", "metric": "given 3", "window": 9999},
            "sorted by given within windows of 9,999 sequences",
        ),
        (
            {
                "name": "curriculum",
                "metric": "length 1",
                "pacing": "natural",
                "start": 0.1,
                "stages": 5,
                "epochs": None,
            },
            "curriculum by length, pacing natural, 5 groups",
        ),
    ],
)
def test_orders_are_told_in_words(order, words):
    assert order_words(order) == words


def test_waiting_for_data_is_a_share_of_the_time_of_the_steps_after_the_warm_up(folder):
    assert summarise(folder).data_wait == pytest.approx(0.03)
    assert facts(folder)["Data"] == "waited for 3.00% of the time"
    assert summarise(make_run(folder.path.parent / "old", num_steps=2)).data_wait is None
