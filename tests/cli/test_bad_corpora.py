"""Whatever a corpus holds, ``lengthwise index`` takes it or says in one sentence what is wrong, and leaves nothing."""

import os
import re
from importlib.util import find_spec
from itertools import chain

import pytest

from tests.data.bad_corpora import json_and_tar_cases, text_cases
from tests.data.bad_tables import (
    fasta_cases,
    lengths_cases,
    megatron_cases,
    option_cases,
    saved_cases,
    table_cases,
    tokenizer_cases,
)

CASES = [
    *chain(text_cases(), json_and_tar_cases(), lengths_cases(), fasta_cases(), megatron_cases(), option_cases()),
    *(chain(saved_cases(), table_cases()) if find_spec("pyarrow") else ()),
    *(tokenizer_cases() if find_spec("tokenizers") else ()),
]


@pytest.fixture(autouse=True)
def no_power_loss(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_there_are_many_bad_corpora():
    assert len(CASES) >= 120 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace("/", "|"))
def test_a_bad_corpus_is_refused_in_one_sentence_and_nothing_is_left(cli, tmp_path, case):
    source = tmp_path / "src"
    source.mkdir()
    words = case.make(source)
    before = sorted(path.name for path in source.rglob("*"))
    workers = () if "--workers" in words else ("--workers", 1)
    code, out, err = cli("index", *words, "--out", tmp_path / "made" / "index", *workers)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err and len(err) < 1500
    assert re.search(case.said, err), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    assert sorted(path.name for path in source.rglob("*")) == before
