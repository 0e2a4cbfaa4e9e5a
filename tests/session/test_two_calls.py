"""Two calls of a model in a micro-batch draw different noise, the same under every plan."""

import pytest

from lengthwise.core.errors import InputError
from tests.session.test_prepare import assert_equal_weights
from tests.session.two_calls import MODELS, train_twice

PLANS = (("ring", {}), ("ulysses", {"recompute": "none"}), ("alone", {}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name in ("slopes", "dropout"))) for name in MODELS]
)
def test_each_call_of_a_micro_batch_has_noise_of_its_own_that_no_plan_changes(ranks, name):
    ((apart, expected),) = train_twice(name, [("alone", {"recompute": "none", "check": False})])
    assert apart > 1e-3
    for trained in ranks(2).run(train_twice, name, PLANS[:2] if name == "attention dropout" else PLANS):
        for apart, weights in trained:
            assert apart is None or apart > 1e-3
            assert_equal_weights(weights, expected)


def test_random_slopes_of_a_model_that_is_computed_sequence_by_sequence_are_refused():
    """Torch writes them after they were saved for the backward, and what is offloaded has none."""
    with pytest.raises(InputError, match=r"RReLU draws slopes in a way .*; use nn\.LeakyReLU or nn\.PReLU instead"):
        train_twice("slopes", [("alone", {"packing": "never"})])


def test_so_has_each_call_of_a_model_that_is_computed_sequence_by_sequence(ranks):
    never = {"packing": "never"}
    ((apart, expected),) = train_twice("dropout", [("alone", never | {"recompute": "none", "check": False})])
    assert apart > 1e-3
    for ((_, weights),) in ranks(2).run(train_twice, "dropout", [("alone", never)]):
        assert_equal_weights(weights, expected)
