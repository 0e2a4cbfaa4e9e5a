"""lengthwise.Trainer with adapters, other objectives, collators and too little memory: as transformers' own."""

import numpy as np
import pytest
import torch

from lengthwise.core.errors import InputError
from tests.session import models, trainers
from tests.session.columns import SIZES, bert
from tests.session.test_prepare import assert_equal_weights
from tests.session.trainers import adapter, survive, train

FLOAT32 = 1e-6
"""Losses of transformers are computed in float32."""


def both(tmp_path, make, options, **others):
    """Weights of parameters that are trained under transformers' Trainer and under ours, and both trainers."""
    found, used = [], []
    for stock in (True, False):
        trainer = train(tmp_path / str(stock), options, stock=stock, model=make(), **others)
        trained = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
        found.append({name: trainers.weights_of(trainer.model)[name] for name in trained})
        used.append(trainer)
    return found, used


def assert_alike(found, tolerance):
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.deep)])
def test_adapters_are_trained_saved_and_resumed_as_in_transformers(kind, tmp_path):
    import peft

    options = {"save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1 * (kind == "lora")}
    found, (_, ours) = both(tmp_path, lambda: adapter(kind), options)
    assert_equal_weights(found[1], found[0])
    assert all("lora" in name for name in found[0]) and len(found[0]) == (4 if kind == "lora" else 6)
    (checkpoint,) = (tmp_path / "False").glob("checkpoint-2")
    theirs = {path.name for path in (tmp_path / "True" / "checkpoint-2").iterdir()}
    saved = {path.name for path in checkpoint.iterdir()}
    assert saved - {"lengthwise", "schedule.pt"} == theirs - {"optimizer.pt", "scheduler.pt"}
    resumed = train(tmp_path / "resumed", options, resume=str(checkpoint), model=adapter(kind, seed=5))
    assert resumed.state.global_step == 4
    assert_equal_weights({name: trainers.weights_of(resumed.model)[name] for name in found[0]}, found[0])
    ours.save_model(tmp_path / "saved")
    reloaded = peft.PeftModel.from_pretrained(trainers.gpt2(), tmp_path / "saved")
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(tokens).logits, ours.model.eval()(tokens).logits)


def test_adapters_that_add_slots_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"adapter 'default' is PROMPT_TUNING, which puts 3 virtual tokens"):
        train(tmp_path, {}, model=adapter("prompt"))


@pytest.mark.deep
def test_a_step_that_does_not_fit_is_computed_again(ranks, tmp_path):
    whole = train(tmp_path / "whole", {"optim": "sgd"}, stock=True)
    for place in ("forward", "backward"):
        for log, weights, num_failures, events in ranks(2).run(survive, tmp_path / place, place):
            assert_equal_weights(weights, trainers.weights_of(whole.model))
            assert [entry["loss"] for entry in log[:-1]] == pytest.approx(
                [entry["loss"] for entry in whole.state.log_history[:-1]], rel=1e-6
            )
            assert log[-1]["total_flos"] == pytest.approx(whole.state.log_history[-1]["total_flos"], rel=0.2)
            assert num_failures <= 1 and any("ran out of memory" in event for event in events)


def words(count=12, *, classes=None, hidden=False):
    """Items of tokens with labels of their own: classes of tokens, or hidden tokens."""
    found = []
    for number, row in enumerate(models.rows(count, longest=20)):
        is_target = np.arange(len(row)) % 2 == number % 2
        is_target[0] = True
        tokens = np.where(is_target, 2, row) if hidden else row
        labels = np.where(is_target, row if classes is None else row % classes, -100)
        found.append({"input_ids": tokens.tolist(), "labels": labels.tolist(), "attention_mask": [1] * len(row)})
    return found


ONE_BATCH = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "max_steps": 3}
"""transformers takes the mean of micro-batches' means where a model's loss knows no number of targets."""


def padding(items):
    """What collators of transformers make: rows that end in padding, which has no loss."""
    width = -(-max(len(item["input_ids"]) for item in items) // 8) * 8
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([item[name] + [fill] * (width - len(item[name])) for item in items])
        for name, fill in fills.items()
    }


def test_labels_of_tokens_are_learned_as_in_transformers(tmp_path):
    def make():
        return bert("BertForTokenClassification", classifier_dropout=0.0, num_labels=5)

    found, _ = both(tmp_path, make, ONE_BATCH, train_dataset=words(classes=5), data_collator=padding)
    assert_alike(found, FLOAT32)


