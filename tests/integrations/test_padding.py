"""Padded batches: the loss and gradients of the rows alone."""

import numpy as np
import pytest
import torch

from lengthwise import pad
from lengthwise.core.errors import InputError

EXACT = 1e-10
FLOAT32 = 1e-6
EAGER = FLOAT32
"""The eager attention of transformers takes its softmax in float32 whatever the model's type is."""

ROWS = [np.arange(3, 3 + length) % 29 for length in (5, 11, 1, 8)]


@pytest.fixture(scope="module")
def llama():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def rows_alone(model):
    """Sum of the losses of all tokens of the rows, each in a forward of its own, over their number."""
    total = sum(len(row) - 1 for row in ROWS)
    losses = [model(torch.tensor(row)[None]).logits[0, :-1] for row in ROWS]
    targets = [torch.tensor(row)[1:] for row in ROWS]
    return sum(torch.nn.functional.cross_entropy(a, b, reduction="sum") for a, b in zip(losses, targets)) / total


@pytest.mark.parametrize(
    ("attention", "options", "tolerance"),
    [
        ("sdpa", {"mask": "square"}, EXACT),
        ("sdpa", {"mask": "square", "mask_dtype": torch.float64, "length": 16, "rows_to": 6}, EXACT),
        ("sdpa", {"mask": "keys", "length": 13}, EXACT),
        ("sdpa", {"mask": None, "rows_to": 5}, EXACT),
        ("eager", {"mask": "square", "mask_dtype": torch.float64, "length": 16, "rows_to": 6}, EAGER),
    ],
)
def test_a_padded_batch_has_the_loss_and_gradients_of_its_rows_alone(llama, attention, options, tolerance):
    llama.set_attn_implementation(attention)
    expected = rows_alone(llama)
    exact = gradients(llama, expected)
    batch = pad(ROWS, **options)
    output = llama(**batch)  # its own loss is taken in float32
    torch.testing.assert_close(output.loss.double(), expected, rtol=0, atol=FLOAT32)
    targets = batch["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=0, atol=tolerance)
    for found, wanted in zip(gradients(llama, loss), exact):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_padding_is_filled_and_has_no_label():
    batch = pad([[5, 6, 7], {"input_ids": [8], "labels": [9]}], length=4, rows_to=3, pad_token=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1], [1] * 4]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [9, -100, -100, -100], [-100] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4]
    assert set(pad([[5]], mask=None)) == {"input_ids", "labels"}


@pytest.mark.parametrize("dtype", [">f2", ">f4", "<f8"])
def test_arrays_of_any_order_of_bytes_are_padded(dtype):
    rows = [np.arange(6, dtype=dtype).reshape(2, 3), np.ones((4, 3), dtype)]
    batch = pad(rows)["inputs_embeds"]
    assert batch.shape == (2, 4, 3) and batch[0, :2].tolist() == rows[0].tolist()


@pytest.mark.parametrize("name", ["inputs_embeds", "input_features"])
def test_features_are_padded_with_zeros_under_their_name(name):
    rows = [np.ones((3, 2), dtype=np.float32), torch.full((1, 2), 2.0)]
    batch = pad(rows if name == "inputs_embeds" else [{name: row} for row in rows], length=4, rows_to=3, pad_token=7)
    assert set(batch) == {name, "attention_mask"} and batch[name].dtype == torch.float32
    assert batch[name].tolist() == [[[1, 1]] * 3 + [[0, 0]], [[2, 2]] + [[0, 0]] * 3, [[0, 0]] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4]
    labelled = pad([{name: rows[0], "labels": [4, -100, 5]}, {name: rows[1], "labels": np.array([6])}])
    assert labelled["labels"].tolist() == [[4, -100, 5], [6, -100, -100]]


@pytest.mark.parametrize("causal", [True, False])
def test_tokens_attend_to_those_of_their_row_and_padding_to_itself(causal):
    lengths, size = [3, 1], 5
    seen = pad([range(length) for length in lengths], mask="square", causal=causal, length=size, rows_to=3)[
        "attention_mask"
    ]
    assert seen.shape == (3, 1, size, size) and seen.dtype == torch.bool
    for row, length in enumerate([*lengths, 0]):
        for query in range(size):
            allowed = [key for key in range(length) if not causal or key <= query] if query < length else [query]
            assert torch.nonzero(seen[row, 0, query]).flatten().tolist() == allowed
    added = pad([range(3), [1]], mask="square", causal=causal, length=size, rows_to=3, mask_dtype=torch.bfloat16)
    assert ((added["attention_mask"] == 0) == seen).all() and torch.isfinite(added["attention_mask"]).all()


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([], {}, "no row"),
        ([[1, 2], [1, 2, 3]], {"length": 2}, "row 1 has 3 tokens, over length=2"),
        ([[1]] * 3, {"rows_to": 2}, "3 rows are more than rows_to=2"),
        ([[1], []], {}, "row 1 is"),
        ([[0.5]], {}, "row 0 is float64"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "2 tokens and 1 labels"),
        ([[1]], {"mask": "round"}, "mask='round' is not one of 'keys', 'square'"),
        ([torch.ones(2, 3), torch.ones(2, 4)], {}, "row 1 has 4 features a token in torch.float32, the first has 3"),
        ([torch.ones(2, 3), torch.ones(2, 3).half()], {}, "row 1 has 3 features a token in torch.float16"),
        ([torch.ones(2, 3), [1, 2]], {}, r"row 1 has features of shape \[2\] in torch.int64; give numbers \[T, E\]"),
        ([torch.ones(2, 3), torch.ones(0, 3)], {}, r"row 1 has features of shape \[0, 3\]"),
        ([np.ones((2, 3), np.longdouble)], {}, "row 0 has features in float128, which torch does not have"),
        ([np.ones((2, 3), complex)], {}, r"row 0 is complex128 of shape \[2, 3\]; a row is token ids \[T\] or float"),
        ([torch.ones(2, 3, 4)], {}, r"row 0 is float32 of shape \[2, 3, 4\]; a row is"),
        ([torch.ones(2, 3, dtype=torch.bool)], {}, r"row 0 is bool of shape \[2, 3\]; a row is"),
        ([{"x": torch.ones(2, 3), "labels": [1]}], {}, r"2 tokens and labels of shape \[1\]; give one for each"),
        ([{"x": torch.ones(1, 3), "labels": [1]}, {"x": torch.ones(1, 3)}], {}, "row 1 and the first differ"),
    ],
)
def test_what_cannot_be_padded_is_refused(rows, options, said):
    with pytest.raises(InputError, match=said):
        pad(rows, **options)
