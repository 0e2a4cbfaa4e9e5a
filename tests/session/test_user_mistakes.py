"""Whatever is handed to ``prepare`` trains, or is refused by one sentence that names the thing and the way out."""

import copy
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import data

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.session.model_checks import check_model
from tests.session import models
from tests.session.columns import OPTIONS, bert, gpt2, learned

pytestmark = pytest.mark.usefixtures("unchecked")

GOOD = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]


def with_column(name, *values):
    """Items of three tokens with a column; the last value is that of all others."""
    return [{"input_ids": [1, 2, 3], name: values[min(number, len(values) - 1)]} for number in range(4)]


class Failing(data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        raise KeyError(f"row {number}")


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(GOOD)


class Frame:
    """As pandas has it: columns by name."""

    iloc = None

    def keys(self):
        return ["text", "input_ids"]

    def __len__(self):
        return 3

    def __getitem__(self, name):
        raise KeyError(name)

    def __contains__(self, name):
        return name in self.keys()


class Shorter(list):
    def __len__(self):
        return 5


class Picture:
    __array_interface__ = {"shape": (2, 2), "typestr": "|u1", "version": 3}  # noqa: RUF012


NAN = float("nan")
CORPORA = {
    # corpora
    "none": (None, r"NoneType has not"),
    "a number": (7, r"int has not"),
    "a generator": ((row for row in GOOD), r"generator has not \(a stream"),
    "an iterable dataset": (Stream(), r"Stream has not \(a stream"),
    "a loader": (data.DataLoader(GOOD), r"DataLoader gives batches, .*: give its dataset, loader"),
    "splits": ({"train": GOOD, "test": GOOD}, r"dict has the keys train, test: .*, corpus\['train'\]"),
    "columns": ({"input_ids": GOOD}, r"dict has the keys input_ids: give items, \[dict\(zip"),
    "a frame": (Frame(), r"Frame has the keys text, input_ids: give its rows, frame.to_dict\('records'\)"),
    "an empty dictionary": ({}, r"dict has the keys none: give a list of items"),
    "nothing": ([], r"the corpus is empty"),
    "an empty array": (np.zeros((0, 4), dtype=np.int64), r"the corpus is empty"),
    "a folder that is not there": ("no/such/folder", r"no/such/folder"),
    "a dataset that fails": (Failing(), r"item 0 of Failing could not be read \(KeyError: 'row 0'\)"),
    "a dataset with fewer items": (Shorter(GOOD), r"item 3 of Shorter could not be read \(IndexError"),
    "one row": ([1, 2, 3], r"item 0 is int64 of shape \(\), not a row of token ids"),
    "one tensor": (torch.arange(4), r"item 0 is int64 of shape \(\), not a row"),
    # items
    "an item that is none": ([[1, 2], None], r"item 1 is NoneType with None in it, not a row of token ids"),
    "text": (["words"], r"item 0 is text; a corpus holds token ids: tokenise it first"),
    "bytes": ([b"words"], r"item 0 is bytes, .* give np\.frombuffer\(row, np\.uint8\); tokenise text first"),
    "lists of text": ([["so", "me"]], r"item 0 is text"),
    "text in a column": ([{"input_ids": "words"}], r"input_ids of item 0 is text"),
    "text among numbers": ([[1, "a"]], r"item 0 is text"),
    "none among numbers": ([[1, None]], r"item 0 is list with None in it"),
    "an item without tokens": ([[1, 2], []], r"item 1 is empty"),
    "a tensor without tokens": ([torch.zeros(0, dtype=torch.int64)], r"item 0 is empty"),
    "a batch of one": ([[[1, 2]]], r"item 0 is int64 of shape \(1, 2\), .*: give that row, as tokenizer\(text\)"),
    "pairs of tensors": ([(torch.tensor([1, 2]), torch.tensor([2, 3]))], r"item 0 is a tuple of 2 rows; a sequence"),
    "one long row": (torch.arange(9), r"item 0 is int64 of shape \(\), .*; where the corpus is one long row, cut it"),
    "ragged pairs": ([([1, 2], [3])], r"item 0 is a tuple of 2 rows; a sequence is one row of token ids"),
    "fractions": ([[0.5, 1.5]], r"item 0 is float64 of shape \(2,\)"),
    "ids as booleans": ([np.zeros(3, bool)], r"item 0 is bool of shape \(3,\), .*booleans: give them as integers"),
    "whole numbers as floats": ([[1, 2], [3.0, 4.0]], r"item 1 is float64 of shape \(2,\), .*: give them as integers"),
    "not a number": ([[1, NAN]], r"item 0 is float64"),
    "complex numbers": ([np.array([1j, 2])], r"item 0 is complex128"),
    "booleans": ([np.array([True, False])], r"item 0 is bool of shape \(2,\)"),
    "bfloat16": ([torch.ones(3, dtype=torch.bfloat16)], r"item 0 is float32 of shape \(3,\)"),
    "dates": ([np.array(["2026-01-01"], dtype="datetime64[D]")], r"item 0 is datetime64\[D\]"),
    "more than int64 holds": ([np.array([1, 2**63], dtype=np.uint64)], r"item 0 has token id 9223372036854775808"),
    "more than any integer holds": ([[1, 2**70]], r"item 0 is list with 1180591620717411303424 in it"),
    "a negative token": ([[1, 2], [3, -1]], r"item 1 has token id -1; ids are from 0"),
    "a token beyond the vocabulary": ([[1, 2], [3, 61]], r"item 1 has token id 61, GPT embeds ids up to 60"),
    "a label beyond the vocabulary": (with_column("labels", [1, 2, 61]), r"item 0 has label 61, .* up to 60"),
    "no such column": ([{"text": "words"}], r"item 0 has text, and none of input_ids, tokens, ids; tokenise it first"),
    "no columns": ([{}], r"item 0 has no columns, and none of"),
    "no tokens in it": ([{"input_ids": None}], r"item 0 has no columns, and none of input_ids"),
    "nothing to predict": ([[1], [2]], r"no token of the 2 items has a loss: next tokens"),
    "nothing to learn": (with_column("labels", [-100] * 3), r"no token of the 4 items has a loss: all labels"),
    # labels
    "labels in the second item alone": (with_column("labels", None, [1, 2, 3]), r"item 1 has labels .* and item 0 has"),
    "labels missing once": (with_column("labels", [1, 2, 3], None, [1, 2, 3]), r"item 0 has labels .* and item 1 has"),
    "a mask missing once": (with_column("loss_mask", [1, 1, 1], None), r"item 0 has labels .* and item 1 has none"),
    "fewer labels": (with_column("labels", [1, 2]), r"item 0 has 3 tokens and 2 labels"),
    "one label": (with_column("labels", 1), r"item 0 has 3 tokens and labels of shape \(\)"),
    "labels that are fractions": (with_column("labels", [0.5, 1, 2]), r"labels of item 0 is float64; labels are"),
    "labels that are text": (with_column("labels", ["a", "b", "c"]), r"labels of item 0 is <U1"),
    "labels that are negative": (with_column("labels", [1, -1, 2]), r"item 0 has label -1; .* -100 where there is no"),
    # masks
    "a mask of twos": (with_column("completion_mask", [0, 1, 2]), r"completion_mask of item 0 has 2 in it"),
    "a mask that is short": (with_column("loss_mask", [0, 1]), r"loss_mask of item 0 has shape \(2,\), and there"),
    "a prompt in the middle": (with_column("prompt_mask", [0, 1, 0]), r"prompt_mask of item 0 .* begins the item"),
    "a mask nobody knows": (with_column("learn_mask", [0, 1, 1]), r"column learn_mask of item 0 may say"),
    "weights": (with_column("weight", 0.5), r"column weight of item 0 may say what is learned"),
    "weights of tokens": (with_column("token_weights", [0.5, 1.0, 1.0]), r"column token_weights of item 0 may say"),
    "a hidden token": (with_column("attention_mask", [1, 0, 1]), r"item 0 has an attention_mask that hides token 1"),
    "a mask of numbers of sequences": (with_column("attention_mask", [1, 1, 2]), r"attention_mask of item 0 has 2 in"),
    "a square mask": (with_column("attention_mask", np.ones((3, 3))), r"attention_mask of item 0 has shape \(3, 3\)"),
    "padding alone": (with_column("attention_mask", [1, 1, 1], [0, 0, 0]), r"item 1 has an attention_mask of zeros"),
    "labels on padding": (
        [{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0], "labels": [1, 2, 0]}],
        r"item 0 has labels on its padding",
    ),
    # positions and other columns
    "positions from one": (with_column("position_ids", [1, 2, 3]), r"position_ids of item 0 do not count up from 0"),
    "positions that jump": (with_column("position_ids", [0, 1, 3]), r"position_ids of item 0 do not count"),
    "positions of pictures": (with_column("position_ids", [[0, 1, 2]] * 3), r"position_ids of item 0 is int64"),
    "lengths of other rows": (with_column("seq_lengths", [2, 2]), r"seq_lengths of item 0 are 4 tokens in all"),
    "token types": (with_column("token_type_ids", [0, 1, 1]), r"column token_type_ids of item 0 is not 0 everywhere"),
    "targets": (with_column("targets", [2, 3, -100]), r"column targets of item 0 is an argument .* labels"),
    "other tokens": (with_column("idx", [7, 8, 9]), r"column idx of item 0 is an argument .* made from input_ids"),
    "pixels": (with_column("pixel_values", np.zeros((3, 8, 8))), r"column pixel_values of item 0 is float64 of shape"),
    "pictures": (with_column("image", Picture()), r"column image of item 0 holds Picture"),
    "sound": (with_column("audio", {"array": [0.1], "path": None}), r"column audio of item 0 holds dict"),
    "vectors": (with_column("inputs_embeds", np.zeros((3, 4))), r"column inputs_embeds of item 0 is float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_that_cannot_be_used_is_refused_by_one_sentence(name):
    corpus, named = CORPORA[name]
    model = models.gpt()
    with pytest.raises(InputError, match=named) as refused:
        lw.prepare(model, corpus, **{"cost": models.mixed_cost(), **OPTIONS})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "forward" not in vars(model), "the model is given back"


CORPORA_THAT_TRAIN = {
    "lists of several dtypes": [[1, 2, 3, 4], np.array([5, 6, 7], dtype=np.int16), torch.tensor([8, 9])],
    "unsigned numbers": [np.array(row, dtype=np.uint64) for row in GOOD],
    "numbers from zero": dict(enumerate(GOOD)),
    "labels that are none": [{"input_ids": row, "labels": None} for row in GOOD],
    "token types of zeros": [{"input_ids": row, "token_type_ids": [0] * len(row)} for row in GOOD],
    "numbers of items": [{"input_ids": row, "idx": number} for number, row in enumerate(GOOD)],
    "a subset": data.Subset(GOOD, [0, 1, 2]),
    "odd objects": [{"input_ids": row, "price": Decimal(1), "kind": object} for row in GOOD],
    "keys that are no text": [{"input_ids": row, 7: 8} for row in GOOD],
}


@pytest.fixture(scope="module")
def learned_from_lists():
    return learned(models.gpt(), GOOD)


@pytest.mark.parametrize("name", CORPORA_THAT_TRAIN)
def test_other_corpora_are_the_same_as_lists(name, learned_from_lists):
    found = learned(models.gpt(), CORPORA_THAT_TRAIN[name])
    for key, value in learned_from_lists.items():
        assert torch.equal(value, found[key]), key


def compiled_in_place():
    model = models.gpt()
    model.compile()
    return model


def without_values():
    with torch.device("meta"):
        return models.GPT()


def prepared():
    model = models.gpt()
    lw.prepare(model, GOOD, cost=models.mixed_cost(), **OPTIONS)
    return model


def around_a_prepared_one():
    outer = nn.Module()
    outer.inner = prepared()
    return outer


def lazy():
    model = models.gpt()
    model.blocks[1].mlp[0] = nn.LazyLinear(48)
    return model


def with_bounded_rows():
    model = models.gpt()
    model.tokens.max_norm = 1.0
    return model


def clamping():
    model = models.gpt()
    model.blocks[0].mlp[0].register_forward_hook(lambda module, args, output: module.weight.data.clamp_(-0.1, 0.1) * 0)
    return model


def complex_numbers():
    model = models.gpt()
    model.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))


