"""Labels of ready tokens stay in the index, and every use of it sees the same tokens with a loss."""

import json

import numpy as np
import pytest

from lengthwise.config.run_config import DataConfig, PartConfig
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lr_scaling import mean_size
from lengthwise.data.corpus import open_corpus
from lengthwise.data.sampler import Sampler
from lengthwise.index.store import open_index
from tests.index.build import build, files_of

NUMBERS = np.random.default_rng(0)
ROWS = [NUMBERS.integers(0, 400, size).tolist() for size in NUMBERS.integers(2, 40, 60)]
LABELS = [[-100 if k < len(row) // 2 else token for k, token in enumerate(row)] for row in ROWS]


def write_rows(path, **columns):
    """Rows as JSON lines, Parquet or Arrow, by the suffix."""
    if path.suffix == ".jsonl":
        rows = (dict(zip(columns, values)) for values in zip(*columns.values()))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    pa = pytest.importorskip("pyarrow")
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


def masks(labels):
    """Which tokens are predicted: those with a label, but for the first, before which there is nothing."""
    return [[k > 0 and label != -100 for k, label in enumerate(row)] for row in labels]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("column", ["labels", "completion_mask"])
def test_an_index_keeps_which_tokens_have_a_loss(tmp_path, name, column):
    values = LABELS if column == "labels" else [[int(label != -100) for label in row] for row in LABELS]
    source = write_rows(tmp_path / name, **{"input_ids": ROWS, column: values})
    store = build(source, tmp_path / "out", unit_bytes=500)
    assert [store.tokens(id).tolist() for id in range(len(store))] == ROWS
    assert [store.loss_mask(id).tolist() for id in range(len(store))] == masks(LABELS)
    assert store.info["schema_version"] == 2
    assert store.info["num_loss_tokens"] == sum(map(sum, masks(LABELS)))
    store.verify_tokens()


def test_the_digest_tells_masks_apart_and_labels_of_every_token_are_none(tmp_path):
    plain = build(write_rows(tmp_path / "plain.jsonl", input_ids=ROWS), tmp_path / "plain", field="input_ids")
    every = write_rows(tmp_path / "every.jsonl", input_ids=ROWS, labels=ROWS)
    some = write_rows(tmp_path / "some.jsonl", input_ids=ROWS, labels=LABELS)
    assert build(every, tmp_path / "every").digest == plain.digest
    assert not open_index(tmp_path / "every").has_loss_mask and "loss_mask.bin" not in files_of(tmp_path / "every")
    assert build(some, tmp_path / "all", loss="all").digest == plain.digest
    assert build(some, tmp_path / "some").digest != plain.digest
    assert plain.info["schema_version"] == 1 and plain.loss_mask(3) is None


def test_workers_and_units_do_not_change_a_byte(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", input_ids=ROWS * 5, labels=LABELS * 5)
    one = files_of(build(source, tmp_path / "one", unit_bytes=2000).path)
    assert files_of(build(source, tmp_path / "two", unit_bytes=2000, workers=2).path) == one
    assert files_of(build(source, tmp_path / "three", unit_bytes=1 << 20).path)["loss_mask.bin"] == one["loss_mask.bin"]


@pytest.mark.parametrize("rule", ["truncate", "split", "drop"])
def test_targets_of_what_a_length_rule_leaves_are_counted_as_they_are_read(tmp_path, rule):
    source = write_rows(tmp_path / "a.jsonl", input_ids=ROWS, labels=LABELS)
    build(source, tmp_path / "masked")
    build(write_rows(tmp_path / "b.jsonl", input_ids=ROWS[:9]), tmp_path / "plain", field="input_ids")
    parts = (PartConfig(index=str(tmp_path / "masked")), PartConfig(index=str(tmp_path / "plain")))
    for config in (DataConfig(index=parts[0].index), DataConfig(mixture=parts)):
        corpus = open_corpus(config.model_copy(update={"max_length": 13, "over_length": rule}))
        for id, length in enumerate(corpus.lengths.lengths.tolist()):
            mask = corpus.loss_mask(id)
            assert mask is None or len(mask) == len(corpus.tokens(id)) == length
            assert corpus.lengths.targets[id] == (length - 1 if mask is None else mask[1:].sum())
        batch = next(Sampler(corpus.lengths, seed=1, sequences_per_step=8))
        assert batch.num_targets == corpus.lengths.targets[list(batch.ids)].sum() != batch.num_tokens - 8
        size = mean_size(
            corpus.lengths, by="targets", objective="next-token", tokens_per_step=None, sequences_per_step=len(corpus)
        )
        assert size == corpus.lengths.targets.sum()


def test_counting_in_blocks_changes_nothing(tmp_path, monkeypatch):
    store = build(write_rows(tmp_path / "a.jsonl", input_ids=ROWS, labels=LABELS), tmp_path / "out")
    ids, starts = np.arange(len(store)), np.zeros(len(store), dtype=np.int64)
    whole = store.count_targets(ids, starts, store.lengths.lengths)
    monkeypatch.setattr("lengthwise.index.store._BLOCK", 7)
    assert store.count_targets(ids, starts, store.lengths.lengths).tolist() == whole.tolist()
    assert whole.sum() == store.info["num_loss_tokens"]


def test_a_sequence_without_a_target_is_named_or_counted(tmp_path):
    labels = [*LABELS[:4], [-100] * len(ROWS[4]), *LABELS[5:7], [ROWS[7][0], *[-100] * (len(ROWS[7]) - 1)], *LABELS[8:]]
    source = write_rows(tmp_path / "a.jsonl", input_ids=ROWS, labels=labels)
    with pytest.raises(InputError, match=r"a\.jsonl:5 has no token with a loss: 'labels'.*--on-empty drop"):
        build(source, tmp_path / "out")
    store = build(source, tmp_path / "dropped", on_empty="drop")
    left = [row for k, row in enumerate(ROWS) if k not in (4, 7)]
    assert [store.tokens(id).tolist() for id in range(len(store))] == left
    assert [store.loss_mask(id).tolist() for id in range(len(store))] == masks(LABELS[:4] + LABELS[5:7] + LABELS[8:])
    assert (store.info["ledger"]["no_loss"], store.info["ledger"]["examples"]["no_loss"]) == (
        2,
        ["a.jsonl:5", "a.jsonl:8"],
    )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1, 2], "has 3 tokens and 2 values in 'labels'; give one for each token"),
        ([-100, 2, 9], "'labels' has 9 for token 3; a label is the token's own id, or -100"),
        ([-100, -1, 3], "'labels' has -1 for token 2"),
        (["a"], "'labels' must be a list of whole numbers"),
    ],
)
def test_what_is_no_label_is_refused_by_row(tmp_path, labels, words):
    source = write_rows(tmp_path / "a.jsonl", input_ids=[[1, 2, 3]] * 2, labels=[[-100, 2, 3], labels])
    with pytest.raises(InputError, match=f"a.jsonl:2.*{words}"):
        build(source, tmp_path / "out")
    if labels != ["a"]:
        parquet = write_rows(tmp_path / "a.parquet", input_ids=[[1, 2, 3]] * 2, labels=[[-100, 2, 3], labels])
        with pytest.raises(InputError, match=f"row 1.*{words}"):
            build(parquet, tmp_path / "table")


def test_a_changed_mask_is_noticed(tmp_path):
    store = build(write_rows(tmp_path / "a.jsonl", input_ids=ROWS, labels=LABELS), tmp_path / "out")
    content = bytearray((store.path / "loss_mask.bin").read_bytes())
    content[5] ^= 1
    (store.path / "loss_mask.bin").write_bytes(content)
    with pytest.raises(CheckError, match=r"the loss masks in .* are not the ones indexed"):
        open_index(store.path).verify_tokens()
    (store.path / "loss_mask.bin").write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"loss_mask\.bin has"):
        open_index(store.path)
