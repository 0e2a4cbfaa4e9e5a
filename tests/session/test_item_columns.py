"""Columns of items mean here what they mean in TRL and transformers: used, harmless, or refused."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lengthwise as lw
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import InputError
from lengthwise.session import stock_run
from lengthwise.session.datasets import read_sequences
from lengthwise.session.meant_labels import check_labels_are_meant
from tests.session import models
from tests.session.columns import (
    OPTIONS,
    assert_equal,
    bert,
    following,
    gpt2,
    gradient,
    learned,
    learned_on_ranks,
    rows,
)
from tests.session.loops import as_started_by_torchrun

pytestmark = pytest.mark.usefixtures("unchecked")


FLOAT32 = 1e-5
"""Losses of transformers are computed in float32."""
ROWS = rows()
HALVES = [np.arange(len(row)) >= len(row) // 2 for row in ROWS]
"""True for the second half of each row, its completion."""
COMPLETIONS = [np.where(half, row, -100) for row, half in zip(ROWS, HALVES)]


def items(**columns):
    """One dictionary for each row, with lists as tokenizers make them."""
    return [
        {"input_ids": row.tolist(), **{name: np.asarray(values[number]).tolist() for name, values in columns.items()}}
        for number, row in enumerate(ROWS)
    ]


@pytest.fixture(scope="module")
def completions_alone():
    """What a loop learns from the second halves alone."""
    return gradient(models.gpt(), ROWS, [following(labels) for labels in COMPLETIONS])


def padded(values, fill, *, left=0, right=0):
    return [np.pad(row, (left, right), constant_values=fill) for row in values]


MASKED_PROMPTS = {
    "labels": items(labels=COMPLETIONS),
    "completion_mask": items(completion_mask=[half.astype(int) for half in HALVES]),
    "assistant_masks": items(assistant_masks=[half.astype(int) for half in HALVES]),
    "assistant_mask of booleans": items(assistant_mask=HALVES),
    "loss_mask of 0.0 and 1.0": items(loss_mask=[half.astype(float) for half in HALVES]),
    "prompt_mask": items(prompt_mask=[(~half).astype(int) for half in HALVES]),
    "two masks": items(completion_mask=[half | True for half in HALVES], assistant_masks=HALVES),
    "labels and a mask": items(labels=ROWS, completion_mask=HALVES),
    "labels and ones": items(labels=COMPLETIONS, loss_mask=[half | True for half in HALVES]),
    "padding at the end": [
        {"input_ids": row, "labels": label, "attention_mask": mask}
        for row, label, mask in zip(
            padded(ROWS, 0, right=5),
            padded(COMPLETIONS, -100, right=5),
            padded([np.ones(len(row), dtype=int) for row in ROWS], 0, right=5),
        )
    ],
    "padding before": [
        {"input_ids": row, "completion_mask": half, "attention_mask": mask}
        for row, half, mask in zip(
            padded(ROWS, 0, left=3),
            padded([half.astype(int) for half in HALVES], 0, left=3),
            padded([np.ones(len(row), dtype=int) for row in ROWS], 0, left=3),
        )
    ],
}


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("name", MASKED_PROMPTS)
def test_a_mask_of_prompts_is_honoured_whatever_it_is_called(name, completions_alone):
    assert_equal(learned(models.gpt(), MASKED_PROMPTS[name]), completions_alone)


def packed(name):
    """Three rows end to end in one item, with a column that says where each begins."""
    found = []
    for first in range(0, len(ROWS), 3):
        part = ROWS[first : first + 3]
        columns = {
            "position_ids": np.concatenate([np.arange(len(row)) for row in part]),
            "seq_idx": np.repeat(np.arange(len(part)), [len(row) for row in part]),
            "seq_lengths": np.array([len(row) for row in part]),
        }
        found.append({"input_ids": np.concatenate(part), name: columns[name]})
    return found


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "seq_lengths"])
def test_rows_that_were_packed_before_are_split_into_their_sequences(name):
    expected = gradient(models.gpt(), ROWS, [following(row) for row in ROWS])
    assert_equal(learned(models.gpt(), packed(name)), expected)


def test_packed_rows_with_padding_and_labels_are_split_as_well():
    item = {
        "input_ids": [1, 2, 3, 4, 5, 0],
        "position_ids": [0, 1, 0, 1, 2, 0],
        "labels": [-100, 2, -100, -100, 5, -100],
        "attention_mask": [1, 1, 1, 1, 1, 0],
    }
    found = read_sequences([item])
    assert [found.tokens(number).tolist() for number in range(2)] == [[1, 2], [3, 4, 5]]
    assert [found.labels(number).tolist() for number in range(2)] == [[-100, 2], [-100, -100, 5]]


def test_token_types_reach_a_forward_that_takes_them():
    types = [np.where(half, 1, 0) for half in HALVES]
    labels = [np.where(np.arange(len(row)) % 3 == 0, row, -100) for row in ROWS]
    expected = gradient(bert(), ROWS, labels, token_type_ids=types)
    assert_equal(learned(bert(), items(labels=labels, token_type_ids=types)), expected, FLOAT32)
    targets = [following(row) for row in ROWS]
    expected = gradient(gpt2(), ROWS, targets, token_type_ids=types)
    assert_equal(learned(gpt2(), items(token_type_ids=types)), expected, FLOAT32)
    zeros = [np.zeros_like(row) for row in ROWS]  # which GPT-2 adds the first token's embedding for
    expected = gradient(gpt2(), ROWS, targets, token_type_ids=zeros)
    assert_equal(learned(gpt2(), items(token_type_ids=zeros)), expected, FLOAT32)


def test_columns_of_sequences_that_ranks_share_are_shared_as_well(ranks):
    types = [np.where(half, 1, 0) for half in HALVES]
    labels = [np.where(np.arange(len(row)) % 3 == 0, row, -100) for row in ROWS]
    expected = gradient(bert(), ROWS, labels, token_type_ids=types)
    assert max(map(len, ROWS)) > 16, "what one rank holds"
    given = items(labels=labels, token_type_ids=types)
    assert_equal(learned(bert(), given, workers=1), expected, FLOAT32)
    for found in ranks(2).run(learned_on_ranks, bert, given):
        assert_equal(found, expected, FLOAT32)


def test_processes_that_read_ahead_read_all_columns():
    import lengthwise as lw

    class Slow(list):
        forbidden = None

        def __getitem__(self, number):
            assert os.getpid() != self.forbidden, "read by the rank itself"
            return super().__getitem__(number)

    types = [np.where(half, 1, 0) for half in HALVES]
    given = Slow(items(completion_mask=HALVES, token_type_ids=types))
    model = gpt2()
    run = lw.prepare(model, given, **{**OPTIONS, "cost": models.mixed_cost(), "workers": 1})
    given.forbidden = os.getpid()
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        assert step.update().loss > 0
    run.close()


def test_labels_and_token_types_are_cut_as_their_tokens_are():
    types = [np.where(half, 1, 0) for half in HALVES]
    given = items(completion_mask=HALVES, token_type_ids=types)
    rows_cut, labels_cut, types_cut = (
        [part for row in values for part in np.array_split(row, -(-len(row) // 7))]
        for values in (ROWS, COMPLETIONS, types)
    )
    expected = gradient(gpt2(), rows_cut, [following(label) for label in labels_cut], token_type_ids=types_cut)
    assert_equal(learned(gpt2(), given, max_length=7, over_length="split"), expected, FLOAT32)


def test_items_whose_tokens_are_hidden_already_are_learned_as_they_are():
    hidden = [np.where(np.arange(len(row)) % 3 == 0, 2, row) for row in ROWS]
    labels = [np.where(np.arange(len(row)) % 3 == 0, row, -100) for row in ROWS]
    given = [{"input_ids": row, "labels": label} for row, label in zip(hidden, labels)]
    expected = gradient(bert(), hidden, labels)
    assert_equal(learned(bert(), given), expected, FLOAT32)
    assert_equal(learned(bert(), given, mask_token_id=2), expected, FLOAT32)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", ["BertForTokenClassification", "GPT2ForTokenClassification"])
def test_a_model_that_classifies_tokens_learns_the_label_of_each_token(kind):
    make = bert if kind.startswith("Bert") else gpt2
    options = {"classifier_dropout": 0.0, "num_labels": 5}
    labels = [np.where(half, row % 5, -100) for row, half in zip(ROWS, HALVES)]
    expected = gradient(make(kind, **options), ROWS, labels)
    assert_equal(learned(make(kind, **options), items(labels=labels)), expected, FLOAT32)
    assert_equal(learned(make(kind, **options), items(label_ids=labels)), expected, FLOAT32)


CLASSIFIERS = {
    "last token": lambda: gpt2("GPT2ForSequenceClassification", num_labels=3),
    "first token": lambda: bert("BertForSequenceClassification", num_labels=3, classifier_dropout=0.0),
    "adapters": lambda: adapted_classifier(),
}
CLASSES = [int(row[0]) % 3 for row in ROWS]


def adapted_classifier():
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    return peft.get_peft_model(CLASSIFIERS["first token"](), config).double()


def classified_alone(model, types):
    """The gradient of the mean loss over sequences, each computed by itself."""
    for row, label, kinds in zip(ROWS, CLASSES, types):
        inputs = {"input_ids": torch.as_tensor(row)[None], "token_type_ids": torch.as_tensor(kinds)[None]}
        (model(**inputs, labels=torch.tensor([label])).loss / len(ROWS)).backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_class_of_a_sequence_weighs_the_same_however_long_it_is(name):
    types = [np.where(half, 1, 0) for half in HALVES]
    make = CLASSIFIERS[name]
    given = [item | {"label": label} for item, label in zip(items(token_type_ids=types), CLASSES)]
    assert_equal(learned(make(), given), classified_alone(make(), types))
    for item, label in zip(given, CLASSES):
        del item["label"]
        item |= {"labels": [label], "attention_mask": [1] * len(item["input_ids"])}
    assert_equal(learned(make(), given, max_length=6, over_length="drop"), _dropped(make, types))


def _dropped(make, types):
    """Of the sequences of at most six tokens."""
    model, short = make(), [number for number, row in enumerate(ROWS) if len(row) <= 6]
    for number in short:
        inputs = {"input_ids": ROWS[number], "token_type_ids": types[number]}
        inputs = {name: torch.as_tensor(values)[None] for name, values in inputs.items()}
        (model(**inputs, labels=torch.tensor([CLASSES[number]])).loss / len(short)).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def test_ranks_classify_sequences_together(ranks):
    make = CLASSIFIERS["last token"]
    zeros = [np.zeros_like(row) for row in ROWS]
    given = [item | {"label": label} for item, label in zip(items(token_type_ids=zeros), CLASSES)]
    expected = classified_alone(make(), zeros)
    for found in ranks(2).run(learned_on_ranks, make_classifier, given, capacity=40):
        assert_equal(found, expected)


def test_a_classifier_that_reads_the_token_that_ends_a_sequence_is_exact():
    from transformers import BartConfig, BartForSequenceClassification

    sizes = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0}
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    torch.manual_seed(0)
    end = 39
    config = BartConfig(**sizes, **layers, encoder_ffn_dim=16, decoder_ffn_dim=16, eos_token_id=end, num_labels=3)
    model = BartForSequenceClassification(config).double()
    rows = [[*(np.asarray(row) % 30 + 3).tolist(), end] for row in ROWS]
    for row, label in zip(rows, CLASSES):
        (model(input_ids=torch.tensor([row]), labels=torch.tensor([label])).loss / len(rows)).backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    assert_equal(learned(model, [{"input_ids": row, "label": label} for row, label in zip(rows, CLASSES)]), expected)


def make_classifier():
    return CLASSIFIERS["last token"]()


@pytest.mark.parametrize(
    ("item", "options", "named"),
    [
        ({"label": 3}, {}, r"label of item 0 is 3, and the model has one label for a sequence, from 0 to 2"),
        ({"label": 0.5}, {}, r"label of item 0 is 0.5"),
        ({"labels": [0, 1, 2]}, {}, r"labels of item 0 is \[0, 1, 2\]"),
        ({}, {}, r"item 0 has no labels, and the model learns from the label of each sequence: give it a label"),
        ({"label": 1, "completion_mask": [0, 1, 1]}, {}, r"item 0 has a mask of tokens with a loss, and the model has"),
        ({"label": 1, "position_ids": [0, 0, 1]}, {}, r"item 0 holds 2 sequences packed into one row"),
        ({"label": 1}, {"over_length": "split", "max_length": 2}, r"has one label for a whole sequence; truncate or"),
    ],
)
def test_items_without_one_class_are_refused_where_sequences_are_classified(item, options, named):
    with pytest.raises(InputError, match=named):
        learned(make_classifier(), [{"input_ids": [1, 2, 3], **item}] * 3, **options)


def test_numbers_and_several_classes_of_a_sequence_are_refused():
    for options in ({"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}):
        with pytest.raises(InputError, match=r"GPT2ForSequenceClassification with .* inputs= make its labels"):
            learned(gpt2("GPT2ForSequenceClassification", **options), [{"input_ids": [1, 2], "label": 1}] * 3)


def test_the_target_that_is_ignored_may_be_any_number():
    labels = [np.where(half, row, 0) for row, half in zip(ROWS, HALVES)]
    expected = gradient(gpt2(), ROWS, [following(label) for label in COMPLETIONS])
    assert_equal(learned(gpt2(), items(labels=labels), ignore_index=0, packing="always"), expected, FLOAT32)
    assert_equal(learned(gpt2(), items(labels=labels), ignore_index=0, packing="never"), expected, FLOAT32)


def test_special_tokens_are_never_hidden():
    from lengthwise.runtime.models.targets import TokenMasking

    masking, special = TokenMasking(seed=3, vocab_size=50, mask_token_id=4), np.arange(40) % 2 == 0
    chosen, put = masking.draw(7, 40, special)
    assert len(chosen) == len(put) == 3 and not special[chosen].any()
    assert [len(values) for values in masking.draw(7, 40, np.ones(40, dtype=bool))] == [0, 0]
    everything, _ = masking.draw(7, 40)
    np.testing.assert_array_equal(masking.draw(7, 40, np.zeros(40, dtype=bool))[0], everything)
    given = items(special_tokens_mask=[np.arange(len(row)) > 0 for row in ROWS])
    firsts = [np.where(np.arange(len(row)) == 0, row, -100) for row in ROWS]
    # One token of each row is left to be predicted: its last layer learns from these alone.
    found = learned(bert(), given, mask_token_id=1)["cls.predictions.bias"]
    targets = {int(label[0]) for label in firsts}
    assert {int(token) for token in (found < -1e-3).nonzero()} == targets


HARMLESS = {
    "text": "some words",
    "id": 7,
    "uuid": None,
    "length": 9,
    "score": 0.5,
    "messages": [{"role": "user", "content": "words"}],
    "tokens": ["so", "me"],
    "label": 1,
    "offset_mapping": [[0, 1]],
    "empty": [],
    "meta": {"url": "there"},
}


def test_columns_that_change_nothing_are_named_once(capsys):
    given = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row), **HARMLESS} for row in ROWS]
    given[3]["surprise"] = "in one item alone"
    learned(models.gpt(), given, verbose=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "not used" in line]
    assert len(lines) == 1
    for name in (*HARMLESS.keys() - {"uuid"}, "attention_mask", "surprise"):
        assert name in lines[0]
    learned(models.gpt(), given, verbose=False)
    assert "not used" not in capsys.readouterr().err


class TakingAny(models.GPT):
    def forward(self, idx, targets=None, **others):
        return super().forward(idx, targets)


@pytest.mark.parametrize("kind", [models.GPT, TakingAny])
def test_a_column_of_integers_by_token_that_nothing_uses_is_warned_of(kind, caplog):
    segments = [np.arange(len(row)) // 2 for row in ROWS]
    zeros = [np.zeros_like(row) for row in ROWS]
    given = items(segments=segments, token_type_ids=zeros, word_ids=segments, segment_ids=[zero + 1 for zero in zeros])
    given = [item | {"attention_mask": [1] * len(item["input_ids"]), "counts": [1, 2, 3]} for item in given]
    learned(kind().double(), given)
    (warning,) = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert "no such argument: segments. " in warning and "loss_columns=('segments',)" in warning


def test_what_random_items_hold_is_another_thing_at_every_read():
    class Augmented:
        def __len__(self):
            return 20

        def __getitem__(self, number):
            return np.random.default_rng().integers(0, 50, 30)

    with pytest.raises(InputError, match=r"item 0 is another one each time that it is read.*default_rng"):
        read_sequences(Augmented())


def test_an_item_that_changes_later_is_noticed_when_it_is_computed():
    given = [{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]} for _ in range(3)]
    found = read_sequences(given)
    assert found.labels(1).tolist() == [-100, 2, 3]
    given[2]["completion_mask"] = [0, 0, 1]
    with pytest.raises(ValueError, match="item 2 is another one each time that it is read"):
        found.tokens(2)


def refusals_of_unlabelled_rows():
    """What a class whose loss does not shift labels says to rows without labels, and with the objective stated."""
    as_started_by_torchrun()
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=61, max_position_embeddings=80, is_encoder_decoder=False, **sizes)
    rows = [[7, 8, 9, 10, 11, 12], [13, 14, 15]]
    options = {"cost": models.mixed_cost(), "memory_gib": 40, "verbose": False}
    with pytest.raises(InputError) as refused:
        lw.prepare(BartForCausalLM(config).double(), rows, **options)
    lw.prepare(BartForCausalLM(config).double(), rows, objective="next-token", **options).close()
    return str(refused.value)


def test_advice_about_missing_labels_is_that_of_whoever_asked():
    prepared = SimpleNamespace(model=nn.Identity(), wrapped_model=SimpleNamespace(labels=SimpleNamespace(shifts=False)))
    for has_loss_mask in (False, True):
        sequences = SimpleNamespace(has_loss_mask=has_loss_mask, labels=None)
        with pytest.raises(InputError, match="; a configuration trains models of next tokens or of hidden") as refused:
            check_labels_are_meant(prepared, PrepareOptions(), sequences, stock_run.WITHOUT_LABELS)
        assert "objective" not in str(refused.value) and "lengthwise.prepare" in str(refused.value)


def test_rows_without_labels_are_refused_where_the_loss_does_not_shift_them(ranks):
    (message,) = ranks(1).run(refusals_of_unlabelled_rows)
    assert "compares the output of each token with the label at the same place" in message
    assert "objective='next-token'" in message


@pytest.mark.parametrize("column", [[0.0, 0.5, 1.0, 0.0], [[0.5], [1.0], [0.0], [1.0]], [1, 0, 0, 1], 0.5])
def test_numbers_that_a_loss_may_be_made_of_are_refused_with_the_option_that_names_them(column):
    given = [{"input_ids": [1, 2, 3, 4], "answer_weight": column}] * 4
    for refused in (given, [(item, item) for item in given]):
        with pytest.raises(InputError, match=r"column answer_weight of .*name it in loss_columns=\('answer_weight',\)"):
            learned(models.gpt(), refused)


def test_columns_that_no_loss_is_made_of_are_refused_without_that_option():
    for column in ({"sizes": [0.5, 1.0]}, {"token_type_ids": [1, 1, 0, 0]}):
        with pytest.raises(InputError, match="leave it out of the items") as refused:
            learned(models.gpt(), [{"input_ids": [1, 2, 3, 4], **column}] * 4)
        assert "loss_columns" not in str(refused.value)
