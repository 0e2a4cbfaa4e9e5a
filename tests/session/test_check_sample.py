"""A model is compared on every kind of slot that its corpus has, not on those of the first sequence alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.session import check_sample
from lengthwise.session.check_sample import MOST, DistinctSlots, special_tokens
from tests.session import models

SEPARATOR = 7
OPTIONS = {"cost": models.mixed_cost(), "memory_gib": 40, "steps": 1, "sequences_per_step": 6, "packing": "always"}


def rows_with_one_separator(number=4):
    rows = [[token if token != SEPARATOR else SEPARATOR + 1 for token in row] for row in map(list, models.rows())]
    rows[number][len(rows[number]) // 2] = SEPARATOR
    return rows


class CountsDocuments(models.GPT):
    """A token that follows a separator is another one."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        logits = logits * (1 + (idx == SEPARATOR).cumsum(1))[..., None]
        return logits, F.cross_entropy(logits[0], targets[0])


class WeighsSeparators(models.GPT):
    """Separators weigh more in the mean."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        weight = torch.ones(logits.shape[-1], dtype=logits.dtype)
        weight[SEPARATOR] = 9.0
        return logits, F.cross_entropy(logits[0], targets[0], weight=weight)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [(CountsDocuments, "learns something else from packs"), (WeighsSeparators, "learns something else from packs")],
)
def test_what_packs_change_at_one_token_of_one_late_sequence_is_noticed_before_the_run(kind, said):
    with pytest.raises(CheckError, match=said):
        lw.prepare(kind(), rows_with_one_separator(), **OPTIONS)


def test_a_separator_that_comes_after_many_other_tokens_is_noticed_before_the_run():
    tokens = 100 + np.random.default_rng(0).permutation(1600)
    rows = [*tokens.reshape(-1, 40), np.append(tokens[:9], [SEPARATOR, SEPARATOR, *tokens[9:19]])]
    model = CountsDocuments()
    model.tokens, model.head = torch.nn.Embedding(1700, 24), torch.nn.Linear(24, 1700, bias=False)
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(model, rows, **OPTIONS)


class MeanOfAllSlots(models.GPT):
    """Slots whose target is ignored count in the mean."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return logits, F.cross_entropy(logits[0], targets[0], reduction="none").mean()


