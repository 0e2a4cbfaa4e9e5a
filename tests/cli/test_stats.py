"""``lengthwise stats``: tables for people, JSON for programs."""

import json

import numpy as np
import pytest


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


def test_stats_shows_tables(cli, lengths):
    code, out, err = cli("stats", lengths, "--max-length", 150, "--max-length", 4096)
    assert (code, err) == (0, "")
    for said in ("3 sequences, 203,100 tokens", ">= 128K", "Padding", "4,096", "8 ranks"):
        assert said in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/none.npy"], "no file at"),
        (["{tmp}"], "no index at"),
        (["{npy}", "--max-length", "0"], "--max-length 0"),
        (["{npy}", "--ranks", "0"], "--ranks 0"),
        (["{npy}", "--seed", "-1"], "--seed -1"),
        (["{tmp}/text.npy"], "not a .npy array"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, lengths, tmp_path, arguments, said):
    (tmp_path / "text.npy").write_text("no array")
    code, out, err = cli("stats", *(word.format(tmp=tmp_path, npy=lengths) for word in arguments))
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
