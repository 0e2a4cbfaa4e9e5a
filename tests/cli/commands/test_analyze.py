"""``lengthwise analyze``: what users type, what they read, and the exit code."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.sequence_metrics import open_metric
from lengthwise.index.store import open_index
from lengthwise.runtime.models.hf_folder import save_pretrained
from tests.cli.conftest import Cli
from tests.runtime.models.cases import model_of, tiny

NUM_FILES = 30


@pytest.fixture
def index(cli: Cli, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for number in range(NUM_FILES):
        (source / f"{number:02}.txt").write_text(f"{number} says hello. " * (1 + number * 7 % 11))
    assert cli("index", source, "--out", tmp_path / "index", "--workers", 1)[0] == 0
    return tmp_path / "index"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module of the user's, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"mine_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "FLAG = Path(__file__).with_name('flag')\n"
        "def spread(tokens, id):\n"
        "    if id == 9 and FLAG.exists():\n"
        "        raise RuntimeError('not today')\n"
        "    return float(tokens.std())\n"
        "def constant(tokens, id):\n"
        "    return 1\n"
    )
    return name


def values_of(index, name):
    return open_metric(index, name, digest=open_index(index).digest).values


def test_a_function_of_the_current_folder_is_a_metric_and_the_way_to_train_with_it_is_shown(cli, index, module):
    code, out, err = cli("analyze", index, "--metric", f"{module}:spread")
    store = open_index(index)
    assert code == 0
    assert values_of(index, "spread").tolist() == [float(store.tokens(id).std()) for id in range(NUM_FILES)]
    assert f"spread of 30 sequences ({module}:spread)" in out and "correlation with length: " in out
    assert f"next: lengthwise train data.index={index} data.order=curriculum data.metric=spread" in err
    code, out, err = cli("analyze", index, "--metric", f"{module}:spread")
    assert code == 0 and "metric spread of" in err and "is up to date, nothing to do" in err
    code, out, _ = cli("analyze", index, "--metric", f"{module}:constant", "--name", "flat")
    assert code == 0 and "min 1  p5 1" in out and "correlation with length: none" in out


def test_the_metric_is_one_json_document(cli, index):
    code, out, _ = cli("analyze", index, "--metric", "length", "--json")
    document = json.loads(out)
    lengths = open_index(index).lengths.lengths
    assert code == 0
    assert (document["name"], document["metric"], document["num_sequences"]) == ("length", "length", NUM_FILES)
    assert (document["min"], document["max"], document["mean"]) == (lengths.min(), lengths.max(), lengths.mean())
    assert document["correlation_with_length"] == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}
    assert (document["up_to_date"], document["index"]) == (False, str(index))
    assert document["digest"] == open_metric(index, "length", digest=document["index_digest"]).digest


def test_the_loss_of_a_models_folder_is_a_metric(cli, index, tmp_path):
    save_pretrained(model_of(tiny(vocab_size=257)), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    code, out, err = cli("analyze", index, "--metric", f"loss={tmp_path / 'model'}", "--json", "--device", "cpu")
    assert code == 0 and values_of(index, "loss").dtype == np.float32
    assert json.loads(out)["mean"] == pytest.approx(values_of(index, "loss").astype(float).mean())
    assert f"warning: {tmp_path / 'model'} has a tokenizer.json that {index} was not made with" in err


def test_an_index_made_anew_keeps_its_metrics_and_they_know_that_they_are_not_its_own(cli, index, tmp_path):
    assert cli("analyze", index, "--metric", "length")[0] == 0
    again = ("index", tmp_path / "src", "--out", index, "--workers", 1, "--restart")
    assert cli(*again)[0] == 0
    assert len(values_of(index, "length")) == NUM_FILES  # the same texts
    (tmp_path / "src" / "99.txt").write_text("one more")
    assert cli(*again)[0] == 0
    with pytest.raises(InputError, match="was made of another index"):
        values_of(index, "length")
    code, _, err = cli("analyze", index, "--metric", "length")
    assert code == 2 and "analyze again with --restart" in err
    assert cli("analyze", index, "--metric", "length", "--restart")[0] == 0
    assert len(values_of(index, "length")) == NUM_FILES + 1


def on_two_ranks(index, metric):
    command = [sys.executable, "-m", "lengthwise", "analyze", str(index), "--metric", metric, "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.deep
def test_what_one_process_began_two_ranks_finish(cli, index, module, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    code, _, err = cli("analyze", index, "--metric", f"{module}:spread")
    assert code == 2 and f"{module}:spread fails on sequence 9 (" in err and "RuntimeError: not today" in err
    flag.unlink()
    code, out, err = on_two_ranks(index, f"{module}:spread")
    assert code == 0 and "went on with an interrupted analysis: 9 of 30 blocks were kept" in err, err
    assert "spread of 30 sequences" in out and out.count("correlation") == 1
    store = open_index(index)
    assert values_of(index, "spread").tolist() == [float(store.tokens(id).std()) for id in range(NUM_FILES)]


@pytest.mark.deep
def test_ranks_tell_their_error_once_with_its_exit_code(index, module, tmp_path):
    (tmp_path / "flag").touch()
    code, out, err = on_two_ranks(index, f"{module}:spread")
    assert (code, out) == (2, "") and err.count(f"{module}:spread fails on sequence 9 (") == 1, err
    assert "RuntimeError: not today" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{index}", "--metric", "perplexity"], "no metric 'perplexity'; known are length, loss=FOLDER"),
        (["{index}"], "Missing option '--metric'"),
        (["{tmp}/nowhere", "--metric", "length"], "no index at"),
        (["{index}", "--metric", "length", "--name", "a/b"], "'a/b' cannot name a metric"),
        (["{index}", "--metric", "math:sqrt", "--name", "length"], "choose another --name"),
        (["{index}", "--metric", "math:squirt"], "math has no 'squirt'; did you mean sqrt?"),
        (["{index}", "--metric", "math:sqrt"], "math:sqrt fails on sequence 0 (15 tokens): TypeError"),
        (["{index}", "--metric", "loss={tmp}"], "no model in"),
        (["{index}", "--metric", "length", "--max-length", "5"], "has no model: leave them out"),
        (["{index}", "--metric", "length", "--nproc", "0"], "Invalid value"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, index, tmp_path, arguments, said):
    code, out, err = cli("analyze", *(word.format(tmp=tmp_path, index=index) for word in arguments))
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert not list(index.glob("metrics/*.parts")) or "sqrt" in arguments[-1]
