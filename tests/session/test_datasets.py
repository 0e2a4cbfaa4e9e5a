"""Whatever users keep sequences in is a corpus."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.session.datasets import read_sequences
from tests.index.build import build, write_jsonl
from tests.session import models
from tests.session.loops import step_through

pytestmark = pytest.mark.usefixtures("unchecked")

ROWS = [[5, 6, 7, 8, 9], [1, 2], [3, 3, 3, 4]]


@pytest.mark.parametrize(
    "corpus",
    [
        ROWS,
        [np.array(row, dtype=np.uint16) for row in ROWS],
        [torch.tensor(row) for row in ROWS],
        [{"input_ids": row, "text": "left out"} for row in ROWS],
        [{"tokens": torch.tensor(row)} for row in ROWS],
    ],
    ids=["lists", "arrays", "tensors", "dictionaries", "tokens"],
)
def test_rows_of_any_kind_are_sequences(corpus):
    found = read_sequences(corpus)
    assert found.lengths.lengths.tolist() == [5, 2, 4]
    assert [found.tokens(number).tolist() for number in range(3)] == ROWS
    assert found.labels is None


def test_labels_are_cut_as_their_tokens_are():
    labels = [[-100, -100, 7, 8, 9], [1, 2], [-100, 3, 3, 4]]
    items = [{"input_ids": row, "labels": label} for row, label in zip(ROWS, labels)]
    found = read_sequences(items, max_length=3, over_length="split")
    assert found.lengths.lengths.tolist() == [3, 2, 2, 2, 2]
    assert [found.tokens(number).tolist() for number in range(5)] == [[5, 6, 7], [8, 9], [1, 2], [3, 3], [3, 4]]
    assert [found.labels(number).tolist() for number in range(5)] == [
        [-100, -100, 7],
        [8, 9],
        [1, 2],
        [-100, 3],
        [3, 4],
    ]


def test_slots_of_several_tokens_count_as_so_many():
    found = read_sequences(models.films(3), slot_tokens=4)
    films = models.films(3)
    assert found.lengths.lengths.tolist() == [4 * len(film) for film in films]
    for number, film in enumerate(films):
        np.testing.assert_array_equal(found.tokens(number), film)


def test_long_films_are_left_out_and_never_cut():
    films = models.films(6)
    kept = [film for film in films if len(film) <= 9]
    found = read_sequences(films, slot_tokens=4, max_length=36, over_length="drop")
    assert [len(found.tokens(number)) for number in range(len(found.lengths))] == [len(film) for film in kept]
    with pytest.raises(InputError, match=r"slots of 4 tokens cannot be cut; use drop"):
        read_sequences(films, slot_tokens=4, max_length=36, over_length="truncate")


def test_corpora_with_other_tokens_have_other_digests():
    digests = {read_sequences(corpus).lengths.digest for corpus in (ROWS, [row[::-1] for row in ROWS])}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("corpus", "options", "named"),
    [
        (iter(ROWS), {}, r"list_iterator has not"),
        (["some words"], {}, r"item 0 is text; a corpus holds token ids: tokenise it first"),
        ([{"text": "words"}], {}, r"item 0 has text, and none of input_ids, tokens, ids"),
        ([[0.5, 1.5]], {}, r"item 0 is float64 of shape \(2,\), not a row of token ids"),
        ([np.ones((3, 4))], {}, r"item 0 is float64 of shape \(3, 4\).*loss_columns=\('latents',\) and inputs="),
        ([[[1, 2]]], {}, r"item 0 is int64 of shape \(1, 2\)"),
        (ROWS, {"max_length": 4}, r"sequence 0 has 5 tokens, over .*max_length 4"),
        ([[1], []], {}, r"item 1 is empty"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], {}, r"item 0 has 3 tokens and 2 labels"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], {}, r"item 0 has labels .* and item 1 has none"),
        ([], {}, r"the corpus is empty"),
    ],
)
def test_what_is_no_corpus_is_refused(corpus, options, named):
    with pytest.raises(InputError, match=named):
        read_sequences(corpus, **options)


def test_a_folder_made_by_index_trains(tmp_path):
    build(write_jsonl(tmp_path / "text.jsonl", ["word " * n for n in range(1, 12)]), tmp_path / "index")
    model = models.GPT()
    model.tokens, model.head = torch.nn.Embedding(260, 24), torch.nn.Linear(24, 260, bias=False)
    options = {"max_length": 24, "over_length": "split", "steps": 2, "sequences_per_step": 10}
    run = lw.prepare(model, tmp_path / "index", cost=models.mixed_cost(), memory_gib=40, **options)
    losses, _, ids = step_through(run)
    assert np.isfinite(losses).all()
    assert [sum(step.values()) for step in ids] == [10, 10]
    assert run.collator.source.tokens(0).tolist() == [*b"word ", 256]
