"""Checkpoints know the frozen weights that a run began with, and have those that its loop has changed."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.state import checkpoint_files
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import OPTIONS, rows

pytestmark = pytest.mark.usefixtures("unchecked")

CHANGED = "blocks.1.attention.qkv.linear.weight"
BASE = "blocks.0.mlp.0.weight"


def merge(model):
    """Add adapters to the weights below them, and begin them anew."""
    torch.manual_seed(5)
    with torch.no_grad():
        for block in model.blocks:
            adapter = block.attention.qkv
            adapter.linear.weight += (adapter.up.weight @ adapter.down.weight) * adapter.scales[:, None]
            adapter.down.weight.copy_(torch.randn(adapter.down.weight.shape, dtype=torch.float64))
            adapter.up.weight.zero_()


def run_of(model, **options):
    as_started_by_torchrun()
    return lw.prepare(model, rows(), steps=6, **OPTIONS | options)


def train(run, last, *, merges=True):
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        step.update()
        if merges and run.next_step % 2 == 0:
            with run.plain():
                merge(run.model)
        if run.next_step == last:
            break


def trained_in_parts(folder, options):
    """Weights after six steps at once, and in two parts by a fresh model and a checkpoint."""
    found = []
    for parts in ([6], [3, 5, 6]):
        for part in parts:
            run = run_of(model := models.adapted_gpt(), **options)
            if part > parts[0]:
                run.resume(folder)
            train(run, part)
            if part < 6:
                run.save(folder)
            run.close()
        found.append(weights_of(model))
    return found


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"weights": "by-layer"}),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in ((1, {"weights": "by-layer"}), (2, {}))),
    ],
    ids=str,
)
def test_frozen_weights_that_a_loop_changes_are_in_checkpoints(tmp_path, ranks, size, options):
    if size == 1 and options:
        pytest.skip("one rank has all weights")
    for once, in_parts in ranks(size).run(partial(trained_in_parts, tmp_path, options)):
        assert not np.array_equal(once[CHANGED], models.adapted_gpt().state_dict()[CHANGED].numpy())
        for name, value in once.items():
            np.testing.assert_allclose(in_parts[name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a run that changed no frozen weight."""
    run = run_of(models.adapted_gpt())
    train(run, 1, merges=False)
    path = run.save(tmp_path_factory.mktemp("saved"))
    run.close()
    return path


def resumed(path, change):
    """Resume with a model that ``change`` has changed; how far that is."""
    model = models.adapted_gpt()
    with torch.no_grad():
        change(dict(model.named_parameters()))
    with run_of(model) as run:
        return run.resume(path)


@pytest.mark.first_cells(1)
def test_frozen_weights_that_nobody_changed_are_not_stored(saved):
    assert not any(
        name.startswith("frozen") for name in dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
    )
    entry = json.loads((saved / "state.json").read_text())["frozen"]
    assert BASE in entry["start"]
    assert entry["changed"] == {}
    assert resumed(saved, lambda parameters: None) == 1


def test_another_base_model_is_refused_by_the_name_of_a_weight_with_the_way_out(saved):
    message = rf"the frozen weight {BASE} of GPT is not what .* began with, and .*; resume with the same base model"
    with pytest.raises(InputError, match=message):
        resumed(saved, lambda parameters: parameters[BASE][0, 0].add_(1e-9))


def test_a_weight_that_a_loop_has_changed_before_it_resumes_is_refused(saved):
    with run_of(model := models.adapted_gpt()) as run:
        with run.plain():
            merge(model)
        with pytest.raises(
            InputError, match=r"is not what .* \(nor are 2 others\).*; a loop has changed it since prepare"
        ):
            run.resume(saved)


def test_checkpoints_of_older_versions_say_nothing_of_frozen_weights_and_are_taken(saved, tmp_path):
    document = checkpoint_files.read_state(saved)
    del document["frozen"]
    older = tmp_path / saved.name
    older.mkdir()
    for file in saved.iterdir():
        (older / file.name).write_bytes(file.read_bytes())
    (older / "state.json").write_text(checkpoint_files._encoded(document))
    assert resumed(older, lambda parameters: parameters[BASE].add_(1)) == 1


def quantized():
    """A model with a frozen weight of bytes, whose scales are beside it, as bitsandbytes has them."""
    model = models.adapted_gpt()
    model.table = torch.nn.Parameter(torch.arange(12, dtype=torch.uint8), requires_grad=False)
    model.table.quant_state = SimpleNamespace(absmax=torch.ones(3), state2=SimpleNamespace(absmax=torch.ones(())))
    return model


def test_quantized_weights_are_compared_and_stored_with_their_scales(tmp_path):
    with run_of(model := quantized()) as run:
        train(run, 1, merges=False)
        with torch.no_grad():
            model.table.quant_state.state2.absmax.mul_(3)
            model.table[5] = 7
        run.save(tmp_path)
    with run_of(model := quantized()) as run:
        run.resume(tmp_path)
        assert model.table[4:7].tolist() == [4, 7, 6]
        assert float(model.table.quant_state.state2.absmax) == 3
        assert model.table.quant_state.absmax.tolist() == [1, 1, 1]
