"""What a loop calls a loss: exact where ranks have no target, exact with terms of other means, refused otherwise."""

import pytest
import torch

from tests.runtime.adapt.loops import masked_mean_alone, train_with_masked_mean


@pytest.mark.parametrize(("num_ranks", "degree", "recomputed"), [(1, 1, 0), (2, 2, 1), (3, 3, 0)])
def test_a_mean_over_no_targets_poisons_no_gradient(ranks, num_ranks, degree, recomputed):
    loss, weights = masked_mean_alone()
    found = ranks(num_ranks).run(train_with_masked_mean, degree, recomputed)
    assert num_ranks == 1 or sum(num_without for *_, num_without in found)
    for mine, theirs, _ in found:
        assert mine == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-11)
