"""`lengthwise export` of checkpoints of any optimizer: Hugging Face safetensors with exactly the master weights."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.models.hf_folder import load_weights
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.runtime.state.saved import OPTIMIZERS, name_of, train, trained
from tests.runtime.train.runs import master_weights
from tests.sim.random_plans import SPEC


@pytest.fixture
def run_folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("{}")
    folder.write_json("model.json", asdict(SPEC))
    folder.write_json("corpus.json", {"max_length": 30, "eos_id": 0, "indexes": {"text": str(tmp_path)}})
    return folder


@pytest.mark.parametrize("settings", [OPTIMIZERS[0], pytest.param(OPTIMIZERS[3], marks=pytest.mark.deep)], ids=name_of)
def test_the_exported_weights_are_the_master_weights_to_the_bit(ranks, run_folder, cli, tmp_path, settings):  # noqa: F811
    first, second = ranks(2).run(_save_two, str(run_folder.checkpoints), settings)[0]
    code, stdout, _ = cli("export", run_folder.path, "--out", tmp_path / "newest", "--json")
    assert code == 0
    assert json.loads(stdout)["checkpoint"] == str(run_folder.checkpoints / "step_00000002")
    assert cli("export", run_folder.path, "--out", tmp_path / "older", "--checkpoint", "step_00000001")[0] == 0
    for name, expected in (("older", first), ("newest", second)):
        model = build_model(SPEC, dtype=torch.float64)
        load_weights(model, tmp_path / name)
        for parameter, weight in model.named_parameters():
            assert torch.equal(weight, expected[parameter]), parameter


def _save_two(path, settings):
    model, state = trained(torch.float64, settings, steps=1)
    found = [master_weights(state)]
    checkpoint.save(Path(path), state, {"step": 1}, keep=2)
    train(model, state, first=1, steps=1)
    checkpoint.save(Path(path), state, {"step": 2}, keep=2)
    return [*found, master_weights(state)]


def test_damaged_and_foreign_checkpoints_are_not_exported(ranks, run_folder, cli, tmp_path):  # noqa: F811
    ranks(2).run(_save_two, str(run_folder.checkpoints), OPTIMIZERS[0])
    file = run_folder.checkpoints / "step_00000002" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, _, stderr = cli("export", run_folder.path, "--out", tmp_path / "out")
    assert code == 2
    assert f"{file} has changed since it was written" in stderr.replace("\n", "")
    run_folder.write_json("model.json", {**asdict(SPEC), "num_heads": 2, "head_size": 12})
    code, _, stderr = cli("export", run_folder.path, "--out", tmp_path / "out", "--checkpoint", "step_00000001")
    assert code == 2
    assert "holds another model: its digest is" in stderr
    assert not (tmp_path / "out").exists()
