"""`lengthwise train` with batches that DCP forms: stopped and resumed, with every sequence counted."""

import pytest

from lengthwise.core.run_folder import RunFolder
from tests.cli import runs

FORMED = (
    "plan.policy=dcp-intra", "plan.form_batches=true", "plan.g_max=2", "optim.schedule=constant", "train.dtype=float64",
    "train.log_every=9", "model.num_layers=1", "data.max_length=300",
)  # fmt: skip


def sequences_of(run):
    return [
        sorted(id for pipeline in plan.pipelines for m in pipeline.micro_batches for id in m.pack.ids)
        for plan in run.read_plans().values()
    ]


@pytest.mark.deep
def test_a_run_that_forms_batches_goes_on_with_those_that_wait(tmp_path):
    corpus = runs.make_corpus(tmp_path / "corpus")
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    runs.lengthwise("train", *runs.settings(corpus, whole.path, *FORMED, "train.steps=4"), "--nproc", 2)
    runs.lengthwise("train", *runs.settings(corpus, parts.path, *FORMED, "train.steps=2"), "--nproc", 2)
    runs.lengthwise("train", "--resume", parts.path, "train.steps=4", "--nproc", 2)
    assert sequences_of(parts) == sequences_of(whole)
    losses = [[row["loss/avg"] for row in run.read_metrics()] for run in (parts, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    ledger = parts.read_json("ledger.json")
    assert ledger["sequences_seen"] == sum(map(len, sequences_of(parts))) and ledger["steps"] == 4