def on_two_devices():
    model = gpt2()
    model.hf_device_map = {"transformer": 0, "lm_head": "cpu"}
    return model


class Demanding(models.GPT):
    """Its forward needs what nobody gives it."""

    def forward(self, idx, targets, temperature):
        return super().forward(idx / temperature, targets)


class Failing2D(models.GPT):
    def forward(self, idx, targets=None):
        _, _, channels = idx.shape
        return super().forward(idx * channels, targets)


def wrapped_model(kind, **options):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(gpt2(), config)


MODELS = {
    "a name": (lambda: "gpt2", r"the first argument is the model, an nn.Module; str is none: load it"),
    "a class": (lambda: models.GPT, r"an nn.Module; type is none"),
    "compiled": (lambda: torch.compile(models.gpt()), r"is compiled as a whole, .*: give model._orig_mod"),
    "compiled in place": (compiled_in_place, r"GPT is compiled, .*: leave compile\(\) out"),
    "on the meta device": (without_values, r"tokens.weight of GPT is on the meta device.*weights='by-layer'"),
    "lazy": (lazy, r"blocks.1.mlp.0.weight of GPT has no shape yet, .*; call the model once"),
    "with rows of a largest norm": (with_bounded_rows, r"changes its parameter tokens.weight \(Embedding, by emb"),
    "that clamps its weights": (clamping, r"changes its parameter blocks.0.mlp.0.weight \(Linear, by clamp_\)"),
    "with complex numbers": (complex_numbers, r"filter of GPT is complex, .*: hold it as torch.view_as_real"),
    "prepared before": (prepared, r"GPT cannot be prepared: it was prepared before .* run.close\(\)"),
    "around one prepared before": (around_a_prepared_one, r"its part inner was prepared before"),
    "for parallel devices": (lambda: nn.DataParallel(models.gpt()), r"DataParallel sums .*: give DataParallel.module"),
    "of pictures": (vit, r"ViTForImageClassification takes pixel_values, and items are rows of token ids"),
    "without layers": (lambda: nn.Linear(3, 3), r"Linear has no nn.ModuleList, nn.Sequential or nn.ModuleDict"),
    "without a loss": (lambda: gpt2("GPT2Model"), r"GPT2Model returns no loss; say how to make one"),
    "frozen": (lambda: models.gpt().requires_grad_(False), r"GPT trains none of its \d+ parameters.*is_trainable=True"),
    "a prompt that is tuned": (
        lambda: wrapped_model("PromptTuningConfig", num_virtual_tokens=4),
        r"adapter 'default' is PROMPT_TUNING, which puts 4 virtual tokens before each sequence",
    ),
    "a prefix that is tuned": (lambda: wrapped_model("PrefixTuningConfig", num_virtual_tokens=4), r"is PREFIX_TUNING"),
    "an adapter that looks at gradients": (
        lambda: wrapped_model("AdaLoraConfig", target_modules=["c_attn"], total_step=9),
        r"adapter 'default' is ADALORA, which chooses its ranks by gradients",
    ),
    "an adapter of sparse tensors": (
        lambda: wrapped_model("ShiraConfig", r=2, target_modules=["lm_head"]),
        r"adapter 'default' is SHIRA, .*; use LoRA",
    ),
    "an adapter that is activated by tokens": (
        lambda: wrapped_model("LoraConfig", target_modules=["c_attn"], alora_invocation_tokens=[5, 6]),
        r"activated LoRA \(alora_invocation_tokens=\[5, 6\]\), .*packing='never' and recompute='none'",
    ),
    "an adapter of parameters": (
        lambda: wrapped_model("LoraConfig", target_modules=[], target_parameters=["lm_head.weight"]),
        r"adapter 'default' has target_parameters='lm_head.weight': .*; name modules in target_modules",
    ),
    "on two devices": (on_two_devices, r"GPT2LMHeadModel lies on 2 devices \(0, cpu\)"),
    "with more arguments": (Demanding, r"the forward of Demanding fails .* 'temperature'\); say how .* inputs="),
    "of other shapes": (Failing2D, r"the forward of Failing2D fails .*not enough values to unpack"),
    "hidden tokens, none to hide by": (bert, r"BertForMaskedLM predicts hidden tokens: .* mask_token_id"),
    "of sequences": (lambda: bert("BertForSequenceClassification"), r"no labels, .* the label of each sequence"),
    "of pairs": (lambda: bert("BertForNextSentencePrediction"), r"no labels, .* the label of each sequence"),
    "of choices": (lambda: bert("BertForMultipleChoice"), r"BertForMultipleChoice has neither one label"),
    "of answers": (lambda: bert("BertForQuestionAnswering"), r"BertForQuestionAnswering has neither"),
    "of tokens without labels": (lambda: bert("BertForTokenClassification"), r"item 0 has no labels, and"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_prepared_is_refused_by_one_sentence(name):
    make, named = MODELS[name]
    model = make()
    before = _values(model)
    with pytest.raises(InputError, match=named) as refused:
        lw.prepare(model, GOOD, **{"cost": models.mixed_cost(), **OPTIONS})
    assert "\n" not in str(refused.value)
    assert all(torch.equal(before[key], value) for key, value in _values(model).items()), "its weights are as they were"


def _values(model):
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {key: value.detach().clone() for key, value in named if not (is_lazy(value) or value.is_meta)}


class IgnoringMinusOne(models.GPT):
    """Ignores the targets that nanoGPT does."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return logits, nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-1)


class OneTooFar(models.GPT):
    def forward(self, idx, targets=None):
        return super().forward(idx[:, torch.arange(idx.shape[1]) + 1], targets)


class TakesMore(models.GPT):
    def forward(self, idx, targets=None, **more):
        return super().forward(idx, targets)


def loss_of(output, micro_batch, ignored=-100, name="labels"):
    return nn.functional.cross_entropy(output[0][0], getattr(micro_batch, name), ignore_index=ignored)


def inputs_of(micro_batch, **more):
    return {"idx": micro_batch.tokens[None], **more}


LINE = r"fails with .*, in test_user_mistakes\.py, line \d+"
IN_BOTH = r"where there is no loss, micro_batch\.labels is -100 and micro_batch\.targets is ignore_index= of prepare"
FUNCTIONS = {
    # what they return
    "a dictionary": ({"loss": lambda *_: {"loss": 1}}, r"^loss= returned a dict; return one number, a tensor without"),
    "a tuple": ({"loss": lambda *_: (1, 2)}, r"^loss= returned a tuple; return one number"),
    "no loss": ({"loss": lambda *_: None}, r"^loss= returned None; return one number"),
    "a float": ({"loss": lambda *_: 1.0}, r"^loss= returned a float; return one number"),
    "a tensor": ({"inputs": lambda batch: batch.tokens[None]}, r"^inputs= returned a Tensor; return a dictionary"),
    "no inputs": ({"inputs": lambda batch: None}, r"^inputs= returned None; return a dictionary of the forward's"),
    "another argument": (
        {"inputs": lambda batch: inputs_of(batch, x=1), "loss": loss_of},
        r"^inputs= makes the argument 'x', which the forward of GPT does not take; it takes idx, targets",
    ),
    "its own inputs": ({"inputs": lambda batch: {**batch.inputs}}, r"^inputs= reads micro_batch\.inputs, .*\.tokens"),
    # what they raise
    "a wrong key": ({"loss": lambda *_: {}["logits"]}, rf"^loss= of GPT {LINE} \(KeyError.*change what loss= computes"),
    "a wrong axis": ({"loss": lambda output, _: output[0][0, 0, 0, 0]}, rf"^loss= of GPT {LINE} \(IndexError: too"),
    "a wrong type": ({"loss": lambda output, _: output + 1}, rf"^loss= of GPT {LINE} \(TypeError: .*change what loss="),
    "a wrong column": ({"inputs": lambda batch: {}["x"]}, rf"^inputs= of GPT {LINE} \(KeyError: .* what inputs= comp"),
    # labels
    "labels, and -1 is ignored": (
        {"loss": lambda *given: loss_of(*given, ignored=-1), "inputs": inputs_of, "ignore_index": -1},
        rf"^loss= of GPT fails .* -100 is out of bounds.*{IN_BOTH} \(-1\): take micro_batch\.targets for a loss",
    ),
    "labels, and nobody says -1": (
        {"loss": lambda *given: loss_of(*given, ignored=-1)},
        rf"{IN_BOTH} \(-100\): let it ignore -100, or take micro_batch\.targets and set ignore_index= of prepare to -1",
    ),
    "targets, and -100 is ignored": (
        {"loss": lambda *given: loss_of(*given, name="targets"), "inputs": inputs_of, "ignore_index": -1},
        rf"Target -1 is .*{IN_BOTH} \(-1\): take micro_batch\.labels for a loss that ignores -100, or let it",
    ),
    "fewer classes": (
        {"loss": lambda output, batch: nn.functional.cross_entropy(output[0][0, :, :2], batch.labels)},
        r"^loss= of GPT fails .* is out of bounds.*; labels are from 0 to the number of classes less 1",
    ),
    "a model that ignores -1": (
        {"model": IgnoringMinusOne},
        rf"^the forward of IgnoringMinusOne {LINE} .* label -100; set ignore_index= of prepare to -1, which",
    ),
    "an index of the forward's": (
        {"model": OneTooFar}, rf"^the forward of OneTooFar {LINE} \(IndexError: index \d+ is out of bounds for dim"
    ),
}  # fmt: skip


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_inputs_and_loss_do_wrong_is_said_of_them_and_not_of_the_forward(name):
    options, named = FUNCTIONS[name]
    make = options.get("model", models.GPT)
    options = {"cost": models.mixed_cost(), **OPTIONS, **{key: options[key] for key in options if key != "model"}}
    with pytest.raises(InputError, match=named) as refused:
        lw.prepare(make(), GOOD, **options)
    assert "\n" not in str(refused.value) and "contextlib" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (IgnoringMinusOne, {"ignore_index": -1}),
        (
            models.GPT,
            {
                "ignore_index": -1,
                "inputs": inputs_of,
                "loss": lambda *given: loss_of(*given, ignored=-1, name="targets"),
            },
        ),
        (TakesMore, {"inputs": lambda batch: inputs_of(batch, x=1), "loss": loss_of}),
    ],
)
def test_what_the_errors_of_labels_and_arguments_advise_is_prepared(make, options):
    lw.prepare(make(), GOOD, **{"cost": models.mixed_cost(), **OPTIONS}, **options).close()


def test_a_hook_that_sees_parts_of_gradients_is_refused_until_it_is_removed():
    model = models.gpt()
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InputError, match=r"head\.weight of GPT has a hook .* remove it"):
        lw.prepare(model, models.rows())
    handle.remove()
    check_model(model)


def test_labels_and_masks_that_a_model_cannot_learn_are_refused():
    classes = [{"input_ids": [1, 2], "labels": [0, 1]}, {"input_ids": [1, 2], "labels": [0, 2]}]
    cases = (
        (lambda: bert("BertForTokenClassification"), classes, {}, r"item 1 has label 2, .* up to 1"),
        (gpt2, with_column("labels", [1, 2, 70]), {}, r"item 0 has label 70, and the model predicts labels up to 60"),
        (bert, with_column("completion_mask", [0, 1, 1]), {"mask_token_id": 3}, r"objective masked draws"),
        (bert, GOOD, {"mask_token_id": 61}, r"mask_token_id=61, and BertForMaskedLM has tokens 0 to 60"),
        (bert, with_column("bbox_mask", [0, 1, 1]), {"mask_token_id": 3}, r"column bbox_mask of item 0 may say"),
        (lambda: bert("BertForTokenClassification"), classes, {"objective": "next-token"}, r"leave objective out"),
    )  # fmt: skip
    for make, corpus, options, named in cases:
        with pytest.raises(InputError, match=named):
            lw.prepare(make(), corpus, **{"cost": models.mixed_cost(), **OPTIONS, **options})


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("make", [models.gpt, gpt2, bert])
def test_a_copy_of_a_prepared_model_computes_as_a_plain_model(make):
    model = make().eval()
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        before = model(tokens)[0]
    run = lw.prepare(model, GOOD, **{"cost": models.mixed_cost(), "mask_token_id": 3, **OPTIONS})
    alone, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        assert torch.equal(alone(tokens)[0], before) and torch.equal(average(tokens)[0], before)
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.wrapped_model.loss_of(model(**micro_batch.inputs), micro_batch))
        step.update()
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad(), run.plain():
        assert torch.equal(alone(tokens)[0], before)
        now = model(tokens)[0]
        assert not torch.equal(now, before) and not torch.equal(average(tokens)[0], before)
    run.close()
    lw.prepare(alone, GOOD, **{"cost": models.mixed_cost(), "mask_token_id": 3, **OPTIONS}).close()


def test_resuming_from_a_folder_without_checkpoints_names_the_folder_to_give(tmp_path):
    run = lw.prepare(models.gpt(), GOOD, **{"cost": models.mixed_cost(), **OPTIONS})
    with pytest.raises(InputError, match=r"there is nothing of that name; name the folder that was given to run\.save"):
        run.resume(tmp_path / "typo")
    run.close()


def test_scores_of_nothing_are_refused_as_scores():
    run = lw.prepare(models.gpt(), GOOD, **{"cost": models.mixed_cost(), **OPTIONS})
    with pytest.raises(InputError, match=r"^run\.score\(items\): no rank brought an item; bring one at least"):
        run.score([], lambda output, micro_batch: output)
    run.close()


def test_a_forward_that_was_replaced_before_is_there_again_afterwards():
    model = models.gpt()
    mine = model.forward
    model.forward = lambda *args, **kwargs: mine(*args, **kwargs)
    given = model.forward
    run = lw.prepare(
        model,
        GOOD,
        **{"cost": models.mixed_cost(), **OPTIONS},
        inputs=lambda micro_batch: {"idx": micro_batch.tokens[None], "targets": micro_batch.targets[None]},
    )
    run.close()
    assert model.forward is given


def test_adapters_of_weights_learn_what_they_learn_alone():
    from tests.session.columns import assert_equal, following, gradient

    for kind, options in (
        ("LoraConfig", {"r": 2, "init_lora_weights": False}),
        ("IA3Config", {"feedforward_modules": []}),
    ):
        torch.manual_seed(1)
        model = wrapped_model(kind, target_modules=["c_attn"], fan_in_fan_out=True, **options).double()
        rows = [np.array(row) for row in GOOD]
        expected = gradient(copy.deepcopy(model), rows, [following(row) for row in rows])
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        found = learned(model, rows)
        assert_equal({name: found[name] for name in trained}, {name: expected[name] for name in trained}, 1e-5)
        assert not any(found[name].any() for name in found.keys() - trained)
