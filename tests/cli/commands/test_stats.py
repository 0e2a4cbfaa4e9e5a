"""``lengthwise stats``: tables for people, JSON for programs."""

import json

import numpy as np
import pytest

from lengthwise.index.sequence_metrics import METRIC_VERSION, values_digest
from lengthwise.index.store import open_index


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([100, 3000, 200_000]))
    return path


def test_stats_of_an_index_and_of_its_lengths_agree(cli, lengths, tmp_path):
    assert cli("index", lengths, "--out", tmp_path / "index")[0] == 0
    of_index = json.loads(cli("stats", tmp_path / "index", "--json")[1])
    of_file = json.loads(cli("stats", lengths, "--json")[1])
    assert {**of_index, "path": ""} == {**of_file, "path": ""}
    assert of_file["num_tokens"] == 203_100 and len(of_file["histogram"]) == 9 and len(of_file["cuts"]) == 8


@pytest.mark.parametrize("options", [[], ["--sampling", "data.tokens_per_step=300K"]], ids=["lengths", "sampling"])
@pytest.mark.parametrize("name", ["index.npy", "index.yaml", "index.yml"])
def test_a_folder_is_an_index_whatever_its_name_ends_in(cli, lengths, tmp_path, name, options):
    said = cli("index", lengths, "--out", tmp_path / name)[2]
    assert f"next: lengthwise stats {tmp_path / name}" in said
    of_index = json.loads(cli("stats", tmp_path / name, *options, "--json")[1])
    assert {**of_index, "path": ""} == {**json.loads(cli("stats", lengths, *options, "--json")[1]), "path": ""}


def test_stats_shows_tables(cli, lengths):
    code, out, err = cli("stats", lengths, "--max-length", 150, "--max-length", 4096)
    assert (code, err) == (0, "")
    for said in ("3 sequences, 203,100 tokens", ">= 128K", "Padding", "4,096", "8 ranks"):
        assert said in out


def test_stats_of_a_tiny_corpus_shows_no_empty_rows(cli, tmp_path):
    np.save(tmp_path / "tiny.npy", np.array([3, 5, 7]))
    out = cli("stats", tmp_path / "tiny.npy")[1]
    assert len(out.splitlines()) < 28 and "< 1K" in out and "1K - 2K" not in out and "2,048" not in out
    assert len(json.loads(cli("stats", tmp_path / "tiny.npy", "--json")[1])["cuts"]) == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/none.npy"], "no file at"),
        (["{tmp}"], "no index at"),
        (["{npy}", "--max-length", "0"], "'--max-length'"),
        (["{npy}", "--ranks", "0"], "'--ranks'"),
        (["{npy}", "seed=-1"], "seed: input should be"),
        (["{tmp}/text.npy"], "not a .npy array"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, lengths, tmp_path, arguments, said):
    (tmp_path / "text.npy").write_text("no array")
    code, out, err = cli("stats", *(word.format(tmp=tmp_path, npy=lengths) for word in arguments))
    assert (code, out) == (2, "") and said in err and "Traceback" not in err


@pytest.fixture
def many(tmp_path):
    path = tmp_path / "many.npy"
    np.save(path, np.random.default_rng(0).lognormal(5, 1, 2000).astype(int) + 1)
    return path


def test_stats_of_an_order_say_what_it_does_to_sampling(cli, many, tmp_path):
    assert cli("index", many, "--out", tmp_path / "index")[0] == 0
    budget = "data.tokens_per_step=4096"
    options = ("--sampling", "data.order=curriculum", "data.pacing=root", "data.pacing_start=0.2", budget)
    of_index, of_file = (json.loads(cli("stats", at, *options, "--json")[1]) for at in (tmp_path / "index", many))
    assert of_index["order"]["start"] == 0.2 and of_index["each_once"] and of_index["tokens"]["most"] <= 8192
    assert of_index["trends"][0]["spearman"] == pytest.approx(of_file["trends"][0]["spearman"]) and of_file["warnings"]
    code, out, err = cli("stats", many, *options)
    assert (code, err) == (0, "")
    for said in (
        "curriculum by length, pacing root from 0.2",
        "Spearman",
        "tokens seen",
        "each sequence once: yes",
        "* steps follow length",
    ):
        assert said in out
    assert "steps are samples of the corpus" in cli("stats", many, "--sampling", budget)[1]


def test_stats_of_an_order_by_a_saved_metric(cli, many, tmp_path):
    index = tmp_path / "index"
    assert cli("index", many, "--out", index)[0] == 0
    by_loss = ("--sampling", "data.order=sorted", "data.metric=loss")
    code, out, err = cli("stats", index, *by_loss)
    assert (code, out) == (2, "") and "no metric 'loss'" in err
    lengths = open_index(index).lengths
    values = -np.load(many).astype(np.float64)
    (index / "metrics").mkdir()
    np.save(index / "metrics" / "loss.npy", values)
    size = (index / "metrics" / "loss.npy").stat().st_size
    info = {"schema_version": METRIC_VERSION, "index_digest": lengths.digest, "files": {"loss.npy": size}}
    info |= {"num_sequences": len(values), "digest": values_digest(values, index_digest=lengths.digest)}
    (index / "metrics" / "loss.json").write_text(json.dumps(info))
    trends = json.loads(cli("stats", index, *by_loss, "--json")[1])["trends"]
    assert [trend["name"] for trend in trends] == ["length", "loss"]
    assert trends[0]["spearman"] < -0.9 and trends[1]["spearman"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.order=cubic"], "data.order"),
        (["data.order=curriculum", "data.pacing=cubic"], "data.pacing"),
        (["data.order=curriculum", "data.pacing_start=2"], "data.pacing_start"),
        (["data.tokens_per_step=0"], "data.tokens_per_step"),
        (["data.order=sorted", "data.metric=loss"], "holds lengths alone"),
        (["data.max_length=100"], "over data.max_length"),
        (["--max-length", "100"], "with --sampling set data.max_length"),
        (["--ranks", "4"], "with --sampling set data.max_length"),
    ],
)
def test_an_order_that_cannot_be_is_refused(cli, many, arguments, said):
    code, out, err = cli("stats", many, "--sampling", *arguments)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err


def test_the_settings_of_a_configuration_are_those_that_sampling_is_reported_of(cli, many, tmp_path):
    assert cli("index", many, "--out", tmp_path / "index")[0] == 0
    data = {"index": str(tmp_path / "index"), "order": "windowed", "window": 50, "sequences_per_step": 16}
    (tmp_path / "run.yaml").write_text(json.dumps({"data": data}))
    code, out, err = cli("stats", tmp_path / "run.yaml", "--sampling")
    assert (code, err) == (0, "") and "125 steps, sorted by length within windows of 50 sequences" in out
    split = ("data.max_length=100", "data.over_length=split")
    pieces = json.loads(cli("stats", tmp_path / "run.yaml", *split, "--json")[1])["num_sequences"]
    report = json.loads(cli("stats", tmp_path / "run.yaml", "--sampling", *split, "--json")[1])
    assert report["num_steps"] == -(-pieces // 16) > 125