def test_a_mean_that_counts_ignored_labels_is_noticed_where_the_first_sequence_ignores_none():
    items = [{"input_ids": list(row), "labels": list(row)} for row in models.rows()]
    items[3]["labels"][: len(items[3]["labels"]) // 2] = [-100] * (len(items[3]["labels"]) // 2)
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(MeanOfAllSlots(), items, objective="every-token", **OPTIONS)


def test_each_value_of_each_column_is_kept_once():
    kinds = DistinctSlots()
    kinds.add(np.array([3, 3, 5]), np.array([3, -100, 5]), {"types": np.array([0, 0, 0])})
    kinds.add(np.array([5, 3, 3, 9]), np.array([5, 3, 3, 3]), {"types": np.array([0, 0, 1, 0])})
    columns = {name: values.tolist() for name, values in kinds.columns().items()}
    assert columns == {"tokens": [3, 3, 5, 3, 9], "labels": [3, -100, 5, 3, 3], "types": [0, 0, 0, 1, 0]}


def test_of_a_corpus_with_more_kinds_of_slots_than_are_kept_the_first_are_kept():
    kinds = DistinctSlots()
    kinds.add(np.array([7, 7, 8, 7]), np.array([1, 1, 1, -100]), {})
    assert kinds.columns()["tokens"].tolist() == [7, 8, 7] and kinds.columns()["labels"].tolist() == [1, 1, -100]
    kinds.add(np.arange(100, 100 + 2 * MOST), np.arange(2 * MOST), {})
    assert len(kinds.columns()["tokens"]) == MOST
    assert kinds.columns()["tokens"].tolist()[:3] == [7, 8, 7]


def test_of_more_kinds_than_are_kept_those_come_first_that_are_likely_to_have_a_meaning():
    """Tokens that a config names, the least and the greatest, and those of most sequences."""
    kinds, named, usual = DistinctSlots(special=[5000, 2]), 5000, 7000
    tokens = np.random.default_rng(0).permutation(np.arange(1000, 9001))
    late = [*tokens[tokens != usual].reshape(-1, 32), *[np.array([usual, usual])] * 3, np.array([0, 9999, 10**6])]
    for row in late:
        kinds.add(row, row, {})
    kept = kinds.columns()["tokens"].tolist()
    assert len(kept) == MOST == len(set(kept)) and kept[0] == named
    assert {0, 9999, 10**6, usual, *range(1000, 1030), *range(8800, 9000)} <= set(kept)


def test_numbers_beyond_those_that_are_told_apart_are_kept_with_others_that_are_new():
    kinds = DistinctSlots()
    kinds.add(np.array([1 << 40, -(1 << 40)]), np.array([3, 4]), {})
    assert kinds.columns()["labels"].tolist() == [3, 4]


def test_of_a_long_corpus_fewer_items_are_looked_at(monkeypatch):
    monkeypatch.setattr(check_sample, "_LOOKED", 100)
    kinds = DistinctSlots()
    for number in range(1000):
        kinds.add(np.full(10, number), None, {})
    assert 30 < len(kinds.columns()["tokens"]) < 80


def test_the_configs_of_a_model_name_tokens():
    config = LlamaConfig(eos_token_id=[7, 9], pad_token_id=3, vocab_size=40)
    config.text_config = LlamaConfig(bos_token_id=11)
    assert special_tokens(SimpleNamespace(config=config)) >= {7, 9, 3, 11}
    assert special_tokens(torch.nn.Linear(1, 1)) == frozenset()


NO_TEXT, CLASSES = 5, [0, 1, 2, 3, 4, 6, 7, 8, 9]
"""Class ids of items; the first is a value between others, of one late item."""


class SeesClass(models.GPT):
    """A value of a column changes the whole pack."""

    def forward(self, idx, kind, targets):
        kind = kind.flatten(1) if kind.dim() > 2 else kind
        logits = super().forward(idx)[0] * (1.0 + (kind == NO_TEXT).any())
        return logits, F.cross_entropy(logits[0], targets[0])


def classified(value_of, *, tokens=None):
    draws = np.random.default_rng(0)
    rows = [row if tokens is None else np.full_like(row, tokens) for row in map(np.asarray, models.rows())] * 4
    kinds = [NO_TEXT if number == 17 else int(draws.choice(CLASSES)) for number in range(len(rows))]
    return [{"input_ids": row, "kind": value_of(kind, len(row))} for row, kind in zip(rows, kinds)]


FORMS = {
    "of the item": lambda kind, length: kind,
    "of one token": lambda kind, length: np.where(np.arange(length) == length // 2, kind, 0).astype(np.uint8),
    "of two channels": lambda kind, length: np.stack([np.arange(length) % 9 * 100, np.full(length, kind)], axis=1),
}


def made(micro_batch):
    return {
        "idx": micro_batch.tokens[None],
        "kind": micro_batch.column("kind")[None],
        "targets": micro_batch.labels[None],
    }


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("tokens", [None, 0])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_value_between_others_in_a_column_for_the_loss_is_noticed_before_the_run(form, tokens):
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(SeesClass(), classified(form, tokens=tokens), inputs=made, loss_columns=("kind",), **OPTIONS)


def test_each_value_of_a_column_of_few_is_kept_and_of_others_none():
    slots, draws = DistinctSlots(), np.random.default_rng(0)
    for number in range(40):
        tokens = 10_000 + np.arange(100 * number, 100 * number + 100)
        few = np.full(100, NO_TEXT if number == 30 else number % 4)
        few[1:] = draws.integers(0, 4, 99)
        columns = {"few": few, "flag": few > 3, "many": tokens**2, "real": draws.normal(size=100)}
        slots.add(tokens, None, {}, columns)
    kinds = slots.columns()
    assert len(kinds["tokens"]) == MOST
    assert set(kinds["few"].tolist()) == {0, 1, 2, 3, NO_TEXT}
    assert set(kinds["flag"].tolist()) == {False, True}
