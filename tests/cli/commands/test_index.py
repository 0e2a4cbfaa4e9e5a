"""``lengthwise index``: what users type, what they read, and the exit code."""

import json

import pytest


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for name in ("a.txt", "b.txt"):
        (source / name).write_text(f"text of {name}")
    (source / "empty.txt").write_text("")
    return source


def test_index_prints_one_json_document(cli, folder, tmp_path):
    code, out, _ = cli("index", folder, "--out", tmp_path / "index", "--json", "--workers", 1)
    document = json.loads(out)
    assert code == 0
    assert (document["num_sequences"], document["vocab_size"], document["up_to_date"]) == (2, 257, False)
    assert document["ledger"]["empty"] == 1 and document["path"] == str(tmp_path / "index")
    assert json.loads(cli("index", folder, "--out", tmp_path / "index", "--json")[1])["up_to_date"]


def test_index_says_what_was_left_out_on_stderr(cli, folder, tmp_path):
    code, out, err = cli("index", folder, "--out", tmp_path / "index")
    assert (code, out) == (0, "")
    assert "2 sequences, 28 tokens" in err and "left out: 1 document (empty), such as empty.txt" in err
    assert "up to date" in cli("index", folder, "--out", tmp_path / "index")[2]


def test_one_sequence_of_one_token_is_written_in_the_singular(cli, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [6]}\n')
    index = tmp_path / "index"
    built = cli("index", tmp_path / "a.jsonl", "--field", "input_ids", "--out", index)[2]
    assert "1 sequence, 1 token, longest 1" in built
    assert "1 sequence, all as indexed" in cli("index", "--verify", index)[2]
    assert "1 sequence, 1 token\n" in cli("stats", index)[1]
    assert "length of 1 sequence (" in cli("analyze", index, "--metric", "length")[1]


def test_columns_that_are_not_used_are_named_once(cli, tmp_path):
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"input_ids": [1, 2], "url": "x"}\n{"input_ids": [3, 4], "score": 0.5, "loss_weights": [0, 1]}\n')
    words = ("index", rows, "--workers", 1, "--out")
    code, _, err = cli(*words, tmp_path / "out")
    assert code == 2 and "a.jsonl:2: column 'loss_weights' may say what is learned" in err
    code, out, err = cli(*words, tmp_path / "out", "--ignore", "loss_weights", "--json")
    assert code == 0 and json.loads(out)["unused_columns"] == ["loss_weights", "score", "url"]
    code, _, err = cli(*words, tmp_path / "all", "--loss", "all")
    assert code == 0 and err.count("columns not used: loss_weights, score, url") == 1


def test_verify_finds_a_changed_token(cli, folder, tmp_path):
    index = tmp_path / "index"
    assert cli("index", folder, "--out", index)[0] == 0
    assert cli("index", "--verify", index)[0] == 0
    assert json.loads(cli("index", "--verify", index, "--json")[1])["verified"]
    tokens = index / "tokens.bin"
    tokens.write_bytes(b"!" + tokens.read_bytes()[1:])
    code, _, err = cli("index", "--verify", index)
    assert code == 4 and "not the ones indexed" in err and "Traceback" not in err


def test_python_stdlib_is_a_corpus(cli, tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("os.py", "test/test_os.py", "site-packages/x.py", "__pycache__/os.py", "json/data.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    (library / "latin.py").write_bytes(b"# \xe9")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    code, out, _ = cli("index", "--python-stdlib", "--out", tmp_path / "index", "--json")
    document = json.loads(out)
    assert code == 0 and document["num_sequences"] == 2 and document["ledger"]["undecodable"] == 1


def test_a_split_and_a_field_are_chosen_by_name(cli, tmp_path):
    pa = pytest.importorskip("pyarrow")
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.ipc.new_stream(saved / "x.arrow", pa.schema({"ids": pa.list_(pa.int32())})) as writer:
        writer.write(pa.record_batch({"ids": pa.array([[1, 2], [3]], pa.list_(pa.int32()))}))
    (saved / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    (saved / "dataset_info.json").write_text("{}")
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    arguments = ("index", saved.parent, "--out", tmp_path / "index", "--field", "ids", "--json")
    document = json.loads(cli(*arguments, "--split", "train")[1])
    assert (document["num_sequences"], document["num_tokens"], document["vocab_size"]) == (2, 3, 4)
    code, out, err = cli(*arguments[:-1])
    assert (code, out) == (2, "") and "--split (splits: train, test)" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/nowhere", "--out", "{tmp}/i"], "no file or folder at"),
        (["{src}"], "--out DIR"),
        (["--out", "{tmp}/i"], "either SRC"),
        (["{src}", "--python-stdlib", "--out", "{tmp}/i"], "either SRC"),
        (["{src}", "--out", "{tmp}/i", "--on-empty", "error"], "empty.txt is empty"),
        (["{src}", "--out", "{tmp}/i", "--glob", "*.md"], "no file that matches *.md"),
        (["{src}", "--out", "{tmp}/i", "--workers", "0"], "--workers 0"),
        (["{src}", "--out", "{src}"], "is not empty"),
        (["{src}/a.txt", "--out", "{tmp}/i", "--glob", "*"], "leave --glob out"),
        (["{src}", "--out", "{tmp}/i", "--split", "train"], "leave it out"),
        (["--verify"], "give the folder of the index"),
        (["--verify", "{src}"], "no index at"),
        (["{src}", "--out", "{tmp}/i", "--on-empty", "keep"], "Invalid value"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, folder, tmp_path, arguments, said):
    code, out, err = cli("index", *(word.format(tmp=tmp_path, src=folder) for word in arguments))
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
