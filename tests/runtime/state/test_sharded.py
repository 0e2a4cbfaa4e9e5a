"""The optimization layout: every element owned once, by the rank that core.layout says."""

import pytest
import torch

from lengthwise.core.layout import fully_sharded, replicated, transfers
from tests.runtime.train.runs import local_world, new_state


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_own_the_intervals_of_the_layout_and_decay_what_is_a_matrix(ranks, num_ranks):
    ranks(num_ranks).run(_check_ownership)


def _check_ownership():
    model, state = new_state(local_world(), torch.float64)
    layout = fully_sharded(state.num_elements, state.world.size)
    held = layout.intervals[state.world.rank]
    assert held == ((state.interval,) if state.interval != (0, 0) else ())
    decays = torch.cat([torch.full((p.numel(),), p.ndim > 1) for p in model.parameters()])
    found = torch.cat([torch.full((s.numel(),), flag) for s, flag in state._segments])
    assert torch.equal(found, decays[state.interval[0] : state.interval[1]])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_pull_moves_what_the_layouts_transfers_say(ranks, num_ranks):
    ranks(num_ranks).run(_check_pull)


def _check_pull():
    _, state = new_state(local_world(), torch.float32)
    size, n = state.world.size, state.num_elements
    state.master.fill_(float(state.world.rank))
    state.pull()
    expected = torch.empty(n)
    for move in transfers(fully_sharded(n, size), replicated(n, size)):
        if move.target == state.world.rank:
            expected[move.start : move.end] = float(move.source)
    assert torch.equal(state.weights[:n], expected)


def test_gradients_of_several_backwards_add_up_at_master_precision(ranks):
    ranks(2).run(_check_accumulation)


def _check_accumulation():
    model, state = new_state(local_world(), torch.bfloat16)
    embedding = model.embedding
    for value in (256.0, 1.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (embedding[0, 0] * value).backward()
    assert embedding.grad is None
    assert state.gradients[0].item() == 259.0
    state.push()
    assert not state.gradients.any()
    if state.interval[0] == 0:
        assert state._pushed[0].item() == 518.0
