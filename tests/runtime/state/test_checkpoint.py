"""A checkpoint holds all of a state, for any number of ranks, and damage is named."""

import json
import logging
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.state import checkpoint, checkpoint_files, saver
from lengthwise.runtime.state.contents import contents
from tests.runtime.state.saved import (
    OPTIMIZERS,
    assert_same_tensors,
    loaded,
    name_of,
    save_trained,
    train,
    trained,
    whole_contents,
)
from tests.runtime.train.runs import local_world, master_weights, new_state
from tests.sim.random_plans import SPEC

optimizers = pytest.mark.parametrize("settings", OPTIMIZERS, ids=name_of)


ROUND_TRIPS = [
    pytest.param(
        settings, num_ranks, dtype, id=f"{num_ranks} in {dtype}-{name_of(settings)}",
        marks=[pytest.mark.deep] * ((num_ranks, settings) != (1, OPTIMIZERS[-1])),
    )
    for settings in OPTIMIZERS
    for num_ranks, dtype in ((1, torch.float64), (3, torch.float64), (2, torch.bfloat16))
]  # fmt: skip


@pytest.mark.parametrize(("settings", "num_ranks", "dtype"), ROUND_TRIPS)
def test_a_loaded_state_trains_on_as_the_saved_one_does_to_the_bit(ranks, tmp_path, settings, num_ranks, dtype):
    ranks(num_ranks).run(_check_round_trip, str(tmp_path), dtype, settings)


def _check_round_trip(path, dtype, settings):
    model, state = trained(dtype, settings)
    checkpoint.save(Path(path), state, {"step": 2, "sampler": {"place": 7}}, keep=2)
    other_model, other = new_state(local_world(), dtype, settings=settings)
    assert not torch.equal(other.master, state.master)
    document = checkpoint.load(checkpoint.latest(Path(path)), other)
    assert (document["step"], document["sampler"]) == (2, {"place": 7})
    assert_same_tensors(whole_contents(other), whole_contents(state))
    assert train(other_model, other, first=2, steps=2) == train(model, state, first=2, steps=2)
    assert_same_tensors(whole_contents(other), whole_contents(state))


def test_steps_that_a_loop_skipped_are_no_updates_of_the_optimizer(ranks, tmp_path):
    ranks(1).run(_check_skipped, str(tmp_path))


def _check_skipped(path):
    _, state = trained(torch.float64, OPTIMIZERS[0])
    checkpoint.save(Path(path), state, {"step": 3, "sampler": {}, "skipped": [1]}, keep=1)
    _, other = new_state(local_world(), torch.float64)
    checkpoint.load(checkpoint.latest(Path(path)), other)
    assert {float(kept["step"]) for kept in other.optimizer.state.values()} == {2.0}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_writers", "num_readers", "settings"),
    [
        (2, 4, OPTIMIZERS[-1]),
        *(pytest.param(m, n, OPTIMIZERS[at], marks=pytest.mark.deep) for m, n, at in ((3, 1, 0), (4, 3, 0), (4, 1, 1))),
    ],
)
def test_any_number_of_ranks_reads_what_any_other_wrote(ranks, tmp_path, settings, num_writers, num_readers):
    check_other_ranks(ranks, tmp_path, settings, num_writers, num_readers)


@pytest.mark.deep
@optimizers
@pytest.mark.parametrize(("num_writers", "num_readers"), [(3, 2), (2, 8), (8, 1)])
def test_any_number_of_ranks_reads_what_any_other_wrote_with_any_optimizer(
    ranks, tmp_path, settings, num_writers, num_readers
):
    check_other_ranks(ranks, tmp_path, settings, num_writers, num_readers)


def check_other_ranks(ranks, tmp_path, settings, num_writers, num_readers):
    expected = ranks(num_writers).run(save_trained, str(tmp_path), torch.float64, settings)[0]
    for found in ranks(num_readers).run(_load_whole, str(tmp_path), torch.float64, settings):
        assert_same_tensors(found, expected)


def test_a_checkpoint_of_an_older_version_has_nothing_of_groups_and_loads_with_a_warning(ranks, tmp_path):
    settings = OptimizerSettings(name="Counted", make=Counted, group_values=("steps",))
    expected = ranks(1).run(save_trained, str(tmp_path), torch.float64, settings)[0]
    file = checkpoint.latest(tmp_path) / "state.json"
    document = checkpoint.read_state(file.parent)
    assert document["optimizer"].pop("groups") == {"0": {"steps": 2}, "1": {"steps": 2}}
    file.write_text(checkpoint_files._encoded(document))
    for tensors, message in ranks(1).run(_load_with_messages, str(tmp_path), settings):
        assert_same_tensors(tensors, expected)
        assert "was written by an older version, without steps of the parameter groups of Counted" in message


