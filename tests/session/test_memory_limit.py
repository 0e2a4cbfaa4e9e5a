"""What happens where the memory model is wrong: the allocator of a rank has nothing left."""

import pytest
import torch

from tests.session.memory_limit import train


def test_a_plan_that_does_not_fit_is_made_anew_until_it_does_and_nothing_is_lost(ranks, fresh_ranks):
    """Every token keeps 768 KiB over three layers: 62 of them do not fit 40 MiB on one rank."""
    expected = ranks(1).run(train, None)[0]
    assert not expected[1]
    for losses, events, weights in fresh_ranks(2).run(train, 40):
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)
        assert events and all("ran out of memory" in event for event in events)
