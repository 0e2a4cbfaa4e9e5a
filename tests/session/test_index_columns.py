"""Columns beside ready tokens mean in an index what they mean to ``lengthwise.prepare``."""

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns
from tests.index.test_token_columns import SUFFIXES, build_rows, sequences_of


def sequences_of_items(rows):
    """The same as ``lengthwise.prepare`` reads the rows."""
    columns = ItemColumns(ExpectedColumns())
    sequences = []
    for number, item in enumerate(rows):
        row = columns.read(number, item)
        has_loss = np.ones(len(row.tokens), dtype=bool) if row.labels is None else row.labels != -100
        for start, stop in zip(row.bounds, row.bounds[1:]):
            sequences.append((row.tokens[start:stop].tolist(), has_loss[start + 1 : stop].tolist()))
    return sequences


T, F = True, False
COMBINED = {
    "masks of booleans": [{"completion_mask": [F, F, T, T]}, {"completion_mask": [F, T, T, T]}],
    "masks of fractions": [{"loss_mask": [0.0, 1.0, 1.0, 1.0]}],
    "labels beside a mask": [{"labels": [-100, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}],
    "two masks": [{"completion_mask": [0, 1, 1, 1], "assistant_masks": [0, 1, 0, 1]}],
    "the mask of a prompt": [{"prompt_mask": [1, 1, 0, 0]}, {"prompt_mask": [0, 0, 0, 0]}],
    "label_ids": [{"label_ids": [-100, -100, 3, 4]}],
    "labels before label_ids": [{"labels": [-100, 2, 3, 4], "label_ids": [-100, -100, 3, 4]}],
    "labels in one row, a mask in another": [{"labels": [-100, 2, 3, 4]}, {"completion_mask": [0, 0, 1, 1]}],
    "a class of the row": [{"label": 3}, {"label": 1}],
    "padding": [{"attention_mask": [1, 1, 0, 0]}, {"attention_mask": [0, 1, 1, 0]}, {}],
    "padding and labels": [{"attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 3, 4]}],
    "a prompt after padding": [
        {"attention_mask": [0, 1, 1, 1], "prompt_mask": [0, 1, 0, 0]},
        {"prompt_mask": [1, 0, 0, 0]},
    ],
    "a prompt with padding in it": [{"attention_mask": [0, 1, 1, 1], "prompt_mask": [1, 1, 0, 0]}],
    "a prompt before padding": [{"attention_mask": [1, 1, 1, 0], "prompt_mask": [1, 0, 0, 0]}],
    "a prompt, padding and labels": [
        {"attention_mask": [0, 1, 1, 1], "prompt_mask": [0, 1, 0, 0], "labels": [-100, 2, 3, -100]}
    ],
    "masks beside padding": [{"attention_mask": [0, 1, 1, 1], "completion_mask": [0, 0, 0, 1]}],
    "columns that say nothing": [
        {"url": "x", "special_tokens_mask": [1, 0, 0, 1], "token_type_ids": [0] * 4, "score": 0.5, "weights": None},
        {"segments": [0, 0, 1, 1], "weights": [], "length": 4, "word_ids": [0, None, 1, 2], "mask": "text"},
    ],
    "positions that begin again": [{"position_ids": [0, 1, 0, 1]}, {"position_ids": [0, 1, 2, 3]}, {}],
    "positions and padding": [{"position_ids": [1, 0, 1, 0], "attention_mask": [0, 1, 1, 1]}],
    "numbers and lengths of sequences": [{"seq_idx": [0, 0, 1, 1]}, {"seq_lengths": [3, 1]}, {"seq_lengths": [2, 2]}],
    "packed rows with labels": [{"position_ids": [0, 1, 0, 1], "labels": [-100, 2, -100, 4]}],
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("columns", COMBINED.values(), ids=COMBINED)
def test_an_index_holds_what_prepare_reads(tmp_path, columns, suffix):
    rows = [{"input_ids": [1, 2, 3, 4], **row} for row in columns]
    store = build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "out")
    assert sequences_of(store) == sequences_of_items(rows)


MEANT = {
    "loss_weights": [0.1, 0.5, 1.0, 1.0], "loss_weight": 0.5, "weights": [None, 1, 1, 0], "answer_mask": [0, 0, 1, 1],
    "mask": [F, T, T, T], "target": [-100, 2, 3, 4], "targets": [-100, 2, 3, 4], "Labels": [-100, 2, 3, 4],
    "rewards": [[0, 1], [1]], "token_type_ids": [0, 0, 1, 1], "logprobs": [0.0, -0.5, -1.0, -2.0],
    "pixel_values": [[1, 2], [3, 4]], "cu_seqlens": [0, 2, 4],
}  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", MEANT)
def test_what_prepare_refuses_beside_tokens_an_index_refuses(tmp_path, name, suffix):
    rows = [{"input_ids": [1, 2, 3, 4], name: [] if isinstance(MEANT[name], list) else None} for _ in range(3)]
    rows[2][name] = MEANT[name]
    place = {".jsonl": r"a\.jsonl:3", ".parquet": "row 2", ".tar": r"sample 2 \(2\)"}[suffix]
    with pytest.raises(InputError, match=f"{name} of item 2 "):
        sequences_of_items(rows)
    with pytest.raises(InputError, match=f"{place}: column '{name}' .*--ignore {name}"):
        build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "out")
    store = build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "without", ignore=(name,))
    assert sequences_of(store) == [([1, 2, 3, 4], [T] * 3)] * 3 and store.info["unused_columns"] == [name]
    if MEANT[name] != MEANT["loss_weights"]:
        return
    assert not build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "all", loss="all").has_loss_mask