class Counted(torch.optim.SGD):
    """Counts steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


def _load_with_messages(path, settings):
    with pytest.MonkeyPatch.context() as patch:
        messages = []
        patch.setattr(checkpoint._log, "warning", lambda text, *values: messages.append(text % values))
        return _load_whole(path, torch.float64, settings), " ".join(messages)


def _load_whole(path, dtype, settings):
    return whole_contents(loaded(path, dtype, settings)[1])


@pytest.mark.parametrize(
    "settings",
    [OPTIMIZERS[0], *(pytest.param(one, marks=pytest.mark.deep) for one in OPTIMIZERS[1:])],
    ids=name_of,
)
def test_a_state_saved_before_its_first_step_trains_as_a_new_one(ranks, tmp_path, settings):
    ranks(2).run(_check_untrained, str(tmp_path), settings)


def _check_untrained(path, settings):
    save_trained(path, torch.float64, settings, steps=0)
    model, state = loaded(path, torch.float64, settings)
    assert train(model, state, first=0, steps=2) == train(
        *new_state(local_world(), torch.float64, settings=settings), first=0, steps=2
    )


@pytest.mark.deep  # by default: tests/cli/test_any_family.py
@pytest.mark.parametrize(
    "settings",
    [OptimizerSettings(), pytest.param(OptimizerSettings(name="adafactor"), marks=pytest.mark.deep)],
    ids=name_of,
)
def test_master_weights_can_be_read_by_one_process_without_ranks(ranks, tmp_path, settings):
    expected = ranks(3).run(_save_and_gather, str(tmp_path), settings)[0]
    found = checkpoint.load_weights(checkpoint.latest(tmp_path), SPEC)
    assert_same_tensors(found, expected)


def _save_and_gather(path, settings):
    _, state = trained(torch.float64, settings)
    checkpoint.save(Path(path), state, {"step": 2}, keep=1)
    return master_weights(state)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(one, marks=[pytest.mark.deep] * (one.name != "adafactor")) for one in OPTIMIZERS],
    ids=name_of,
)
def test_what_a_rank_copies_to_host_memory_is_its_own_share_and_no_more(ranks, settings):
    assert sum(ranks(3).run(_bytes_of_master, settings)) == 8 * SPEC.num_params


def _bytes_of_master(settings):
    _, state = trained(torch.float64, settings)
    copies = {name: content.local for name, content in contents(state).items()}
    kept = [held for of_one in state.optimizer.state.values() for name, held in of_one.items() if name != "step"]
    assert sum(copy.untyped_storage().nbytes() for copy in copies.values()) == (
        state.master.nbytes + sum(tensor.nbytes for tensor in kept if tensor is not None)
    )
    own = {tensor.untyped_storage().data_ptr() for tensor in (state.master, *filter(None.__ne__, kept))}
    assert not own & {copy.untyped_storage().data_ptr() for copy in copies.values() if copy.numel()}
    return sum(copy.nbytes for name, copy in copies.items() if name.startswith("master/"))


@pytest.fixture(scope="module")
def intact(ranks, tmp_path_factory) -> Path:
    """A checkpoint of two ranks with an older one beside it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks(2).run(save_trained, str(folder), torch.float32, steps=1)
    ranks(2).run(save_trained, str(folder), torch.float32, steps=2)
    return checkpoint.latest(folder)


