"""A checkpoint is complete or not there, and damage is named."""

from pathlib import Path

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.sharded import ShardedState
from tests.runtime.train.runs import BETAS, DECAY, EPS, SPEC, local_world, new_state


def saved(path: str, dtype: torch.dtype) -> ShardedState:
    """State after one made-up step, saved under ``path``."""
    _, state = new_state(local_world(), dtype)
    state.gradients.copy_(torch.linspace(-1, 1, len(state.gradients)))
    state.push()
    state.step(lr=1e-2, clip=1.0)
    state.pull()
    checkpoint.save(Path(path), state, {"step": 1}, keep=2)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_state_survives_a_checkpoint_to_the_bit(ranks, tmp_path, dtype, num_ranks):
    ranks(num_ranks).run(_check_round_trip, str(tmp_path), dtype)


def _check_round_trip(path, dtype):
    state = saved(path, dtype)
    _, other = new_state(state.world, dtype)
    assert not torch.equal(other.weights, state.weights)
    assert checkpoint.load(checkpoint.latest(Path(path)), other)["step"] == 1
    assert torch.equal(other.weights, state.weights)
    for name, tensor in state.owned().items():
        assert torch.equal(other.owned()[name], tensor), name


def test_master_weights_can_be_read_by_one_process_without_ranks(ranks, tmp_path):
    expected = ranks(3).run(_whole_weights, str(tmp_path))[0]
    found = checkpoint.load_weights(checkpoint.latest(tmp_path))
    model = build_model(SPEC, dtype=torch.float64)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert torch.equal(torch.cat(list(found.values())), expected)


def _whole_weights(path):
    state = saved(path, torch.float64)
    return state.weights[: state.num_elements].clone()


def test_saving_a_step_again_replaces_it_whole(ranks, tmp_path):
    ranks(2).run(_save_twice, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]


def _save_twice(path):
    saved(path, torch.float32)
    saved(path, torch.float32)


def test_unfinished_and_damaged_checkpoints_are_refused_by_name(ranks, tmp_path):
    with pytest.raises(InputError, match="no complete checkpoint"):
        checkpoint.latest(tmp_path)
    ranks(2).run(_save_twice, str(tmp_path))
    ranks(2).run(_check_damage, str(tmp_path))


def _check_damage(path):
    import torch.distributed as dist

    folder = checkpoint.latest(Path(path))
    _, state = new_state(local_world(), torch.float32)
    other = build_model(SPEC, dtype=torch.float32)
    other.head = None
    smaller = ShardedState(other, local_world(), betas=BETAS, eps=EPS, weight_decay=DECAY)
    with pytest.raises(InputError, match="another model: parameter 'head'"):
        checkpoint.load(folder, smaller)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in folder.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:50])
    dist.barrier()
    with pytest.raises(InputError, match="a file is damaged or missing"):
        checkpoint.load(folder, state)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "state.json").write_text("{")
    dist.barrier()
    with pytest.raises(InputError, match="not a complete checkpoint"):
        checkpoint.load(folder, state)
