"""Training on an index with labels is training with ignored labels, to the last digits of float64."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.config.run_config import load
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.corpus import open_corpus
from lengthwise.runtime.models.registry import build_model
from lengthwise.session.trained_model import resolve_model
from tests.cli.runs import lengthwise, settings

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
LR, STEPS, MAX_LENGTH = 0.5, 4, 48
PLAIN_SGD = (
    "optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.clip_norm=0", "optim.schedule=constant",
    f"optim.lr={LR}", "train.dtype=float64", f"train.steps={STEPS}", "model.vocab_size=64",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    numbers = np.random.default_rng(0)
    tokens = [numbers.integers(0, 64, size).tolist() for size in [3, 90, 140, *numbers.integers(4, 40, 60).tolist()]]
    has_loss = [[k > 2 and numbers.random() < 0.4 for k in range(len(row))] for row in tokens]
    has_loss[1] = [k > 60 for k in range(90)]  # of two pieces, the first has none
    return [(row, np.where(mask, row, -100).tolist()) for row, mask in zip(tokens, has_loss)]


@pytest.fixture(scope="module")
def index(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    lines = (json.dumps({"input_ids": tokens, "labels": labels}) for tokens, labels in rows)
    (folder / "rows.jsonl").write_text("\n".join(lines))
    lengthwise("index", folder / "rows.jsonl", "--out", folder / "index", "--on-empty", "drop", "--workers", 1)
    return folder / "index"


def reference(folder, rows):
    """Losses of plain SGD on one device over the same sequences, whose labels are cut and shifted here."""
    config = load(folder.config, [])
    corpus = open_corpus(config.data)
    model = build_model(resolve_model(config, corpus), dtype=torch.float64, seed=config.seed)
    rows = [row for row in rows if any(label != -100 for label in row[1][1:])]
    (view,) = (part.view for part in corpus.parts)
    losses = []
    for _, plan in sorted(folder.read_plans().items()):
        total, count = 0.0, 0
        for id in [id for p in plan.pipelines for m in p.micro_batches for id in m.pack.ids]:
            cut = slice(int(view.starts[id]), int(view.starts[id]) + int(view.lengths.lengths[id]))
            tokens, labels = (torch.tensor(column[cut]) for column in rows[int(view.base_ids[id])])
            targets = F.pad(labels[1:], (0, 1), value=-100)
            total = total + model(tokens, (0, len(tokens)), targets)
            count += int((targets != -100).sum())
        assert plan.loss_normaliser == max(1, count)
        (total / count).backward()
        losses.append(total.item() / count)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return losses


RING = ("plan.policy=static", "--method", "ring", "--degree", "2")


@pytest.mark.parametrize(
    "how",
    [
        ("plan.policy=packed", "data.prefetch=0"),
        *(pytest.param(p, marks=pytest.mark.deep) for p in (RING, ("plan.policy=padded",))),
    ],
)
def test_steps_are_those_of_one_device_with_ignored_labels(index, rows, tmp_path, how):
    cut = (f"data.max_length={MAX_LENGTH}", "data.tokens_per_step=300")
    arguments = settings(index, tmp_path / "run", *cut, *PLAIN_SGD, "train.checkpoint_every=0", *how)
    told = lengthwise("train", *arguments, "--nproc", 2).stderr
    assert "sequences have no token with a loss since data.max_length cut them" in told
    folder = RunFolder(tmp_path / "run")
    losses = [row["loss/avg"] for row in folder.read_metrics()]
    assert losses == pytest.approx(reference(folder, rows), rel=EXACT)


@pytest.mark.deep
def test_a_resumed_run_goes_on_with_the_same_labels(index, rows, tmp_path):
    cut = (f"data.max_length={MAX_LENGTH}", "data.tokens_per_step=300")
    lengthwise("train", *settings(index, tmp_path / "run", *cut, *PLAIN_SGD, "train.steps=2"))
    lengthwise("train", "--resume", tmp_path / "run", f"train.steps={STEPS}", "--nproc", 2)
    folder = RunFolder(tmp_path / "run")
    losses = [row["loss/avg"] for row in folder.read_metrics()]
    assert losses == pytest.approx(reference(folder, rows), rel=EXACT)


def test_stats_say_how_many_tokens_have_a_loss(index, rows):
    num_loss_tokens = sum(label != -100 for _, labels in rows for label in labels[1:])
    assert json.loads(lengthwise("stats", index, "--json").stdout)["num_loss_tokens"] == num_loss_tokens
    assert f"loss: {num_loss_tokens:,} of " in lengthwise("stats", index).stdout
    cut = lengthwise("stats", index, f"data.max_length={MAX_LENGTH}", "data.over_length=split")
    assert "no such token in " in cut.stdout