@pytest.mark.parametrize("num_bytes", [24, pytest.param(10**6, marks=pytest.mark.deep)])
def test_a_changed_byte_in_any_file_is_found_and_the_file_named(intact, num_bytes):
    rng = random.Random(0)
    assert len(list(intact.iterdir())) == 4  # two ranks' tensors, what lies where, and state.json
    for file in intact.iterdir():
        original = file.read_bytes()
        most = num_bytes if file.name == "state.json" else min(num_bytes // 2, 40)
        for at in rng.sample(range(len(original)), min(most, len(original))):
            changed = original[:at] + bytes([original[at] ^ rng.randint(1, 255)]) + original[at + 1 :]
            file.write_bytes(changed)
            with pytest.raises(InputError, match=re.escape(f"{file} ")):
                checkpoint.verify(intact)
        file.write_bytes(original)
    checkpoint.verify(intact)


@pytest.mark.parametrize(
    "name",
    ["__1_0.distcp", "state.json", *(pytest.param(n, marks=pytest.mark.deep) for n in ("__0_0.distcp", ".metadata"))],
)
@pytest.mark.parametrize("harm", ["changed", "truncated", "missing"])
def test_every_rank_refuses_a_damaged_checkpoint_and_names_the_file(ranks, intact, name, harm):
    file = intact / name
    original = file.read_bytes()
    try:
        if harm == "missing":
            file.unlink()
        else:
            half = len(original) // 2
            file.write_bytes(original[:half] + (b"" if harm == "truncated" else b"?" + original[half + 1 :]))
        told = ranks(2).run(_refusal, str(intact), SPEC, OptimizerSettings())
    finally:
        file.write_bytes(original)
    assert len(set(told)) == 1
    assert told[0].startswith(f"{file} ")
    assert told[0].endswith("go on from a checkpoint beside it that has files of the right sizes: step_00000001")
    ranks(2).run(_load_whole, str(intact.parent), torch.float32, OptimizerSettings())


def _refusal(path, spec, settings) -> str:
    _, state = new_state(local_world(), torch.float32, spec=spec, settings=settings)
    before = state.master.clone()
    with pytest.raises(InputError) as refused:
        checkpoint.load(Path(path), state)
    assert torch.equal(state.master, before)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 40}, r"parameter 'embedding' is of shape \[37, 12\] there, of shape \[40, 12\] here"),
        ({"num_layers": 5}, r"parameter 'layers\.4\.\w+' is missing there, of shape \[.*\] here"),
        ({"tied_embeddings": True}, r"parameter 'head' is of shape \[37, 12\] there, missing here"),
        ({"rope_theta": 5e5}, r"its digest is [0-9a-f]{16}, that of test is [0-9a-f]{16}"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_what_differs_named(ranks, intact, changes, message):
    for told in ranks(2).run(_refusal, str(intact), replace(SPEC, **changes), OptimizerSettings()):
        assert told.startswith(f"{intact / 'state.json'} holds another model: ")
        assert re.search(message, told)


def test_one_process_refuses_weights_of_another_model(intact):
    with pytest.raises(InputError, match=r"its digest is [0-9a-f]{16}, that of test is"):
        checkpoint.load_weights(intact, replace(SPEC, rope_theta=5e5))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "message"),
    [
        (0, 1, "holds the state of adamw, this run has optim.name=sgd; set optim.name=adamw"),
        pytest.param(
            3,
            0,
            "holds the state of adafactor, this run has optim.name=adamw; set optim.name=adafactor",
            marks=pytest.mark.deep,
        ),
        (1, 2, "holds ['momentum_buffer'] of sgd, which keeps none in this run; set optim.momentum"),
        pytest.param(
            2,
            1,
            "holds no tensors of sgd, which keeps ['momentum_buffer'] in this run; set optim.momentum",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(ranks, tmp_path, saved_with, loaded_with, message):
    ranks(2).run(save_trained, str(tmp_path), torch.float32, OPTIMIZERS[saved_with], steps=1)
    saved = checkpoint.latest(tmp_path)
    for told in ranks(2).run(_refusal, str(saved), SPEC, OPTIMIZERS[loaded_with]):
        assert told.startswith(f"{saved / 'state.json'} {message}")


def test_a_checkpoint_that_would_be_rounded_is_refused_and_one_that_would_not_is_read(ranks, tmp_path):
    ranks(2).run(save_trained, str(tmp_path / "float64"), torch.float64, steps=1)
    saved = checkpoint.latest(tmp_path / "float64")
    for told in ranks(2).run(_refusal, str(saved), SPEC, OptimizerSettings()):
        assert told.startswith(f"{saved / 'state.json'} holds master weights and optimizer state in float64, this run")
    expected = ranks(2).run(save_trained, str(tmp_path / "float32"), torch.float32, steps=1)[0]
    wider = ranks(1).run(_load_whole, str(tmp_path / "float32"), torch.float64, OptimizerSettings())[0]
    assert_same_tensors({name: tensor.float() for name, tensor in wider.items()}, expected)


def test_a_checkpoint_of_another_schema_is_refused_by_name(ranks, tmp_path, monkeypatch):
    """As a checkpoint of version 1 was: without digests; and one of a version to come."""
    old = tmp_path / "step_00000001"
    old.mkdir()
    (old / "state.json").write_text(json.dumps({"schema_version": 1, "num_elements": 7, "step": 1}) + "\n")
    with pytest.raises(InputError, match=r"step_00000001/state\.json has checkpoint schema 1, .* reads 2; go on with"):
        checkpoint.read_state(old)
    ranks(2).run(_save_as_version, str(tmp_path), 3)
    with pytest.raises(InputError, match=r"step_00000002/state\.json has checkpoint schema 3, .* reads 2; go on with"):
        checkpoint.read_state(checkpoint.latest(tmp_path))


def _save_as_version(path, version):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.files, "CHECKPOINT_SCHEMA_VERSION", version)
        save_trained(path)


def test_a_checkpoint_of_another_package_version_loads_with_a_warning(ranks, tmp_path):
    warnings = ranks(2).run(_load_from_other_version, str(tmp_path))
    assert [len(told) for told in warnings] == [1, 0]
    assert warnings[0][0].endswith("step_00000002 was written with lengthwise_version 9.9.9, this run has 0.1.0")


def _load_from_other_version(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "__version__", "9.9.9")
        expected = save_trained(path)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("lengthwise").addHandler(handler)
    try:
        _, state = loaded(path)
    finally:
        logging.getLogger("lengthwise").removeHandler(handler)
    assert_same_tensors(whole_contents(state), expected)
    return told