def test_classes_of_sequences_are_learned_as_in_transformers(tmp_path):
    items = [{"input_ids": item["input_ids"], "label": item["input_ids"][0] % 3} for item in words()]

    def collate(items):
        batch = padding([item | {"labels": [], "attention_mask": [1] * len(item["input_ids"])} for item in items])
        return batch | {"labels": torch.tensor([item["label"] for item in items])}

    def make():
        return bert("BertForSequenceClassification", classifier_dropout=0.0, num_labels=3)

    options = ONE_BATCH | {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    data = {"train_dataset": items, "eval_dataset": items, "data_collator": collate}
    found, used = both(tmp_path, make, options, **data)
    assert_alike(found, FLOAT32)
    theirs, ours = ([log["eval_loss"] for log in t.state.log_history if "eval_loss" in log] for t in used)
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.deep
def test_tokens_that_were_hidden_before_are_learned_as_in_transformers(tmp_path):
    found, _ = both(tmp_path, bert, ONE_BATCH, train_dataset=words(hidden=True), data_collator=padding)
    assert_alike(found, FLOAT32)


@pytest.mark.deep
def test_a_model_that_counts_positions_from_its_padding_token_learns_as_in_transformers(tmp_path):
    """RoBERTa; rows hold that token, which its own forward gives no position."""
    found, _ = both(tmp_path, roberta, ONE_BATCH, train_dataset=words(hidden=True), data_collator=padding)
    assert_alike(found, FLOAT32)


def roberta():
    import transformers

    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.RobertaConfig(
        vocab_size=models.VOCAB, max_position_embeddings=64, pad_token_id=0, **SIZES, **none
    )
    return transformers.RobertaForMaskedLM(config).double()


@pytest.mark.deep
def test_token_types_are_learned_as_in_transformers(tmp_path):
    items = [item | {"token_type_ids": [0] + [1] * (len(item["labels"]) - 1)} for item in trainers.dataset()]
    found, _ = both(tmp_path, trainers.gpt2, {}, train_dataset=items)
    assert_equal_weights(found[1], found[0])


def completion_only(items):
    """As collators of TRL: the prompt, up to a token, has no loss."""
    batch = padding(
        [{"labels": item["input_ids"], "attention_mask": [1] * len(item["input_ids"])} | item for item in items]
    )
    batch["labels"][torch.arange(batch["labels"].shape[1])[None].expand_as(batch["labels"]) < 2] = -100
    return batch


def test_a_collator_that_gives_prompts_no_loss_is_honoured(tmp_path):
    items = [{"input_ids": row.tolist()} for row in models.rows(18, longest=40) if len(row) > 3]
    found, _ = both(tmp_path, trainers.gpt2, {}, train_dataset=items, data_collator=completion_only)
    assert_equal_weights(found[1], found[0])


def test_masks_that_a_collator_passes_on_are_honoured(tmp_path):
    items = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in models.rows(18, longest=40) if len(row) > 3]
    halves = [{**item, "completion_mask": [0, 0] + [1] * (len(item["labels"]) - 2)} for item in items]
    stock = train(tmp_path / "stock", {}, stock=True, train_dataset=items, data_collator=completion_only)
    ours = train(tmp_path / "ours", {"remove_unused_columns": False}, train_dataset=halves)
    assert_equal_weights(trainers.weights_of(ours.model), trainers.weights_of(stock.model))


def tokenizer(side="right"):
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"word{number}": number for number in range(models.VOCAB)}
    names = {"pad_token": "word0", "unk_token": "word1", "mask_token": "word2"}
    inner = Tokenizer(WordLevel(words, unk_token=names["unk_token"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side=side, **names)


@pytest.mark.parametrize(
    "kind", [pytest.param("DataCollatorForSeq2Seq", marks=pytest.mark.deep), "DataCollatorWithFlattening"]
)
def test_collators_of_transformers_are_honoured(kind, tmp_path):
    import transformers

    collate = (
        transformers.DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8)
        if kind == "DataCollatorForSeq2Seq"
        else transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    )
    found, _ = both(tmp_path, trainers.gpt2, {}, data_collator=collate)
    assert_equal_weights(found[1], found[0])


def test_collators_that_draw_are_refused(tmp_path):
    import transformers

    def drops(items):
        batch = {name: torch.tensor([items[0][name]]) for name in items[0]}
        batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
        return batch

    for collate in (transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=True), drops):
        with pytest.raises(InputError, match=r"makes another batch of the same item every time; hide tokens with"):
            train(tmp_path, {}, model=bert(), train_dataset=words(hidden=True), data_collator=collate)


def test_a_collator_that_pads_before_the_tokens_is_refused(tmp_path):
    import transformers

    collate = transformers.DataCollatorForLanguageModeling(tokenizer("left"), mlm=False, pad_to_multiple_of=64)
    with pytest.raises(InputError, match=r"pads item 0 of train_dataset before its tokens, .*padding_side='right'"):
        train(tmp_path, {}, data_collator=collate)


def test_items_that_are_random_are_refused_for_themselves(tmp_path):
    class Random(list):
        def __getitem__(self, number):
            row = np.random.default_rng().integers(1, models.VOCAB, 20).tolist()
            return {"input_ids": row, "labels": row}

    with pytest.raises(InputError, match=r"item 0 is another one each time that it is read"):
        train(tmp_path, {}, train_dataset=Random(range(9)))


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([[1, 2, 3]] * 4, r"cannot collate item 0 of train_dataset, list, by itself"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 70]}] * 4, r"item 0 has label 70, and the model predicts .* 60"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}], r"item 1 has 2 tokens and 1"),
        ([{"input_ids": [1, 2], "labels": [-100, -100]}] * 4, r"no token of the 4 items has a loss"),
    ],
)
def test_items_that_cannot_be_used_are_named(items, named, tmp_path):
    with pytest.raises(InputError, match=named):
        train(tmp_path, {}, train_dataset=items)
