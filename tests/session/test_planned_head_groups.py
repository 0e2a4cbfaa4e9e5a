"""Plans of prepared models compute attention in groups of heads where nothing else holds the longest sequence."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InfeasibleError
from lengthwise.session import longer_sequences
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import as_started_by_torchrun, noted_schemes, step_through, weights_of
from tests.session.test_prepare import assert_equal_weights

ENOUGH, TIGHT = 1.0, 1_730_000 / 2**30
"""GiB for all that 512 tokens need, and for them with all layers recomputed, in tiles and groups of heads, alone:
1,700,428 bytes; 1,757,194 are needed with all heads at once."""


def train(memory_gib, folder, has_groups=True):
    """Losses, groups of heads by the longest sequence of a micro-batch, groups that were compared, and weights."""
    as_started_by_torchrun()
    number, check_exact, compared = longer_sequences._num_head_groups, longer_sequences.check_exact, []

    def check(*args, **options):
        compared.append(options.get("head_groups", 1))
        check_exact(*args, **options)

    longer_sequences.check_exact = check
    longer_sequences._num_head_groups = number if has_groups else lambda prepared, degree: 1
    torch.manual_seed(0)
    rows = [np.arange(length) % models.VOCAB for length in (512, 40, 30, 200)]
    try:
        run = lw.prepare(
            models.GPT(max_length=512).double(), rows, device="cpu", memory_gib=memory_gib, verbose=False, lr=0.1,
            profile=folder / f"{memory_gib}.json", sequences_per_step=2, steps=2, optimizer="sgd",
            methods=("ulysses",), weights="whole",
            check=memory_gib == TIGHT and has_groups, cost=SimpleCost(capacity=600) if memory_gib == ENOUGH else None,
        )  # fmt: skip
    except InfeasibleError as error:
        return str(error)
    finally:
        longer_sequences.check_exact, longer_sequences._num_head_groups = check_exact, number
    groups = noted_schemes(run, lambda scheme: scheme.head_groups)
    scores = run.score(rows, lambda output, micro_batch: output[0][0].mean(-1))
    losses = step_through(run)[0]
    run.close()
    return losses, groups, compared, weights_of(run.model), scores


def assert_trains_alike(trained, whole):
    """The same as one device that holds all heads at once."""
    for losses, groups, compared, weights, scores in trained:
        for found, other in zip(scores, whole[4], strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-11)
        assert not whole[2] and set(whole[1].values()) == {1}
        assert groups[512] == 2 and compared[-1] == 2
        np.testing.assert_allclose(losses, whole[0], rtol=1e-11)
        assert_equal_weights(weights, whole[3])


@pytest.mark.deep
def test_plans_choose_groups_of_heads_where_the_longest_sequence_does_not_fit_otherwise(ranks, tmp_path):
    assert_trains_alike(ranks(2).run(train, TIGHT, tmp_path), train(ENOUGH, tmp_path))


@pytest.mark.deep
def test_groups_of_heads_are_compared_again_where_they_were_measured_in_an_earlier_run(ranks, tmp_path):
    for message in ranks(2).run(train, TIGHT, tmp_path, False):
        assert isinstance(message, str) and "512 tokens" in message
    expected = train(ENOUGH, tmp_path)
    for _ in range(2):
        assert_trains_alike(ranks(2).run(train, TIGHT, tmp_path), expected)
