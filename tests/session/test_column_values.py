"""What one item holds, column by column: read as it is meant, or refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.config.prepare_options import read_options
from lengthwise.core.batch import EVERY_TOKEN, MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.session.id_ranges import IdRanges
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns
from lengthwise.session.objectives import expected_columns
from tests.session import models
from tests.session.columns import bert, gpt2

pytestmark = pytest.mark.usefixtures("unchecked")

TAKES = frozenset({"input_ids", "labels", "token_type_ids"})


def read(item, **expected):
    return ItemColumns(ExpectedColumns(**{"arguments": TAKES, **expected})).read(0, {"input_ids": [5, 6, 7], **item})


def test_padding_is_left_out_of_every_column():
    item = {
        "input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "labels": [-100, 1, 2, 3],
        "token_type_ids": [9, 0, 1, 1], "special_tokens_mask": [1, 1, 0, 0], "position_ids": [0, 0, 1, 0],
    }  # fmt: skip
    row = read(item, objective=MASKED)
    assert (row.tokens.tolist(), row.labels.tolist(), row.special.tolist()) == ([5, 6, 7], [1, 2, 3], [1, 0, 0])
    assert row.passed["token_type_ids"].tolist() == [0, 1, 1]
    assert row.bounds == (0, 2, 3)


@pytest.mark.parametrize(
    ("item", "expected", "named"),
    [
        ({"labels": [1, 2, 9]}, {"label_limit": 9}, "item 0 has label 9, and the model predicts labels up to 8"),
        ({"token_type_ids": [0, 1]}, {}, "token_type_ids of item 0 is not 0 everywhere"),
        ({"segments": [0, 1]}, {"arguments": TAKES | {"segments"}}, "and not one integer per token"),
        ({"segments": [0.0, 0.5, 1.0]}, {"arguments": TAKES | {"segments"}}, "and not one integer per token"),
        ({"mask_of_past": [0, 1, 1]}, {"arguments": TAKES | {"mask_of_past"}}, "and not one integer per token"),
        ({"reward": 0.5}, {}, "column reward of item 0 may say what is learned"),
        ({"attention_mask": [1, 1]}, {}, r"attention_mask of item 0 has shape \(2,\), and there are 3 tokens"),
        ({"loss_mask": [0, 1, 1]}, {"objective": EVERY_TOKEN}, "a mask of tokens with a loss but no labels"),
        ({}, {"needs_labels": True}, "item 0 has no labels, and the model learns from the label of each token"),
        ({"label": -1}, {"labels_sequences": True, "label_limit": 3}, "one label for a sequence, from 0 to 2"),
        ({"position_ids": [0, 1, 0], "seq_idx": [0, 1, 1]}, {}, r"begin by position_ids at \[0, 2\] and seq_idx at"),
        ({"position_ids": [0, 1]}, {}, "position_ids of item 0 do not count up from 0"),
        ({"position_ids": [0.0, 1.0, 2.0]}, {}, "position_ids of item 0 is float64"),
        ({"seq_idx": [0, 0]}, {}, "seq_idx of item 0 has 2 numbers for 3 tokens"),
        ({"seq_lengths": [3, 0]}, {}, "seq_lengths of item 0 are 3 tokens in all"),
        ({"seq_lengths": [4, -1]}, {}, "give the length of each of its sequences"),
        ({"seq_lengths": [1, 2]}, {"splits_rows": False}, "item 0 holds 2 sequences packed into one row"),
        ({"input_ids": 7}, {"slot_tokens": 4}, "input_ids of item 0 is a single number; its first axis is to be the"),
        ({"v": [1.0] * 5}, {"loss_columns": ("v",)}, r"\[3\] or \[3, \.\.\.\], or .*; repeat a vec.* to \[3, 5\]"),
        ({"v": np.ones((2, 4))}, {"loss_columns": ("v",)}, r"array for each token, \[3\] or .* whole sequence$"),
        ({"frames": [1, 2, 3]}, {"slot_tokens": 4}, "column frames of item 0 is not known for slots of 4 tokens"),
    ],
)  # fmt: skip
def test_what_would_be_learned_otherwise_is_refused(item, expected, named):
    with pytest.raises(InputError, match=named):
        read(item, **expected)


def test_numbers_of_an_item_are_harmless_and_a_class_is_at_the_first_token():
    assert read({"target_words": np.array(["a", "b", "c"]), "times": np.array(["a", "b"])}).passed == {}
    assert read({"mask_id": 3, "target_number": 4}).passed == {}
    assert read({"labels": [1, 2, 8]}, label_limit=9).labels.tolist() == [1, 2, 8]
    assert read({"number": 3}, slot_tokens=4).passed == {}
    row = read({"label": 2}, labels_sequences=True, label_limit=3)
    assert row.labels.tolist() == [2, -100, -100]


def test_models_that_classify_need_labels_and_know_how_many_classes_there_are():
    options = read_options({})
    classifying = expected_columns(bert("BertForTokenClassification", num_labels=5), options)
    assert (classifying.needs_labels, classifying.label_limit, classifying.objective) == (True, 5, EVERY_TOKEN)
    following = expected_columns(gpt2(), options)
    assert (following.needs_labels, following.label_limit, following.objective) == (False, models.VOCAB, NEXT_TOKEN)
    assert expected_columns(bert(), options).objective == MASKED
    pairs = expected_columns(bert("BertForNextSentencePrediction"), options)
    assert (pairs.label_limit, pairs.labels_sequences) == (2, True)
    tied = gpt2()
    tied.lm_head = nn.Module()
    tied.lm_head.weight = nn.Parameter(torch.zeros(7, 16))
    assert expected_columns(tied, options).label_limit == 7, "a head that is no linear layer"


def electra():
    sizes = {"embedding_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ElectraConfig(vocab_size=models.VOCAB, hidden_size=16, **sizes, **none)
    return transformers.ElectraForPreTraining(config)


def test_a_discriminator_of_tokens_learns_from_the_label_of_each():
    model = electra()
    expected = expected_columns(model, read_options({}))
    assert (expected.objective, expected.needs_labels, expected.label_limit) == (EVERY_TOKEN, True, 2)
    corpus = [{"input_ids": row, "labels": row % 2} for row in models.rows()]
    options = {"cost": models.mixed_cost(), "memory_gib": 40, "verbose": False, "packing": "always"}
    lw.prepare(model, corpus, objective="every-token", **options).close()


class MyPreTrainingModel(transformers.LlamaForCausalLM):
    """A class whose name has a part of those of others."""


def test_what_the_user_says_wins_over_a_guess_by_the_name_of_the_class():
    answers = bert("BertForQuestionAnswering")
    with pytest.raises(InputError, match=r"neither one label .* say objective='every-token' .* inputs= and loss="):
        expected_columns(answers, read_options({}))
    for said in ({"objective": EVERY_TOKEN}, {"loss": read, "objective": EVERY_TOKEN}, {"inputs": read}):
        assert expected_columns(answers, read_options(said)).objective == said.get("objective", NEXT_TOKEN)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    named = MyPreTrainingModel(transformers.LlamaConfig(vocab_size=models.VOCAB, **sizes))
    assert expected_columns(named, read_options({})).objective == NEXT_TOKEN


def test_a_table_that_is_looked_up_by_other_numbers_as_well_is_not_that_of_tokens():
    source = SimpleNamespace(tokens=lambda number: [[0, 1, 2], [4, 5]][number])
    run = SimpleNamespace(collator=SimpleNamespace(source=source, objective=NEXT_TOKEN), model=nn.Module())
    tokens, positions = torch.zeros(9, 2), torch.zeros(5, 2)
    with IdRanges(run) as lookups:
        for ids in ([0, 1, 2], [4, 5]):
            F.embedding(torch.tensor([ids]), tokens)
        for ids in ([0, 1], [0, 1, 2]):
            F.embedding(torch.tensor([ids]), positions)
    lookups.check((8, "item 3"), None)
    with pytest.raises(InputError, match="item 3 has token id 9, Module embeds ids up to 8"):
        lookups.check((9, "item 3"), None)


def test_labels_beyond_the_classes_are_refused_where_one_number_of_classes_is_known():
    source = SimpleNamespace(tokens=lambda number: [[0, 1, 2], [4, 5]][number])
    run = SimpleNamespace(collator=SimpleNamespace(source=source, objective=NEXT_TOKEN), model=nn.Module())
    with IdRanges(run) as lookups:
        F.cross_entropy(torch.zeros(2, 9), torch.tensor([1, 2]))
        F.cross_entropy(torch.zeros(2, 4), torch.tensor([3, 0]))  # of something else than the next tokens
    lookups.check(None, (8, "item 3"))
    with pytest.raises(InputError, match="item 3 has label 9, and Module predicts labels up to 8"):
        lookups.check(None, (9, "item 3"))
    with lookups:
        F.cross_entropy(torch.zeros(2, 20), torch.tensor([1, 2]))
    lookups.check(None, (9, "item 3"))
