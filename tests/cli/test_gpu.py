"""`lengthwise train` on a GPU: profile, steps and a resumed run follow the losses of a CPU."""

import pytest
import torch

from lengthwise.core.run_folder import RunFolder
from tests.cli import runs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEADY = ("optim.schedule=constant",)


def test_a_resumed_run_on_a_gpu_follows_the_losses_of_a_cpu(tmp_path, monkeypatch):
    corpus = runs.make_corpus(tmp_path / "corpus")
    on_gpu = runs.settings(corpus, tmp_path / "gpu", *STEADY, "train.dtype=bfloat16", "train.steps=4")
    runs.lengthwise("train", *on_gpu, is_cold=True)
    runs.lengthwise("train", "--resume", tmp_path / "gpu", "train.steps=6", is_cold=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = runs.settings(corpus, tmp_path / "cpu", *STEADY, "train.dtype=float32", "train.steps=6")
    runs.lengthwise("train", *on_cpu, is_cold=True)
    found, expected = (
        [row["loss/avg"] for row in RunFolder(tmp_path / name).read_metrics()] for name in ("gpu", "cpu")
    )
    assert found == pytest.approx(expected, rel=0.02)
