"""Tokenizers: ids mean what they should, and nothing in a tokenizer.json may cut, pad or end a document."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.index.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    KmerTokenizer,
    TokenizerSpec,
    append_eos,
    dtype_for,
    find_tokenizer,
    load_tokenizer,
    parse_kmer,
)
from tests.index.build import build, texts_of, write_jsonl, write_tree


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_bytes_are_their_own_ids(documents):
    flat, lengths = ByteTokenizer().encode(documents)
    assert bytes(flat) == b"".join(documents) and lengths.tolist() == [len(document) for document in documents]


@given(st.lists(st.text(alphabet="ACGTacgtNRn", max_size=40), max_size=6))
def test_triplets_equal_a_dictionary_look_up(documents):
    ids = {
        a + b + c: 16 * i + 4 * j + k
        for i, a in enumerate("ACGT")
        for j, b in enumerate("ACGT")
        for k, c in enumerate("ACGT")
    }
    expected = [[ids.get(text[at : at + 3].upper(), 64) for at in range(0, len(text), 3)] for text in documents]
    flat, lengths = KmerTokenizer(3, 3).encode([text.encode() for text in documents])
    assert flat.tolist() == list(chain(*expected)) and lengths.tolist() == [len(tokens) for tokens in expected]


def kmers_by_hand(text, bases, stride):
    starts = range(0, len(text) - bases + 1, stride)
    runs = [text[at : at + bases].upper() for at in starts]
    tokens = [int(run.translate(str.maketrans("ACGT", "0123")), 4) if set(run) <= set("ACGT") else -1 for run in runs]
    num_covered = starts[-1] + bases if len(starts) else 0
    return [token if token >= 0 else 4**bases for token in tokens] + [4**bases] * (num_covered < len(text))


@given(st.lists(st.text(alphabet="ACGTacgtN", max_size=40), max_size=6), st.integers(1, 12), st.data(), st.booleans())
def test_kmers_with_any_stride_equal_windows_read_by_hand(documents, bases, data, is_pure):
    stride = data.draw(st.integers(1, bases))
    texts = [text.replace("N", "A") if is_pure else text for text in documents]
    expected = [kmers_by_hand(text, bases, stride) for text in texts]
    flat, lengths = KmerTokenizer(bases, stride).encode([text.encode() for text in texts])
    assert flat.tolist() == list(chain(*expected)) and lengths.tolist() == [len(tokens) for tokens in expected]


@given(st.text("ACGT", min_size=6, max_size=60), st.integers(1, 6))
def test_kmers_give_their_bases_back(text, stride):
    tokenizer = KmerTokenizer(6, stride)
    ids = tokenizer.encode_prompt(text)
    assert text.startswith(tokenizer.decode([id for id in ids if id < tokenizer.unknown_id]))
    assert tokenizer.decode([tokenizer.unknown_id]) == "N" * stride


@given(st.text())
def test_bytes_give_the_text_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode_prompt(text), tokenizer.eos_id]) == text


def test_kmer_names_say_bases_and_stride():
    assert [parse_kmer(name) for name in ("3mer", "6mer/2", "12mer/12", "bytes", "6mers", "mer", "6mer/")] == [
        (3, 3), (6, 2), (12, 12), None, None, None, None,
    ]  # fmt: skip
    for name, said in {
        "13mer": "1 to 12 bases, not 13",
        "0mer": "not 0",
        "6mer/7": "1 to 6",
        "6mer/0": "1 to 6",
    }.items():
        with pytest.raises(InputError, match=f"--tokenizer {name}: .*{said}"):
            parse_kmer(name)
    tokenizer = load_tokenizer(TokenizerSpec(kind="6mer/2"))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4098, 4097)
    assert KmerTokenizer(12, 1, append_eos=False).vocab_size == 4**12 + 1


@given(st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=8))
def test_end_of_sequence_follows_every_document(documents):
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    flat, longer = append_eos(np.array(list(chain(*documents)), dtype=np.uint8), lengths, 256)
    assert flat.tolist() == list(chain(*([*document, 256] for document in documents)))
    assert longer.tolist() == (lengths + 1).tolist()


def test_tokens_take_the_narrowest_type_that_holds_them():
    assert [dtype_for(size).name for size in (256, 257, 1 << 16, (1 << 16) + 1)] == [
        "uint8",
        "uint16",
        "uint16",
        "uint32",
    ]


@pytest.mark.parametrize(("eos", "vocab_size", "dtype"), [(True, 257, "uint16"), (False, 256, "uint8")])
def test_no_eos_leaves_the_end_out(tmp_path, eos, vocab_size, dtype):
    store = build(write_jsonl(tmp_path / "a.jsonl", ["ab"]), tmp_path / "out", append_eos=eos)
    assert store.tokens(0).tolist() == [97, 98] + [256] * eos
    assert (store.vocab_size, store.info["dtype"], store.eos_id) == (vocab_size, dtype, 256 if eos else None)


def test_3mer_indexes_fasta_and_nothing_else(tmp_path):
    (tmp_path / "a.fa").write_text(">x\nAAAC\nCC\n>y\nTTTN\n")
    store = build(tmp_path / "a.fa", tmp_path / "out", tokenizer="3mer")
    assert [store.tokens(id).tolist() for id in range(2)] == [[0, 21, 65], [63, 64, 65]]
    overlapping = build(tmp_path / "a.fa", tmp_path / "overlapping", tokenizer="2mer/1")
    assert [overlapping.tokens(id).tolist() for id in range(2)] == [[0, 0, 1, 5, 5, 17], [15, 15, 16, 17]]
    with pytest.raises(InputError, match=r"2mer/1 reads FASTA, but .* is jsonl; add --format fasta if"):
        build(write_jsonl(tmp_path / "a.jsonl", ["ACG"]), tmp_path / "text", tokenizer="2mer/1")


CODE = [f"def f{n}(x):\n    return x * {n}  # <|endoftext|> naïve\n\n\n" for n in range(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    return build(write_jsonl(folder / "a.jsonl", CODE), folder / "out", train_bpe=300, unit_bytes=4096)


def test_a_trained_bpe_gives_the_text_back(trained):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(trained.path / "tokenizer.json"))
    assert trained.vocab_size == 300 and trained.eos_id == tokenizer.token_to_id("<|endoftext|>")
    for id, text in enumerate(CODE):
        *tokens, last = trained.tokens(id).tolist()
        assert last == trained.eos_id and trained.eos_id not in tokens
        assert tokenizer.decode(tokens) == text
    spec = TokenizerSpec(kind="huggingface", path=str(trained.path / "tokenizer.json"), eos_token="<|endoftext|>")
    loaded = load_tokenizer(spec)
    ids = loaded.encode_prompt(CODE[3])
    assert trained.eos_id in ids and loaded.decode(ids) == CODE[3], "a prompt may spell special tokens"
    assert trained.eos_id not in loaded.encode([CODE[3].encode()])[0], "and a document may not"


def test_indexing_with_the_trained_file_gives_the_same_corpus(trained, tmp_path):
    source = trained.path.parent / "a.jsonl"
    again = build(source, tmp_path / "out", tokenizer=str(trained.path))
    assert again.digest == trained.digest and again.eos_id == trained.eos_id


def test_truncation_and_padding_in_the_file_are_switched_off(trained, tmp_path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(trained.path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    same = HuggingFaceTokenizer(tmp_path / "tokenizer.json", eos_token="")
    plain = HuggingFaceTokenizer(trained.path / "tokenizer.json", eos_token="")
    documents = [text.encode() for text in CODE[:3]]
    assert same.encode(documents)[0].tolist() == plain.encode(documents)[0].tolist()


def test_the_end_of_sequence_is_the_one_tokenizer_config_names(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((trained.path / "tokenizer.json").read_bytes())
    assert find_tokenizer(tmp_path)[1] == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    assert find_tokenizer(tmp_path)[1] == "!"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<no such>"}))
    with pytest.raises(InputError, match="no such token"):
        find_tokenizer(tmp_path)


def test_training_is_deterministic(trained, tmp_path):
    again = build(trained.path.parent / "a.jsonl", tmp_path / "out", train_bpe=300, unit_bytes=4096)
    assert (again.path / "tokenizer.json").read_bytes() == (trained.path / "tokenizer.json").read_bytes()


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path):
    source = write_tree(tmp_path / "src", {"a.txt": b"a"})
    (tmp_path / "broken.json").write_text("{}")
    cases = {
        "no tokenizer at": {"tokenizer": str(tmp_path / "nowhere")},
        "not a Hugging Face tokenizer": {"tokenizer": str(tmp_path / "broken.json")},
        "257 entries or more": {"train_bpe": 256},
        "exclude each other": {"train_bpe": 300, "tokenizer": "bytes"},
    }
    for said, choice in cases.items():
        with pytest.raises(InputError, match=said):
            build(source, tmp_path / "out", **choice)
    with pytest.raises(InputError, match=r"tokens already.*leave bytes out"):
        build(write_jsonl(tmp_path / "a.jsonl", [[1]]), tmp_path / "ready", tokenizer="bytes")


def test_a_missing_package_is_one_clear_error_with_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = write_tree(tmp_path / "src", {"a.txt": b"a", "b.parquet": b""})
    for choice in ({"train_bpe": 300, "globs": ("*.txt",)}, {"globs": ("*.parquet",)}):
        with pytest.raises(InputError, match=r"pip install 'lengthwise\[data\]'"):
            build(source, tmp_path / "out", **choice)
    assert texts_of(build(source, tmp_path / "out", globs=("*.txt",), restart=True)) == [b"a"]
